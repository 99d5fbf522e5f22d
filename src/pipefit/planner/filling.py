"""Filling of splits: for each stage the cheapest choice that fits its device.

The host takes the bytes that its link carries during a microbatch's forward and backward: first from the
blocks with the most seconds per byte of recomputation, among equal blocks from the first, whose tensors live
longest. The remaining excess is recomputed, the cheapest bytes first, among equal ones those of the last
blocks. This needs no search, because moves within the link's capacity add no time, and prices of recipes
rise.

The bytes that a choice frees are estimated from the microbatches in flight. The ledger then gives the exact
need of every device at once, and the estimate is corrected by the difference: mostly two to four simulations.
(A knapsack for each stage: AdaPipe, ASPLOS 2024.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from pipefit.planner.balance import DOUBLE, differ, interchangeable
from pipefit.planner.bounds import MicrobatchSeconds, host_rates, in_flight, lines, position_of
from pipefit.planner.driver import range_peak
from pipefit.planner.evaluation import Budget, Candidate, Evaluation, Evaluator
from pipefit.planner.memory_choices import KEPT, TO_HOST, TO_PEERS, DevicePrices, Menu, StageChoice, parts_of
from pipefit.planner.options import Means
from pipefit.planner.problem import Split

# ---- Filling

_ROUNDS, _FEW = 6, 2  # corrections of a setting, and the minimum number of them
_SLOWER = 0.02  # part of a step by which a slower setting is given up
_WORK = 300_000  # new actions after which settings get few corrections
_FILLING_AWAY = 2  # microbatches whose offloaded tensors are on the device: one leaves and one returns


States = Literal["stay", "needed", "all", "spill"]


class FillingSetting(NamedTuple):
    """A split and the parameters of filling its stages.

    `host` is the usable part of the capacity of the host's link. The host may take the optimizer `states` of
    all blocks ("all"), of the fewest needed if nothing else is enough ("needed"), or of all and, if that is
    not enough, gradients and parameters too ("spill"). The part `updated` of those states is updated on the
    host.
    """

    split: Split
    host: float = 1.0
    states: States = "stay"
    updated: float = 0.0


class Filler:
    """Filler of stages, which caches the peaks of stages that keep everything."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator, self.question = evaluator, evaluator.question
        self._asked = evaluator.question  # with all techniques
        self._budget = Budget(evaluator, _WORK)
        self._filled: dict[FillingSetting, Evaluation | None] = {}
        self._peaks: dict[tuple[int, int, int], int] = {}

    def restricted(self, means: Means) -> Filler:
        """Return a filler with fewer techniques that shares the known peaks."""
        result = copy(self)
        result.evaluator = self.evaluator.restricted(means)
        result.question, result._filled = result.evaluator.question, {}
        result._budget = Budget(result.evaluator, _WORK)
        return result

    def fill(self, setting: FillingSetting, than: Evaluation | None = None) -> Evaluation | None:
        """Return the best candidate of a setting; None if its decisions cannot be carried out.

        A setting that is clearly slower than the plan `than`, which fits, is given up.
        """
        if setting not in self._filled:
            limit = than.seconds * (1 + _SLOWER) if than is not None and than.fits else float("inf")
            self._filled[setting] = self._fill(setting, limit)
        return self._filled[setting]

    @property
    def best(self) -> list[Evaluation]:
        """The best candidate of every filled split, the best first."""
        result: dict[Split, Evaluation] = {}
        known = [value for value in self._filled.values() if value is not None]
        for evaluation in sorted(known, key=lambda one: one.order):
            result.setdefault(evaluation.candidate.split, evaluation)
        return [*result.values()]

    def _fill(self, setting: FillingSetting, limit: float) -> Evaluation | None:
        split, best = setting.split, None
        needs = [float(self.lack(split, stage)) for stage in range(len(split.devices))]
        for number in range(_ROUNDS):
            if number >= _FEW and self._budget.ends():
                break
            choices = self._choices(setting, needs)
            result = self.evaluator.evaluate(Candidate(split, choices))
            if result is None:
                break
            if best is None or result.order < best.order:
                best = result
            if result.seconds > limit or not self._corrected(needs, result, choices):
                break
        return best

    def _corrected(self, needs: list[float], evaluation: Evaluation, choices: Sequence[StageChoice]) -> bool:
        """Correct the needs by the ledger's result; return whether the correction may change anything."""
        changed = False
        for stage, (over, choice) in enumerate(zip(evaluation.over, choices, strict=True)):
            if over > 0 or (
                over < 0 and not choice.idle and self._spare(evaluation.candidate, stage, choice) < -over
            ):
                needs[stage] += over
                changed = True
        return changed

    def _spare(self, candidate: Candidate, stage: int, choice: StageChoice) -> float:
        """Return the fewest bytes that one recipe step less would add to a stage."""
        menus, held = (
            self.evaluator.stage_menus(candidate.split)[stage],
            self.in_flight(candidate.split, stage),
        )
        steps = [
            (menu.recipes[n].nbytes - menu.recipes[n - 1].nbytes) * held
            for menu, n in zip(menus, choice.recipes, strict=True)
            if n
        ]
        return min(steps, default=float("inf"))

    # ---- Properties of a split

    def fewest_seconds(self, split: Split, choices: Sequence[StageChoice] = ()) -> float:
        """Return a lower bound of the seconds of a split's step, with these or any memory choices."""
        how = self.question.training
        forward = self._prices.seconds("forward", split.edges, split.devices)
        backward = self._prices.seconds("backward", split.edges, split.devices)
        again = [0.0] * len(forward)
        if choices:
            stages = zip(choices, self.evaluator.stage_menus(split), strict=True)
            again = [
                sum(choice.recipe(menus, block).seconds for block in range(len(menus)))
                for choice, menus in stages
            ]
        each = forward + backward
        if how.endless:
            return how.microbatches * float((each + again).max())
        before, whole = np.concatenate([[0.0], np.cumsum(each)]), float(each.sum())
        result = 0.0
        for stage, more in enumerate(again):
            at = position_of(how.schedule, stage, len(each), how.microbatches)
            work = MicrobatchSeconds(forward[stage], backward[stage], before[stage], whole)
            every, late = lines(at, work)
            lowest = float(
                max(every + how.microbatches * more, late + (how.microbatches - at.in_flight) * more)
            )
            result = max(result, lowest)
        return result

    def lack(self, split: Split, stage: int) -> int:
        """Return the bytes that the device of a stage lacks if the stage keeps everything."""
        peak = self._peak(stage, *split.edges[stage : stage + 2])
        return peak - self.question.cluster.budgets[split.devices[stage]]

    def freed(self, split: Split, stage: int, choice: StageChoice) -> float:
        """Return the bytes that a choice frees by estimate."""
        menus, held = self.evaluator.stage_menus(split)[stage], self.in_flight(split, stage)
        result = held * sum(choice.recipe(menus, block).nbytes for block in range(len(menus)))
        near = choice.blocks_to(TO_HOST)[: choice.near]
        for block in range(len(menus)):
            nbytes = sum(tensor.nbytes for tensor in choice.moved(menus, block))
            away = _FILLING_AWAY + (choice.places[block] == TO_HOST and block not in near)
            result += max(0, held - away) * nbytes
        costs, parts = self.question.measurement.costs, [part for menu in menus for part in menu.parts]
        nbytes_of = {start: sum(cost.state_bytes for cost in costs[start:stop]) for start, stop in parts}
        moved = [nbytes_of[part] for part in (choice.states - choice.updates) | choice.lent]
        updated = sum(nbytes_of[part] for part in choice.updates)
        return result + updated + max(0, sum(moved) - DOUBLE * max(moved, default=0))

    def lent(self, split: Split, stage: int, choice: StageChoice) -> int:
        """Return the bytes that a stage with this choice borrows by estimate."""
        menus, costs = self.evaluator.stage_menus(split)[stage], self.question.measurement.costs
        tensors = (tensor for block in choice.blocks_to(TO_PEERS) for tensor in choice.moved(menus, block))
        parts = (part for menu in menus for part in menu.parts if part[0] in choice.lent)
        state = sum(cost.state_bytes for part in parts for cost in costs[slice(*part)])
        return max(0, self.in_flight(split, stage) - 1) * sum(one.nbytes for one in tensors) + state

    def _peak(self, stage: int, start: int, stop: int) -> int:
        """Return the peak of a stage that keeps everything."""
        key = stage, start, stop
        if key not in self._peaks:
            self._peaks[key] = range_peak(self._asked, stage, start, stop)
        return self._peaks[key]

    def in_flight(self, split: Split, stage: int) -> int:
        """Return the number of microbatches that a stage holds at once."""
        return in_flight(self.question.training, stage, len(split.devices))

    @cached_property
    def groups(self) -> dict[int, int]:
        """Number of every device's group of interchangeable devices; empty if there is no order to choose."""
        groups = enumerate(interchangeable(self.question) if differ(self.question) else ())
        return {device: number for number, group in groups for device in group}

    @cached_property
    def _prices(self) -> DevicePrices:
        return DevicePrices(self._asked)

    def host_bytes(self, split: Split, stage: int, part: float = 1.0) -> tuple[float, float]:
        """Return the bytes of a microbatch that a stage may offload through a part of its link to the host.

        The first number is for its forward only, the second for both passes. Devices that share a wire to the
        host share its capacity.
        """
        edges, devices = split.edges[stage : stage + 2], split.devices[stage : stage + 1]
        forward = float(self._prices.seconds("forward", edges, devices)[0])
        backward = float(self._prices.seconds("backward", edges, devices)[0])
        rate = self.rates(split)[stage] * part
        return rate * forward, rate * (forward + backward)

    def rates(self, split: Split) -> list[float]:
        """Return each stage's bytes per second to its host if all stages that may offload do so."""
        moving = [
            device if self.question.means.host and self.in_flight(split, stage) > _FILLING_AWAY else None
            for stage, device in enumerate(split.devices)
        ]
        return host_rates(self.question.cluster, moving)

    # ---- Choices

    def _choices(self, setting: FillingSetting, needs: Sequence[float]) -> tuple[StageChoice, ...]:
        stages = enumerate(zip(self.evaluator.stage_menus(setting.split), needs, strict=True))
        return tuple(self._choice(setting, stage, menus, need) for stage, (menus, need) in stages)

    def _choice(self, setting: FillingSetting, stage: int, menus: Sequence[Menu], need: float) -> StageChoice:
        """Return the cheapest choice of a stage that frees `need` bytes."""
        held = self.in_flight(setting.split, stage)
        near, most = self.host_bytes(setting.split, stage, setting.host)
        states = self._state_bytes(menus) if setting.states in ("all", "spill") and need > 0 else []
        need -= max(0, sum(states) - DOUBLE * max(states, default=0))
        blocks = _StageBlocks(menus)
        for to_host in range(len(menus), -1, -1):
            moving = _Moving(blocks, need, max(0, held - _FILLING_AWAY))
            moved = moving.take(to_host, most)
            recipes, left = _recomputed(moving, held)
            if left <= 0 or not moved:
                break
        count = self.states(menus, left) if setting.states == "needed" else len(states)
        updates = round(setting.updated * count)
        gradients, parameters = self._spilled(menus[updates:], left) if setting.states == "spill" else (0, 0)
        return StageChoice(
            recipes=recipes,
            places=tuple(moving.places),
            near=moving.fitting(near),
            states=parts_of(menus[:count]),
            updates=parts_of(menus[:updates]),
            gradients=gradients,
            parameters=parameters,
        )

    def _spilled(self, menus: Sequence[Menu], need: float) -> tuple[int, int]:
        """Return the numbers of blocks whose gradients and parameters the host takes to free `need` bytes.

        Those of two blocks are on the device at once.
        """
        counts = []
        for nbytes in self._bytes(menus, "gradient_bytes"), self._bytes(menus, "parameter_bytes"):
            freed = [sum(nbytes[:n]) - DOUBLE * max(nbytes[:n], default=0) for n in range(len(nbytes) + 1)]
            counts.append(
                next((n for n, enough in enumerate(freed) if enough >= need or need <= 0), len(nbytes))
            )
            need -= max(0, freed[counts[-1]])
        return counts[0], counts[1]

    def states(self, menus: Sequence[Menu], need: float) -> int:
        """Return the number of blocks whose optimizer state the host takes to free `need` bytes."""
        taken = list[int]()
        for nbytes in self._state_bytes(menus) if need > 0 else ():
            if need + DOUBLE * max(taken, default=0) <= sum(taken):
                break
            taken.append(nbytes)
        return len(taken)

    def _state_bytes(self, menus: Sequence[Menu]) -> list[int]:
        """Return the optimizer state of every block, if the host may hold it."""
        return self._bytes(menus, "state_bytes")

    def _bytes(self, menus: Sequence[Menu], kind: str) -> list[int]:
        """Return the bytes of a kind of state of every block, if the host may hold it."""
        if not (self.question.means.host and self.question.means.state):
            return []
        costs = self.question.measurement.costs
        return [sum(getattr(cost, kind) for cost in costs[menu.start : menu.stop]) for menu in menus]


