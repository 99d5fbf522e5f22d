"""Stages of any degrees that run again in part: their tensors move away instead, where that makes steps shorter.

Of such a stage (`planner.mixed`) the tensors of its first blocks move to hosts, or to devices that have memory left:
the fewest with which it fits, of all that ran again and as many more as it takes, or of half of them, or as many as
peers have room for; and the fewest others run again. A stage's tensors move together, beside the next forward or
backward, and so do those of all its replicas; what their links carry the simulator says. All devices of a stage borrow
from the same lenders in the same shares, so that those of a stage that lends lend alike. Stages are tried from the one
on which the most blocks run again, each with what was found for those before.

Costs: log2 of a stage's blocks programs of the stage (`hybrid.reading`) and a simulation for each way, within a limit
of work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pipefit.decisions import Decision, Run, What
from pipefit.errors import UsageError
from pipefit.places import Member, Place
from pipefit.planner.choices import KEPT, TO_HOST, TO_PEERS, StageChoice, decisions_of
from pipefit.planner.degrees import Degree
from pipefit.planner.evaluation import HOST
from pipefit.planner.hybrid.reading import Reader
from pipefit.planner.mapping import Floats, lending, peer_rates
from pipefit.planner.menus import Menu, Menus
from pipefit.planner.peers import shared_out
from pipefit.planner.question import Split
from pipefit.planner.replicas import representative
from pipefit.planner.simulations import Simulations
from pipefit.schedule.arenas import lent_bytes

_WORK = 60_000  # actions that were read, after which no other stage is tried
_USED = 0.98  # of what a device has left is lent: shares are rounded

_ROUNDING = 1 - 1e-9

Decisions = tuple[Decision, ...]


class Swapped(NamedTuple):
    """Decisions of a plan that fits, with its seconds and its peaks by simulation."""

    decisions: Decisions
    seconds: float
    peaks: tuple[int, ...]  # of every device, in bytes


class _Blocks(NamedTuple):
    """Of the first blocks of a stage, how many `moved` away, and where those end of which the others run again."""

    moved: int
    last: int


def swapped(simulations: Simulations, split: Split, best: Swapped) -> Swapped:
    """The plan of a split, or a faster one in which hosts or peers have tensors that it computed again."""
    search, means = _Search(simulations, split), simulations.question.means
    again = dict[int, int]()
    for one in best.decisions:
        if one.what is What.RECOMPUTE:
            again[one.stage] = max(search.blocks(one), again.get(one.stage, 0))
    for number in sorted(again, key=lambda number: -again[number]):
        others = tuple(one for one in best.decisions if one.stage != number)
        stage = search.stage(number, again[number], best)
        ways = [stage.to_host] if means.host else []
        for way in [*ways, stage.to_peers] if means.peers else ways:
            for own in way():
                found = search.simulated((*others, *own))
                best = found if found is not None and found.seconds < best.seconds * _ROUNDING else best
    return best


class _Search:
    """What may be done on the stages of one split."""

    def __init__(self, simulations: Simulations, split: Split) -> None:
        self._simulations, self.question, self.split = simulations, simulations.question, split
        self.reader = Reader(simulations.question)
        self._menus: dict[Degree, Menus] = {}

    @cached_property
    def rates(self) -> Floats:
        """Bytes per second between every two devices."""
        return peer_rates(self.question.cluster)

    def blocks(self, decision: Decision) -> int:
        """How many blocks there are from a stage's first to the last one that a decision recomputes."""
        assert isinstance(decision.subject, Run), "stages run again by runs"
        return self.question.edges.index(decision.subject.stop) - self.split.edges[decision.stage]

    def menus(self, number: int) -> tuple[Menu, ...]:
        """The menus of a stage.

        Raises:
            UsageError: a layer of it can have no replicas.
        """
        degree = Degree.of(self.split.grid(number))
        if degree not in self._menus:
            rank = representative(self.question, degree)
            self._menus[degree] = Menus(replace(rank, means=self.question.means))
        return self._menus[degree].of_stage(*self.split.edges[number : number + 2])

    def stage(self, number: int, again: int, best: Swapped) -> _Stage:
        """A stage of which so many blocks run again in a plan."""
        arenas = self._simulations.of(self.split, best.decisions).arenas
        devices = range(len(self.question.cluster.devices))
        return _Stage(self, number, again, best.peaks, [lent_bytes(arenas, Member.device(n)) for n in devices])

    def simulated(self, decisions: Decisions) -> Swapped | None:
        """What the simulator says of these decisions; None if they do not fit or cannot be carried out."""
        with suppress(UsageError):
            found = self._simulations.of(self.split, decisions)
            if found.fits:
                return Swapped(decisions, found.step_seconds[-1], found.peak_bytes)
        return None


