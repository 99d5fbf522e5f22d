"""The fastest plan with any degrees, by simulation of the plans that are estimated to be the fastest.

First come whole replicas that keep everything, with neighbouring plans (`planner.neighbours`); then all
stages that may divide state or recompute in part, so that neither technique makes a plan slower. For many
blocks on many devices the second search runs only if nothing fits otherwise. If plans take much longer than a
known plan of another microbatch size, only few are examined. Recomputation is trimmed, and the best plan's
recomputed tensors go to hosts or peers instead if that is faster.

Cost: a search of `planner.hybrid` for each, and a simulation for every number of stages, from the fewest
estimated seconds on, until estimates exceed the simulated seconds or a budget of work has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from pipefit.errors import UsageError
from pipefit.memory import lent_bytes
from pipefit.planner.evaluation import HOST
from pipefit.planner.hybrid import candidates, fastest
from pipefit.planner.hybrid.divided_state import Reader
from pipefit.planner.hybrid.programme import WHOLE, Placed
from pipefit.planner.hybrid.search import Hybrid, recomputed_blocks
from pipefit.planner.mapping import lending, peer_rates, shared_out
from pipefit.planner.memory_choices import KEPT, TO_HOST, TO_PEERS, Menu, Menus, StageChoice, decisions_of
from pipefit.planner.neighbours import Mixed, Simulations, is_very_large, nearby
from pipefit.planner.problem import Degree, Question
from pipefit.planner.replicas import representative
from pipefit.schema.decisions import Decision, Run, What
from pipefit.schema.devices import Member, Place

# ---- Recomputed tensors moved to hosts or peers
#
# Instead of being recomputed, the tensors of a stage's first blocks move to hosts or to devices with memory
# left. All tensors of a stage, and of all its replicas, move together during the next forward or backward.
# All devices of a stage borrow from the same lenders in the same shares, so the devices of a lending stage
# lend equal amounts.
#
# Cost: log2 of a stage's blocks programs of the stage (`hybrid.divided_state`) and a simulation for each way,
# within a limit of work.

_WORK = 60_000  # actions read, after which no other stage is tried
_USED = 0.98  # part of a device's remaining memory that is lent, since shares are rounded

_ROUNDING = 1 - 1e-9

Decisions = tuple[Decision, ...]


class _FirstBlocks(NamedTuple):
    """Split of a stage's first blocks.

    The first `moved` blocks are offloaded, the others before `last` are recomputed.
    """

    moved: int
    last: int


def swapped(simulations: Simulations, best: Mixed) -> Mixed:
    """Return the plan, or a faster one in which hosts or peers hold tensors that it recomputed.

    Stages are tried from the one with the most recomputed blocks on, each with the results of those before.
    """
    question, split, reader = simulations.question, best.split, Reader(simulations.question)
    menus = cache(lambda degree: Menus(representative(question, degree).using(question.means)))
    again = dict[int, int]()
    for decision in best.decisions:
        if isinstance(decision.subject, Run):
            last = question.edges.index(decision.subject.stop) - split.edges[decision.stage]
            again[decision.stage] = max(last, again.get(decision.stage, 0))
    for number in sorted(again, key=lambda number: -again[number]):
        others = tuple(decision for decision in best.decisions if decision.stage != number)
        with suppress(UsageError):  # a layer of the stage can have no replicas
            own = menus(Degree.of(split.grid(number))).of_stage(*split.edges[number : number + 2])
            stage = _StageWays(reader, own, best, number, again[number])
            ways = [stage.to_host] if question.means.host else []
            for decisions in chain.from_iterable(
                way() for way in ([*ways, stage.to_peers] if question.means.peers else ways)
            ):
                with suppress(UsageError):
                    below = best.seconds * _ROUNDING
                    best = simulations.fitting(split, (*others, *decisions), below) or best
    return best


class _StageWays:
    """Ways of stage `number` of a plan, which recomputes its first `again` blocks."""

    def __init__(self, reader: Reader, menus: Sequence[Menu], best: Mixed, number: int, again: int) -> None:
        self._reader, self._menus, self._number, self._again = reader, menus, number, again
        self._split, cluster, self._count = best.split, reader.question.cluster, len(menus)
        grid, budgets, arenas = best.split.grid(number), cluster.budgets, best.simulation.arenas
        self._may_move = grid.shard == "none"
        self._room = min(
            budgets[device] - lent_bytes(arenas, Member.device(device)) for device in grid.devices
        )
        self._rates = peer_rates(cluster)[list(grid.devices)].min(axis=0) * len(grid.devices)
        left = {device: int(_USED * (budgets[device] - peak)) for device, peak in enumerate(best.peaks)}
        near = (device for device, nbytes in left.items() if nbytes > 0 and self._rates[device] > 0)
        self._left = {device: left[device] for device in near if device not in grid.devices}

    def to_host(self) -> Iterator[Decisions]:
        """Yield decisions with which the stage fits.

        Hosts hold the tensors of all recomputed blocks, or of half of them.
        """
        for blocks in self._ways(HOST):
            yield self._decisions(blocks, HOST)

    def to_peers(self) -> Iterator[Decisions]:
        """Yield the decisions for other devices, within the memory that these have left."""
        if not self._left:
            return
        every = shared_out(self._left, range(len(self._rates)))
        for blocks in dict.fromkeys(self._within(every, blocks) for blocks in self._ways(every)):
            if blocks is not None:
                yield self._decisions(blocks, self._lenders(self._needs(blocks, every)))

    def _ways(self, place: Place) -> Iterator[_FirstBlocks]:
        """Yield the blocks to offload to a place and to recompute so that the stage fits."""
        half = max(1, self._again // 2)
        ways: list[Callable[[int], _FirstBlocks]] = [
            lambda moved: _FirstBlocks(moved, moved),
            lambda last: _FirstBlocks(half, max(half, last)),
        ]
        for way in ways if self._again > 1 else ways[:1]:
            if (result := self._fewest(way, place)) is not None:
                yield result

    def _within(self, place: Place, blocks: _FirstBlocks) -> _FirstBlocks | None:
        """Return `blocks`, or the most blocks for which lenders have memory."""
        room = sum(self._left.values())
        most = -1 + _fewest(
            lambda moved: self._needs(_FirstBlocks(moved, max(moved, blocks.last)), place) > room,
            blocks.moved + 1,
        )
        if most in (0, blocks.moved):
            return blocks if most else None
        return self._fewest(lambda last: _FirstBlocks(most, max(most, last)), place)

    def _fewest(self, way: Callable[[int], _FirstBlocks], place: Place) -> _FirstBlocks | None:
        """Return the fewest blocks with which the stage fits, by bisection.

        None if it does not fit with any, or if the work is spent.
        """
        most = self._count
        if not self._may_move or self._reader.actions > _WORK or not self._fits(way(most), place):
            return None
        return way(_fewest(lambda blocks: self._fits(way(blocks), place), most))

    def _fits(self, blocks: _FirstBlocks, place: Place) -> bool:
        with suppress(UsageError):
            (peak,) = self._reader.peaks(self._split, [self._number], self._decisions(blocks, place))
            return peak <= self._room
        return False

    def _needs(self, blocks: _FirstBlocks, place: Place) -> float:
        """Return the bytes that the stage's devices use at a place."""
        with suppress(UsageError):
            return self._reader.borrowed_bytes(self._split, self._number, self._decisions(blocks, place))
        return float("inf")

    def _lenders(self, nbytes: float) -> Place:
        """Return the devices that receive `nbytes` the soonest, in shares."""
        lenders = list(self._left)
        rates = np.zeros((len(lenders) + 1,) * 2)
        rates[0, 1:] = self._rates[lenders]
        result = lending(
            tuple(range(len(rates))), [int(nbytes), *[0] * len(lenders)], [0, *self._left.values()], rates
        )
        return shared_out(result.lenders_of(0), [0, *lenders])

    def _decisions(self, blocks: _FirstBlocks, place: Place) -> Decisions:
        """Return the decisions of the stage."""
        moved, last = blocks
        start, edges, kept = self._split.edges[self._number], self._reader.question.edges, self._count - moved
        choice = StageChoice.keep(self._count)
        if place is HOST:
            choice = choice._replace(places=(TO_HOST,) * moved + (KEPT,) * kept, near=moved)
        else:
            choice = choice._replace(places=(TO_PEERS,) * moved + (KEPT,) * kept, peers=place)
        run = Run(start=edges[start + moved], stop=edges[start + last]) if last > moved else None
        again = () if run is None else (Decision(stage=self._number, subject=run, what=What.RECOMPUTE),)
        return (*again, *decisions_of(self._number, choice, self._menus, HOST))