class _StageBlocks:
    """Blocks of a stage: movable bytes, the order of offloading, and the order of recomputation."""

    def __init__(self, menus: Sequence[Menu]) -> None:
        self.bytes = [menu.movable_bytes for menu in menus]
        self.order = sorted(range(len(menus)), key=lambda block: (-_dearest(menus[block]), block))
        self.steps = [*priced_steps(menus)]


class _Moving:
    """Choice of the blocks whose tensors move; `need` is the number of bytes still to free."""

    def __init__(self, blocks: _StageBlocks, need: float, away: int) -> None:
        self.blocks, self.need, self.away = blocks, need, away
        self.places = [KEPT] * len(blocks.bytes)

    def take(self, blocks: int, most: float) -> bool:
        """Move up to this many blocks and bytes while bytes remain to free; return whether any moved."""
        for block in self.blocks.order if self.away else ():
            nbytes = self.blocks.bytes[block]
            if self.need > 0 and blocks and not self.places[block] and 0 < nbytes <= most:
                self.places[block] = TO_HOST
                self.need, most, blocks = self.need - self.away * nbytes, most - nbytes, blocks - 1
        return TO_HOST in self.places

    def fitting(self, most: float) -> int:
        """Return how many of the first blocks on the host fit in `most` bytes together, at least one."""
        count, total = 0, 0.0
        for block, place in enumerate(self.places):
            if place == TO_HOST:
                total += self.blocks.bytes[block]
                if total > most and count:
                    break
                count += 1
        return count


def _recomputed(moving: _Moving, held: int) -> tuple[tuple[int, ...], float]:
    """Return the recipes of the blocks that do not move, and the bytes still to free."""
    recipes, need = [0] * len(moving.places), moving.need
    for block, number, nbytes in moving.blocks.steps:
        if need <= 0:
            break
        if not moving.places[block]:
            recipes[block], need = number, need - held * nbytes
    return tuple(recipes), need


def _dearest(menu: Menu) -> float:
    """Return the seconds per byte of the block's last recipe; infinity if it cannot be recomputed."""
    last = menu.recipes[-1]
    return last.seconds / last.nbytes if last.nbytes else float("inf")


def priced_steps(menus: Sequence[Menu]) -> Iterator[tuple[int, int, int]]:
    """Yield the steps from recipe to recipe, the cheapest bytes first: block, recipe number, added bytes."""
    result = []
    for block, menu in enumerate(menus):
        for number, (recipe, other) in enumerate(pairwise(menu.recipes), 1):
            more = other.nbytes - recipe.nbytes
            result.append(((other.seconds - recipe.seconds) / more, -block, number, more))
    for _, block, number, more in sorted(result):
        yield -block, number, more
