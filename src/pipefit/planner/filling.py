"""Fills the stages of a split: for each the cheapest choice with which its device has the memory.

The host takes what its link carries beside a microbatch's forward and backward, first of the blocks that cost the most
seconds for a byte to recompute, and of equal ones of the first, whose tensors live longest. What is still too much is
recomputed, the cheapest bytes first, and of equal ones those of the last blocks. This needs no search, because within
what the link carries moves add no time, and prices of recipes rise.

How many bytes a choice frees is estimated by the microbatches in flight. The ledger then says what each device really
needs, for all stages at once, and the estimate is corrected by the difference: mostly two to four simulations. (The
idea of a knapsack for each stage: AdaPipe, ASPLOS 2024.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from pipefit.planner.bounds import Work, highest_line, host_rates, in_flight, position_of
from pipefit.planner.choices import KEPT, TO_HOST, TO_PEERS, Floats, Menu, Prices, StageChoice, ranges
from pipefit.planner.closed_forms.bands import Band, stage_peak
from pipefit.planner.driver import range_peak
from pipefit.planner.evaluation import Budget, Candidate, Evaluation, Evaluator
from pipefit.planner.problem import Means, Question, Split
from pipefit.schema.devices import Place

# ----------------------------------------------------------------------------------------------------
# Splits that may become fast plans once tensors are moved and recomputed: what one plan's stages take is
# balanced.
#
# The time split balances forward and backward, the exact planner's split balances peaks. Between them lie
# splits whose early stages, which hold the most microbatches, get fewer blocks because what they recompute
# takes time too. For every range of blocks at every place the seconds of a microbatch are estimated: forward,
# backward, and what must be recomputed after the host has taken the part of its link that is allowed. Dynamic
# programming then finds the split whose seconds are the most even, by the sum of their high powers, which the
# largest dominate.
#
# Costs: as the bound's; a few hundredths of a second for 128 blocks in 8 stages.

_POWER = 12.0
_MISSING = 1e3  # times the seconds of all blocks, for each share of the budget that a range is too large by
_AWAY = 2.0
DOUBLE = 2  # blocks whose optimizer state is on the device while one of them is updated


class Balance:
    """The estimates for all ranges of blocks, where stage s is on `devices[s]`."""

    def __init__(self, question: Question, devices: Sequence[int]) -> None:
        self.question, self.prices, self._devices = question, Prices(question), tuple(devices)
        self.passes = ranges(self.prices.forward + self.prices.backward)
        self._known: dict[int, Floats] = {}
        self.valid = np.arange(question.blocks)[:, None] < np.arange(question.blocks + 1)

    def split(self, host: float, *, states: bool = False) -> Split:
        """The most even split where moves to the host may use the part `host` of its link.

        With `states` the host has all optimizer state, but for that of the blocks that are being updated.
        """
        count, stages = self.question.blocks, self.question.stages
        even = float(self.passes[0, -1]) / stages or 1.0
        reached, came = np.full(count + 1, np.inf), list[np.ndarray[tuple[int], np.dtype[np.intp]]]()
        reached[0] = 0.0
        for stage in range(stages):
            cost = np.where(self.valid, (self._seconds(stage, host, states) / even) ** _POWER, np.inf)
            total = reached[:-1, None] + cost
            came.append(total.argmin(axis=0))
            reached = total.min(axis=0)
        edges = [count]
        for before in reversed(came):
            edges.append(int(before[edges[-1]]))
        return Split(tuple(reversed(edges)), self._devices)

    def _seconds(self, stage: int, host: float, states: bool) -> Floats:
        """Seconds of a microbatch, for every range as this stage; far more where nothing makes the range fit."""
        held = self._in_flight[stage]
        budget = self.question.cluster.budgets[self._devices[stage]]
        need = self._peaks(stage) - budget - (self._away if states else 0.0)
        need = np.where(need > 0, need + self._largest, 0.0)
        moved = self._rates[stage] * host * self.passes * max(0.0, held - _AWAY)
        left = np.maximum(need - moved, 0.0)
        missing = np.maximum(left - held * self._kept, 0.0) / budget
        recomputed = self.prices.seconds(left, held) / held
        return self.passes + recomputed + missing * _MISSING * float(self.passes[0, -1])

    def _peaks(self, stage: int) -> Floats:
        """The peak of every range that keeps everything."""
        if stage not in self._known:
            blocks = self.question.blocks
            peaks = stage_peak(self._band, self.question.surroundings(stage))
            found = self._known[stage] = np.zeros_like(self.passes)
            for start in range(blocks):
                found[start, start + 1 :] = peaks[: blocks - start, start]
        return self._known[stage]

    @cached_property
    def _band(self) -> Band:
        return self.question.ranges.band(self.question.blocks, estimated=True)

    @cached_property
    def _kept(self) -> Floats:
        return self.prices.kept()

    @cached_property
    def _largest(self) -> float:
        """What the block that keeps the most keeps: it is there once more while it is recomputed."""
        return max(float(self._kept[n, n + 1]) for n in range(self.question.blocks))

    @cached_property
    def _away(self) -> Floats:
        """The optimizer state that is away, of every range: all but that of two of the largest blocks."""
        state = ranges(self.question.ranges.state[np.array(self.question.edges)].astype(float))
        each = max(float(state[n, n + 1]) for n in range(self.question.blocks))
        return np.maximum(state - DOUBLE * each, 0.0)

    @cached_property
    def _in_flight(self) -> list[int]:
        stages = self.question.stages
        return [in_flight(self.question.training, stage, stages) for stage in range(stages)]

    @cached_property
    def _rates(self) -> list[float]:
        return host_rates(self.question.cluster, self._devices)


# ----------------------------------------------------------------------------------------------------

_ROUNDS, _FEW = 6, 2  # corrections of a setting, and those that there are in any case
_SLOWER = 0.02  # the part of a step by which a setting is given up that is slower
_WORK = 300_000  # new actions, after which settings get few corrections
_FILLING_AWAY = 2  # microbatches whose tensors are on the device though they move: one leaves and one comes back


States = Literal["stay", "needed", "all", "spill"]


class Setting(NamedTuple):
    """What filling is told of each stage of a split.

    `host` is the part of what the host's link carries that may be used; `early` how many of the last blocks that are
    recomputed go forward again one action ahead; `lent` how many blocks move to peers, and where. The host may take the
    optimizer `states` of all blocks, or of as many as are needed where nothing else is enough; or of all and, as far as
    that is not enough, gradients and parameters too. The part `updated` of those states is updated there.
    """

    split: Split
    host: tuple[float, ...]
    early: tuple[int, ...]
    lent: tuple[tuple[int, Place | None], ...]
    states: States = "stay"
    updated: tuple[float, ...] = ()

    @staticmethod
    def of(split: Split, host: float = 1.0, *, states: States = "stay", updated: float = 0.0) -> Setting:
        """The same for every stage, and nothing for peers."""
        count = len(split.devices)
        return Setting(split, (host,) * count, (0,) * count, ((0, None),) * count, states, (updated,) * count)


class Filled(NamedTuple):
    """A setting, the best candidate that filling made of it, and by how much its estimates were off at every stage."""

    setting: Setting
    found: Evaluation
    margins: tuple[float, ...]


class Filler:
    """Fills stages, and remembers what the whole stages need."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator, self.question = evaluator, evaluator.question
        self._asked = evaluator.question  # with all techniques
        self._budget = Budget(evaluator, _WORK)
        self._filled: dict[Setting, Filled | None] = {}
        self._peaks: dict[tuple[int, int, int], int] = {}

    def restricted(self, means: Means) -> Filler:
        """One with fewer techniques, which shares what is known of whole stages."""
        found = copy(self)
        found.evaluator = self.evaluator.restricted(means)
        found.question, found._filled = found.evaluator.question, {}
        found._budget = Budget(found.evaluator, _WORK)
        return found

    def fill(
        self, setting: Setting, margins: Sequence[float] | None = None, *, than: Evaluation | None = None
    ) -> Filled | None:
        """The best candidate of a setting; None if its decisions cannot be carried out.

        `margins` are those that filling found for a setting like this one. A setting that is visibly slower `than` a
        plan that fits, while it does not fit yet, is given up.
        """
        if setting not in self._filled:
            limit = than.seconds * (1 + _SLOWER) if than is not None and than.fits else float("inf")
            self._filled[setting] = self._fill(setting, margins or (0.0,) * len(setting.host), limit)
        return self._filled[setting]

    def others(self, than: Filled, count: int) -> list[Filled]:
        """The best candidates of so many other splits than that of `than`, as far as they were filled."""
        found: dict[Split, Filled] = {}
        known = [one for one in self._filled.values() if one is not None]
        for filled in sorted(known, key=lambda one: one.found.order):
            found.setdefault(filled.setting.split, filled)
        return [one for split, one in found.items() if split != than.setting.split][:count]

    def _fill(self, setting: Setting, margins: Sequence[float], limit: float) -> Filled | None:
        split, best = setting.split, None
        needs = [float(p - b) for p, b in zip(self._whole(split), self._budgets(split), strict=True)]
        off = list(margins)
        for number in range(_ROUNDS):
            if number >= _FEW and self._budget.ends():
                break
            choices = self._choices(setting, [need + more for need, more in zip(needs, off, strict=True)])
            found = self.evaluator.evaluate(Candidate(split, choices))
            if found is None:
                break
            if best is None or found.order < best.found.order:
                best = Filled(setting, found, tuple(off))
            if found.seconds > limit or not self._corrected(off, found, choices):
                break
        return best

    def _corrected(self, off: list[float], found: Evaluation, choices: Sequence[StageChoice]) -> bool:
        """Correct the margins by what the ledger found; whether that may change anything."""
        changed = False
        for stage, (over, choice) in enumerate(zip(found.over, choices, strict=True)):
            if over > 0 or (over < 0 and not choice.idle and self._spare(found.candidate, stage, choice) < -over):
                off[stage] += over
                changed = True
        return changed

    def _spare(self, candidate: Candidate, stage: int, choice: StageChoice) -> float:
        """The fewest bytes that doing one thing less would bring back to a stage."""
        menus, held = self.evaluator.stage_menus(candidate.split)[stage], self.in_flight(candidate.split, stage)
        steps = [
            (menu.recipes[n].nbytes - menu.recipes[n - 1].nbytes) * held
            for menu, n in zip(menus, choice.recipes, strict=True)
            if n
        ]
        return min(steps, default=float("inf"))

    # ---------------------------------------------------------------- what is known of a split

    def fewest_seconds(self, split: Split) -> float:
        """Seconds that a step of a split takes at least, whatever is done with tensors."""
        how, forward, backward = self.question.training, self._prices.forward, self._prices.backward
        before, whole = forward + backward, float(forward[-1] + backward[-1])
        found = [0.0]
        for stage, (start, stop) in enumerate(pairwise(split.edges)):
            if how.endless:
                found.append(how.microbatches * float(before[stop] - before[start]))
                continue
            at = position_of(how.schedule, stage, len(split.devices), how.microbatches)
            passes = forward[stop] - forward[start], backward[stop] - backward[start]
            found.append(float(highest_line(at, Work(*passes, before[start], whole))))
        return max(found)

    def keeps(self, split: Split) -> bool:
        """Whether every stage of a split has room for all that it makes."""
        return all(peak <= budget for peak, budget in zip(self._whole(split), self._budgets(split), strict=True))

    def _whole(self, split: Split) -> tuple[int, ...]:
        stages = enumerate(pairwise(split.edges))
        return tuple(self._peak(stage, *edges) for stage, edges in stages)

    def _peak(self, stage: int, start: int, stop: int) -> int:
        """The peak of a stage that keeps everything."""
        key = stage, start, stop
        if key not in self._peaks:
            self._peaks[key] = range_peak(self._asked, stage, start, stop)
        return self._peaks[key]

    def _budgets(self, split: Split) -> list[int]:
        return [self.question.cluster.budgets[device] for device in split.devices]

    def in_flight(self, split: Split, stage: int) -> int:
        """The microbatches that a stage holds at once."""
        return in_flight(self.question.training, stage, len(split.devices))

    @cached_property
    def _prices(self) -> Prices:
        return Prices(self._asked)

    def host_bytes(self, setting: Setting, stage: int) -> tuple[float, float]:
        """Bytes of a microbatch that a stage may move to the host: beside its forward, and beside both passes.

        Devices that share a wire to the host share what it carries.
        """
        start, stop = list(pairwise(setting.split.edges))[stage]
        forward, backward = (float(t[stop] - t[start]) for t in (self._prices.forward, self._prices.backward))
        rate = self.rates(setting)[stage] * setting.host[stage]
        return rate * forward, rate * (forward + backward)

    def rates(self, setting: Setting) -> list[float]:
        """Bytes per second that each stage's device has to its host, if all stages that may move anything do."""
        split = setting.split
        may = [
            setting.host[stage] and self.in_flight(split, stage) > _FILLING_AWAY for stage in range(len(split.devices))
        ]
        may = may if self.question.means.host else [False] * len(may)
        moving = [device if moves else None for device, moves in zip(split.devices, may, strict=True)]
        return host_rates(self.question.cluster, moving)

    # ---------------------------------------------------------------- choices

    def _choices(self, setting: Setting, needs: Sequence[float]) -> tuple[StageChoice, ...]:
        stages = enumerate(zip(self.evaluator.stage_menus(setting.split), needs, strict=True))
        return tuple(self._choice(setting, stage, menus, need) for stage, (menus, need) in stages)

    def _choice(self, setting: Setting, stage: int, menus: Sequence[Menu], need: float) -> StageChoice:
        """The cheapest choice of a stage that is to free `need` bytes."""
        held, (near, most) = self.in_flight(setting.split, stage), self.host_bytes(setting, stage)
        lent, peers = setting.lent[stage]
        states = self._state_bytes(menus) if setting.states in ("all", "spill") and need > 0 else []
        need -= max(0, sum(states) - DOUBLE * max(states, default=0))
        blocks = _Blocks(menus)
        for to_host in range(len(menus), -1, -1):
            moving = _Moving(blocks, need, max(0, held - _FILLING_AWAY))
            moving.take(TO_PEERS, lent)
            moved = moving.take(TO_HOST, to_host, most)
            recipes, left = _recomputed(moving, held)
            if left <= 0 or not moved:
                break
        count = self.states(menus, left) if setting.states == "needed" else len(states)
        updates = round(setting.updated[stage] * count)
        gradients, parameters = self._spilled(menus[updates:], left) if setting.states == "spill" else (0, 0)
        return StageChoice(
            recipes=recipes,
            places=tuple(moving.places),
            near=moving.fitting(near),
            early=setting.early[stage],
            states=count,
            updates=updates,
            gradients=gradients,
            parameters=parameters,
            peers=peers if lent else None,
        )

    def _spilled(self, menus: Sequence[Menu], need: float) -> tuple[int, int]:
        """Of how many blocks the host is to take gradients, and of how many parameters, to free `need` bytes.

        Of both, those of two blocks are on the device at once.
        """
        counts = []
        for nbytes in self._bytes(menus, "gradient_bytes"), self._bytes(menus, "parameter_bytes"):
            freed = [sum(nbytes[:n]) - DOUBLE * max(nbytes[:n], default=0) for n in range(len(nbytes) + 1)]
            counts.append(next((n for n, enough in enumerate(freed) if enough >= need or need <= 0), len(nbytes)))
            need -= max(0, freed[counts[-1]])
        return counts[0], counts[1]

    def states(self, menus: Sequence[Menu], need: float) -> int:
        """Of how many blocks the host is to take the optimizer state, so that this frees `need` bytes."""
        taken = list[int]()
        for nbytes in self._state_bytes(menus) if need > 0 else ():
            if need + DOUBLE * max(taken, default=0) <= sum(taken):
                break
            taken.append(nbytes)
        return len(taken)

    def _state_bytes(self, menus: Sequence[Menu]) -> list[int]:
        """The optimizer state of every block, if the host may have it."""
        return self._bytes(menus, "state_bytes")

    def _bytes(self, menus: Sequence[Menu], kind: str) -> list[int]:
        """What the layers of every block have of a kind of state, if the host may have it."""
        if not (self.question.means.host and self.question.means.state):
            return []
        costs = self.question.measurement.costs
        return [sum(getattr(cost, kind) for cost in costs[menu.start : menu.stop]) for menu in menus]


