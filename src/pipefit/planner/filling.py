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

from collections.abc import Hashable, Iterator, Sequence
from copy import copy
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Literal, NamedTuple

import numpy as np

from pipefit.planner.balance import DOUBLE, differ, interchangeable
from pipefit.planner.bounds import MicrobatchSeconds, host_rates, in_flight, lines, position_of
from pipefit.planner.driver import range_peak
from pipefit.planner.evaluation import Budget, Candidate, Evaluation, Evaluator
from pipefit.planner.memory_choices import (
    KEPT,
    TO_HOST,
    TO_PEERS,
    DevicePrices,
    Floats,
    Menu,
    Recipe,
    StageChoice,
    parts_of,
)
from pipefit.planner.options import Means
from pipefit.planner.problem import SINGLE, Degree, Split

# ---- Filling

_ROUNDS, _FEW = 6, 2  # corrections of a setting, and the minimum number of them
_FREEING = 4  # corrections after which a stage that still does not fit frees all that it can
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


class RecipeStep(NamedTuple):
    """Step of a block to its next recipe, and the bytes that it frees of all microbatches in flight."""

    block: int
    recipe: int
    nbytes: int


class Filler:
    """Filler of stages, which caches the peaks of stages that keep everything.

    With `returning`, the run at the end of a stage, whose backward is the first, counts as back for one
    microbatch at the stage's peak. That decides for stages that hold one microbatch, such as those of
    sharded data parallelism.
    """

    def __init__(self, evaluator: Evaluator, *, returning: bool = False) -> None:
        self._returning = returning
        self.evaluator, self.question = evaluator, evaluator.question
        self._asked = evaluator.question  # with all techniques
        self._budget = Budget(evaluator, _WORK)
        self._filled: dict[FillingSetting, Evaluation | None] = {}
        self._peaks: dict[Hashable, float] = {}
        self._passes_of: dict[Split, tuple[Floats, Floats]] = {}
        self._prices: dict[Degree, DevicePrices] = {}

    def restricted(self, means: Means) -> Filler:
        """Return a filler with fewer techniques that shares the known peaks."""
        result = copy(self)
        result.evaluator = self.evaluator.restricted(means)
        result.question, result._filled = result.evaluator.question, {}
        result._budget = Budget(result.evaluator, _WORK)
        return result

    def fill(
        self, setting: FillingSetting, than: Evaluation | None = None, below: float = inf
    ) -> Evaluation | None:
        """Return the best candidate of a setting; None if its decisions cannot be carried out.

        A setting that is clearly slower than the plan `than`, which fits, or than `below` seconds, is given
        up.
        """
        if setting not in self._filled:
            fastest = min(below, than.seconds if than is not None and than.fits else inf)
            self._filled[setting] = self._fill(setting, fastest * (1 + _SLOWER))
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
        split, best, before = setting.split, None, None
        needs = [float(self.lack(split, stage)) for stage in range(len(split.devices))]
        too_few = [-inf] * len(needs)  # bytes by estimate with which a stage did not fit
        for number in range(_ROUNDS):
            choices = self._choices(setting, needs)
            if choices == before or (number >= _FEW and self._budget.ends() and best and best.fits):
                break
            if limit < inf and self.fewest_seconds(split, choices) > limit:
                break
            result, before = self.evaluator.evaluate(Candidate(split, choices), below=limit), choices
            if result is None:
                break
            if (
                best is None
                or result.over_bytes < best.over_bytes
                or (result.fits and result.order < best.order)
            ):
                best = result
            if result.fits and result.seconds > limit:
                break
            self._correct(needs, too_few, result)
            if number >= _FREEING - 1:
                needs = [inf if over > 0 else need for need, over in zip(needs, result.over, strict=True)]
        return best

    def _correct(self, needs: list[float], too_few: list[float], evaluation: Evaluation) -> None:
        """Correct the needs of stages by the ledger's result.

        A stage that has room needs less if it can keep a step's bytes, and if so little was not too few
        before.
        """
        split, choices = evaluation.candidate
        for stage, (over, choice) in enumerate(zip(evaluation.over, choices, strict=True)):
            freed = self.freed(split, stage, choice._replace(near=len(choice.places)))  # as `_choice` counts
            if over > 0:
                too_few[stage] = max(too_few[stage], freed)
                needs[stage] = max(needs[stage], freed) + over
            elif not choice.idle and self._spare(evaluation.candidate, stage, choice) < -over:
                needs[stage] = min(needs[stage], max(freed + over, too_few[stage] + 1))

    def _spare(self, candidate: Candidate, stage: int, choice: StageChoice) -> float:
        """Return the fewest bytes that one recipe step less would add to a stage."""
        steps = self.priced_steps(candidate.split, stage)
        return min(
            (step.nbytes for step in steps if choice.recipes[step.block] == step.recipe), default=float("inf")
        )

    # ---- Properties of a split

    def fewest_seconds(self, split: Split, choices: Sequence[StageChoice] = ()) -> float:
        """Return a lower bound of the seconds of a split's step, with these or any memory choices."""
        how = self.question.training
        forward, backward = self._passes(split)
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

    def lack(self, split: Split, stage: int) -> float:
        """Return the bytes that a device of a stage lacks if the stage keeps everything."""
        budgets = self.question.cluster.budgets
        return self._peak(split, stage) - min(budgets[device] for device in split.grid(stage).devices)

    def freed(self, split: Split, stage: int, choice: StageChoice) -> float:
        """Return the bytes that a choice frees by estimate."""
        menus, held = self.evaluator.stage_menus(split)[stage], self.in_flight(split, stage)
        recipes = (choice.recipe(menus, block) for block in range(len(menus)))
        result = float(
            sum(self._freed(recipe, menu, menus, held) for recipe, menu in zip(recipes, menus, strict=True))
        )
        near = choice.blocks_to(TO_HOST)[: choice.near]
        for block in range(len(menus)):
            nbytes = sum(tensor.nbytes for tensor in choice.moved(menus, block))
            away = _FILLING_AWAY + (choice.places[block] == TO_HOST and block not in near)
            result += max(0, held - away) * nbytes
        nbytes_of = self._state_of_parts(split, stage, menus)
        moved = [nbytes_of[part] for part in (choice.states - choice.updates) | choice.lent]
        updated = sum(nbytes_of[part] for part in choice.updates)
        return result + updated + max(0, sum(moved) - DOUBLE * max(moved, default=0))

    def priced_steps(self, split: Split, stage: int) -> Iterator[RecipeStep]:
        """Yield the steps from recipe to recipe of a stage, the cheapest bytes first.

        Of equal ones those of the last blocks, or of the first blocks with `returning`, which come back the
        latest.
        """
        menus, held, result = self.evaluator.stage_menus(split)[stage], self.in_flight(split, stage), []
        sign = 1 if self._returning else -1
        for block, menu in enumerate(menus):
            price = 0.0
            for number, (recipe, other) in enumerate(pairwise(menu.recipes), 1):
                more = self._freed(other, menu, menus, held) - self._freed(recipe, menu, menus, held)
                seconds = other.seconds - recipe.seconds
                price = max(price, seconds / (more / held) if more > 0 else float("inf"))
                result.append((price, sign * block, number, more))
        for _, block, number, more in sorted(result):
            yield RecipeStep(sign * block, number, more)

    def _freed(self, recipe: Recipe, menu: Menu, menus: Sequence[Menu], held: int) -> int:
        """Return bytes that a block's recipe frees at the peak of a stage that holds `held` microbatches."""
        return held * recipe.nbytes - recipe.last * (self._returning and menu is menus[-1])

    def lent(self, split: Split, stage: int, choice: StageChoice) -> int:
        """Return the bytes that a stage with this choice borrows by estimate."""
        menus = self.evaluator.stage_menus(split)[stage]
        tensors = (tensor for block in choice.blocks_to(TO_PEERS) for tensor in choice.moved(menus, block))
        nbytes_of = self._state_of_parts(split, stage, menus)
        state = sum(nbytes for start, nbytes in nbytes_of.items() if start in choice.lent)
        return max(0, self.in_flight(split, stage) - 1) * sum(one.nbytes for one in tensors) + state

    def _state_of_parts(self, split: Split, stage: int, menus: Sequence[Menu]) -> dict[int, int]:
        """Return a device's optimizer state in every part of a stage's blocks, by the part's first layer."""
        grid, parts = split.grid(stage), [part for menu in menus for part in menu.parts]
        costs, owners = (
            self.question.measured(Degree.of(grid)).costs,
            1 if grid.shard == "none" else grid.data,
        )
        return {start: sum(one.state_bytes for one in costs[start:stop]) // owners for start, stop in parts}

    def _peak(self, split: Split, stage: int) -> float:
        """Return the peak of a stage that keeps everything."""
        edges = split.edges[stage : stage + 2]
        key = (stage, edges, split.grids[stage]) if split.grids else (stage, edges)
        if key not in self._peaks:
            read = self.evaluator.kept_peak
            self._peaks[key] = read(split, stage) if split.grids else range_peak(self._asked, stage, *edges)
        return self._peaks[key]

    def in_flight(self, split: Split, stage: int) -> int:
        """Return the number of microbatches that a stage holds at once."""
        return in_flight(self.question.training, stage, len(split.devices))

    @cached_property
    def groups(self) -> dict[int, int]:
        """Number of every device's group of interchangeable devices; empty if there is no order to choose."""
        groups = enumerate(interchangeable(self.question) if differ(self.question) else ())
        return {device: number for number, group in groups for device in group}

    def _passes(self, split: Split) -> tuple[Floats, Floats]:
        """Return the seconds of a forward and of a backward of every stage, without communication."""
        if split not in self._passes_of:
            self._passes_of[split] = self._seconds("forward", split), self._seconds("backward", split)
        return self._passes_of[split]

    def _seconds(self, what: Literal["forward", "backward"], split: Split) -> Floats:
        """Return the seconds of a pass of every stage, without communication."""
        if not split.grids:
            return self._prices_of(SINGLE).seconds(what, split.edges, split.devices)
        stages = enumerate(zip(pairwise(split.edges), split.devices, strict=True))
        prices = ((self._prices_of(Degree.of(split.grid(stage))), *own) for stage, own in stages)
        return np.concatenate([of.seconds(what, edges, (device,)) for of, edges, device in prices])

    def _prices_of(self, degree: Degree) -> DevicePrices:
        """Return the prices of blocks on one device of a stage of this degree."""
        if degree not in self._prices:
            self._prices[degree] = DevicePrices(self._asked.of_one(degree))
        return self._prices[degree]

    def host_bytes(self, split: Split, stage: int, part: float = 1.0) -> tuple[float, float]:
        """Return the bytes of a microbatch that a stage may offload through a part of its link to the host.

        The first number is for its forward only, the second for both passes. Devices that share a wire to the
        host share its capacity.
        """
        forward, backward = (float(seconds[stage]) for seconds in self._passes(split))
        rate = self.rates(split)[stage] * part
        return rate * forward, rate * (forward + backward)

    def rates(self, split: Split) -> list[float]:
        """Return the rate of each stage's slowest device to its host, if all stages that may offload do."""
        grids = [split.grid(stage).devices for stage in range(len(split.devices))]
        moving = [
            device if self.question.means.host and self.in_flight(split, stage) > _FILLING_AWAY else None
            for stage, devices in enumerate(grids)
            for device in devices
        ]
        rates = iter(host_rates(self.question.cluster, moving))
        return [min(next(rates) for _ in devices) for devices in grids]

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
        blocks = _StageBlocks(menus, [*self.priced_steps(setting.split, stage)])
        for to_host in range(len(menus), -1, -1):
            moving = _Moving(blocks, need, max(0, held - _FILLING_AWAY))
            moved = moving.take(to_host, most)
            recipes, left = _recomputed(moving)
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

    def __init__(self, menus: Sequence[Menu], steps: Sequence[RecipeStep]) -> None:
        self.bytes = [menu.movable_bytes for menu in menus]
        self.order = sorted(range(len(menus)), key=lambda block: (-_dearest(menus[block]), block))
        self.steps = steps


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


def _recomputed(moving: _Moving) -> tuple[tuple[int, ...], float]:
    """Return the recipes of the blocks that do not move, and the bytes still to free."""
    recipes, need = [0] * len(moving.places), moving.need
    for step in moving.blocks.steps:
        if need <= 0:
            break
        if not moving.places[step.block]:
            recipes[step.block], need = step.recipe, need - step.nbytes
    return tuple(recipes), need


def _dearest(menu: Menu) -> float:
    """Return the seconds per byte of the block's last recipe; infinity if it cannot be recomputed."""
    last = menu.recipes[-1]
    return last.seconds / last.nbytes if last.nbytes else float("inf")