class _Stage:
    """The ways of one stage, in a plan with these peaks, of which `lent` bytes are for other devices."""

    def __init__(self, search: _Search, number: int, again: int, peaks: tuple[int, ...], lent: list[int]) -> None:
        self._search, self._number, self._again = search, number, again
        self._reader, self._split, grid = search.reader, search.split, search.split.grid(number)
        budgets = search.question.cluster.budgets
        self._count = search.split.edges[number + 1] - search.split.edges[number]
        self._may_move = grid.shard == "none"
        self._room = min(budgets[device] - lent[device] for device in grid.devices)
        self._rates = search.rates[list(grid.devices)].min(axis=0) * len(grid.devices)
        left = {device: int(_USED * (budgets[device] - peak)) for device, peak in enumerate(peaks)}
        near = (device for device, nbytes in left.items() if nbytes > 0 and self._rates[device] > 0)
        self._left = {device: left[device] for device in near if device not in grid.devices}

    def to_host(self) -> Iterator[Decisions]:
        """Decisions with which the stage fits and hosts have all that ran again, or half of it."""
        for blocks in self._ways(HOST):
            yield self._decisions(blocks, HOST)

    def to_peers(self) -> Iterator[Decisions]:
        """The same with other devices, which have as much of it as they have room for."""
        if not self._left:
            return
        every = shared_out(self._left, range(len(self._rates)))
        for blocks in dict.fromkeys(self._within(every, blocks) for blocks in self._ways(every)):
            if blocks is not None:
                yield self._decisions(blocks, self._lenders(self._needs(blocks, every)))

    def _ways(self, place: Place) -> Iterator[_Blocks]:
        """What moves to a place, and what runs again, so that the stage fits."""
        half = max(1, self._again // 2)
        ways: list[Callable[[int], _Blocks]] = [
            lambda moved: _Blocks(moved, moved),
            lambda last: _Blocks(half, max(half, last)),
        ]
        for way in ways if self._again > 1 else ways[:1]:
            if (found := self._fewest(way, place)) is not None:
                yield found

    def _within(self, place: Place, blocks: _Blocks) -> _Blocks | None:
        """The same, or, if lenders have too little room for it, as many blocks as they have room for."""
        room, low, high = sum(self._left.values()), 0, blocks.moved + 1
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._needs(_Blocks(middle, max(middle, blocks.last)), place) <= room
            low, high = (middle, high) if fits else (low, middle)
        if low in (0, blocks.moved):
            return blocks if low else None
        return self._fewest(lambda last: _Blocks(low, max(low, last)), place)

    def _fewest(self, way: Callable[[int], _Blocks], place: Place) -> _Blocks | None:
        """The fewest blocks with which the stage fits, by bisection; None if it does with none, or after the work."""
        low, high = 0, self._count  # blocks that are too few, and that are enough
        if not self._may_move or self._reader.actions > _WORK or not self._fits(way(high), place):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(way(middle), place) else (middle, high)
        return way(high)

    def _fits(self, blocks: _Blocks, place: Place) -> bool:
        with suppress(UsageError):
            (peak,) = self._reader.peaks(self._split, [self._number], self._decisions(blocks, place))
            return peak <= self._room
        return False

    def _needs(self, blocks: _Blocks, place: Place) -> float:
        """The bytes that the stage's devices take of a place."""
        with suppress(UsageError):
            return self._reader.borrowed_bytes(self._split, self._number, self._decisions(blocks, place))
        return float("inf")

    def _lenders(self, nbytes: float) -> Place:
        """The devices that have so many bytes the soonest, in shares."""
        lenders = list(self._left)
        rates = np.zeros((len(lenders) + 1,) * 2)
        rates[0, 1:] = self._rates[lenders]
        found = lending(tuple(range(len(rates))), [int(nbytes), *[0] * len(lenders)], [0, *self._left.values()], rates)
        return shared_out(found.lenders_of(0), [0, *lenders])

    def _decisions(self, blocks: _Blocks, place: Place) -> Decisions:
        """Those of the stage.

        Raises:
            UsageError: a layer of it can have no replicas.
        """
        moved, last = blocks
        start, edges, kept = self._split.edges[self._number], self._search.question.edges, self._count - moved
        choice = StageChoice.keep(self._count)
        if place is HOST:
            choice = choice._replace(places=(TO_HOST,) * moved + (KEPT,) * kept, near=moved)
        else:
            choice = choice._replace(places=(TO_PEERS,) * moved + (KEPT,) * kept, peers=place)
        run = Run(start=edges[start + moved], stop=edges[start + last]) if last > moved else None
        again = () if run is None else (Decision(stage=self._number, subject=run, what=What.RECOMPUTE),)
        return (*again, *decisions_of(self._number, choice, self._search.menus(self._number), HOST))