class _Blocks:
    """The blocks of a stage: what each may move, in which order they do, and in which their bytes are recomputed."""

    def __init__(self, menus: Sequence[Menu]) -> None:
        self.bytes = [menu.movable_bytes for menu in menus]
        self.order = sorted(range(len(menus)), key=lambda block: (-_dearest(menus[block]), block))
        self.steps = [*_steps(menus)]


class _Moving:
    """Chooses the blocks whose tensors move; `need` is what is then left to free."""

    def __init__(self, blocks: _Blocks, need: float, away: int) -> None:
        self.blocks, self.need, self.away = blocks, need, away
        self.places = [KEPT] * len(blocks.bytes)

    def take(self, place: int, blocks: int, most: float = float("inf")) -> bool:
        """Move up to so many blocks and bytes to a place, as long as something is left to free; whether any moved."""
        for block in self.blocks.order if self.away else ():
            nbytes = self.blocks.bytes[block]
            if self.need > 0 and blocks and not self.places[block] and 0 < nbytes <= most:
                self.places[block] = place
                self.need, most, blocks = self.need - self.away * nbytes, most - nbytes, blocks - 1
        return place in self.places

    def fitting(self, most: float) -> int:
        """How many of the first blocks that go to the host have no more than `most` bytes; one has in any case."""
        count, total = 0, 0.0
        for block, place in enumerate(self.places):
            if place == TO_HOST:
                total += self.blocks.bytes[block]
                if total > most and count:
                    break
                count += 1
        return count


def _recomputed(moving: _Moving, held: int) -> tuple[tuple[int, ...], float]:
    """The recipes of the blocks that do not move, and the bytes that are then still to be freed."""
    recipes, need = [0] * len(moving.places), moving.need
    for block, number, nbytes in moving.blocks.steps:
        if need <= 0:
            break
        if not moving.places[block]:
            recipes[block], need = number, need - held * nbytes
    return tuple(recipes), need


def _dearest(menu: Menu) -> float:
    """Seconds that a byte costs if all of a block is recomputed; infinity where it cannot be."""
    last = menu.recipes[-1]
    return last.seconds / last.nbytes if last.nbytes else float("inf")


def _steps(menus: Sequence[Menu]) -> Iterator[tuple[int, int, int]]:
    """The steps from recipe to recipe, the cheapest bytes first: block, number of the recipe, bytes that it adds."""
    found = []
    for block, menu in enumerate(menus):
        for number, (one, other) in enumerate(pairwise(menu.recipes), 1):
            more = other.nbytes - one.nbytes
            found.append(((other.seconds - one.seconds) / more, -block, number, more))
    for _, block, number, more in sorted(found):
        yield -block, number, more