# ---- Trimming
#
# The search (`hybrid.search`) knows the peaks of stages that recompute nothing or everything, block by block
# or as a whole. The peak of a stage that recomputes its first blocks is read from the stage's program. Fewer
# blocks mostly need more memory, so bisection finds the fewest, and its result always fits.
#
# Cost: log2 of a stage's blocks programs of the stage.


def trimmed(question: Question, hybrid: Hybrid, reader: Reader) -> tuple[Decision, ...]:
    """Return the decisions to recompute the fewest first blocks of a plan's stages with which they fit."""
    decisions = list[Decision]()
    for number, placed in enumerate(hybrid.stages):
        if placed.way.recompute == "never":
            continue
        room = min(question.cluster.budgets[device] for device in hybrid.split.grid(number).devices)

        def fits(blocks: int, number: int = number, placed: Placed = placed, room: int = room) -> bool:
            again = [*recomputed_blocks(question, number, placed, blocks)]
            return reader.peaks(hybrid.split, [number], again)[0] <= room

        blocks = _fewest(fits, placed.stop - placed.start)
        decisions += recomputed_blocks(question, number, placed, blocks)
    return tuple(decisions)


def _fewest(enough: Callable[[int], bool], most: int) -> int:
    """Return the fewest blocks, at least one, that are enough, as `most` are, by bisection."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


# ---- Search

_CLOSE = 0.02  # part of a step by which estimates may be too long
_FAR = 0.05  # part of a step by which the first plan may be slower than a known one
_MOST = 8  # number of plans that are simulated
_WORTH = 0.01  # part of a step that dividing state, or recomputing, has to gain
_CANDIDATES = 2_000_000  # number of compared stages, if plans that keep everything fit
_MIXED_WORK = 60_000  # actions read, after which no other plan is simulated
_LITTLE = 5_000  # the same limit if plans are far slower than a known one
_PASSES = 50_000  # passes of microbatches through stages, above which a simulation takes several seconds


def mixed(question: Question, at_most: float = float("inf"), below: float = float("inf")) -> Mixed | None:
    """Return the fastest plan in which no state moves; None if none fits.

    Stages save memory if that is faster or nothing else fits. `at_most` are the seconds of a known plan that
    fits: slower plans are not searched, so the result may be None. It is also None if simulations are long
    and no plan is estimated below `below` seconds, the estimate of the known plan.
    """
    estimated = fastest(question, _MOST, question.shards[:1], at_most * (1 + _CLOSE))
    least = estimated[0].value if estimated else float("inf")
    if _is_long(question) and at_most < float("inf") and least >= below:
        return None
    result = _mixed(question, estimated, at_most)
    return result and result._replace(estimated=least)


def otherwise(known: Sequence[Mixed], schedules: Sequence[str]) -> Iterator[Mixed]:
    """Yield plans under other schedules that fit and are faster than all of `known`.

    The fastest known plan under each of them, and the fastest plan of its microbatch size, unless the question is
    very large.
    """
    best = min(known, key=lambda one: one.seconds, default=None)
    if best is None:
        return
    how, at_most = best.question.training, best.seconds
    for schedule in schedules:
        if schedule == how.schedule:
            continue
        question = replace(best.question, training=replace(how, schedule=schedule))
        same = Simulations(question).fitting(best.split, best.decisions, at_most)
        at_most = at_most if same is None else same.seconds
        looks = not is_very_large(question)
        yield from filter(None, (same, mixed(question, at_most, best.estimated) if looks else None))


def _is_long(question: Question) -> bool:
    """Return whether many microbatches pass through many stages if all devices are used."""
    widest = max(degree.devices for degree in question.degrees)
    return -(-len(question.cluster.devices) // widest) * question.training.microbatches > _PASSES


def _mixed(question: Question, estimated: Sequence[Hybrid], at_most: float) -> Mixed | None:
    """Return the fastest of the plans estimated to be fast and of their neighbours."""
    first, every = question.shards[:1], question.shards
    again = question.options.recompute == "never" and question.means.recompute != "never"
    simulations = Simulations(question)
    best = _simulated(simulations, estimated, None, at_most)
    if _is_enough(simulations, best, at_most):
        return None
    best = nearby(simulations, best, at_most)
    if first == every and not again:
        return best
    at_most = at_most if best is None else min(at_most, best.seconds)
    if at_most < float("inf") and candidates(question, every, again=again) > _CANDIDATES:
        return best
    others = fastest(question, _MOST, every, at_most * (1 + _CLOSE), again=again)
    if best is not None:
        others = [other for other in others if any(stage.way != WHOLE for stage in other.stages)]
    best = _simulated(simulations, others, best)
    return swapped(simulations, best) if best is not None and best.decisions else best


def _simulated(
    simulations: Simulations, estimated: Sequence[Hybrid], best: Mixed | None, at_most: float = float("inf")
) -> Mixed | None:
    """Return the fastest of the estimated plans, or `best` if they gain too little.

    Only a few are simulated if they take much longer than `at_most` seconds.
    """
    enough = float("inf") if best is None else best.seconds * (1 - _WORTH)
    question, reader = simulations.question, Reader(simulations.question)
    until = simulations.work + simulations.share_of(_MIXED_WORK)
    for result in estimated:
        ended = simulations.work + reader.actions > until
        ended = ended or _is_enough(simulations, best, at_most)
        if best is not None and (ended or result.value > best.seconds * (1 + _CLOSE)):
            break
        decisions = trimmed(question, result, reader)
        simulation = simulations.of(result.split, decisions)
        if simulation.seconds < enough:
            best, enough = Mixed(question, result.split, simulation, decisions), simulation.seconds
    return best


def _is_enough(simulations: Simulations, best: Mixed | None, at_most: float) -> bool:
    """Return whether, after a little work, the best plan found is far slower than a known one."""
    return (
        best is not None
        and best.seconds > at_most * (1 + _FAR)
        and simulations.work > simulations.share_of(_LITTLE)
    )
