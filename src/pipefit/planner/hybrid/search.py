"""The best plans whose stages may be on grids of devices: the leanest one, and the fastest that fits.

The search covers every cut between blocks, every number of stages and every degree of every stage, on every
choice of devices (`hybrid.programme`), with every state that replicas may divide (ZeRO). The peak is the
closed form's, equal to the simulator's to the byte. If replicas divide state, a lower bound
(`hybrid.divided_state`) replaces it until a plan has such a stage; the stage's program is then read, and the
search is repeated with that peak. So the last plan is optimal, unless a limit of work ends the search first.
Seconds are estimates: they leave out messages, and assume that reductions at the end of a step are hidden by
its last backward. Collectives of every microbatch count as far as the pass beside them is shorter. Exact
seconds need a simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from pipefit.errors import UsageError
from pipefit.lowering import Recompute, cuts
from pipefit.planner.bounds import in_flight
from pipefit.planner.hybrid.divided_state import Reader, buckets_of
from pipefit.planner.hybrid.programme import (
    Cost,
    Costs,
    Floats,
    Placed,
    Programme,
    StageRequest,
    States,
    Way,
    banded,
    grids_of,
    states_of,
)
from pipefit.planner.hybrid.tables import DegreeTables, StageSeconds, barred_cuts
from pipefit.planner.memory_choices import BlockPrices
from pipefit.planner.problem import SINGLE, Degree, DeviceClass, Question, Split
from pipefit.schema.decisions import Decision, Run, What
from pipefit.schema.devices import DeviceKind
from pipefit.schema.grids import Sharding
from pipefit.texts import counted
from pipefit.timing import Group

# ---- Classes of devices
#
# The number of states of the search grows with the number of classes. Merged classes have the budget of their
# smallest device, so results still fit, but better plans may exist.

SLIGHT = 0.05  # difference of budgets, as a part, up to which classes are similar
Sizes = Sequence[int]  # devices of every class, the smallest devices first


class FewClasses(NamedTuple):
    """Classes of devices, and the smallest part of a budget that is kept: 1 if no classes were merged."""

    classes: tuple[DeviceClass, ...]
    kept: float


def few_classes(
    question: Question, is_cheap: Callable[[Sizes], bool], is_possible: Callable[[Sizes], bool]
) -> FewClasses:
    """Return the classes of a question, merged as needed, in the order of their lowest device numbers.

    Similar classes are merged until a search is cheap, and any two until it is possible at all; `is_cheap`
    and `is_possible` decide that from the sizes of classes. The merge that loses the least memory comes
    first, different kinds last.
    """
    left = sorted(question.classes, key=lambda kind: kind.memory_bytes)
    while len(left) > 1:
        lost = [_lost(question, *pair) for pair in pairwise(left)]
        kinds, _, share = least = min(lost)
        sizes = [len(one.devices) for one in left]
        if (is_possible if kinds or share > SLIGHT else is_cheap)(sizes):
            break
        at = lost.index(least)
        small, large = left[at : at + 2]
        left[at : at + 2] = [DeviceClass(small.memory_bytes, tuple(sorted(small.devices + large.devices)))]
    largest = [max(question.cluster.budgets[device] for device in one.devices) for one in left]
    kept = min(one.memory_bytes / most for one, most in zip(left, largest, strict=True))
    return FewClasses(tuple(sorted(left, key=lambda one: one.devices)), kept)


def _lost(question: Question, small: DeviceClass, large: DeviceClass) -> tuple[bool, float, float]:
    """Return the loss of merging two classes.

    Whether the kinds differ, the lost budgets in units of a larger device, and the lost part of one device.
    """
    kinds = {question.cluster.devices[device].kind.key for device in small.devices + large.devices}
    share = 1 - small.memory_bytes / large.memory_bytes
    return len(kinds) > 1, share * len(large.devices), share


# ---- Search

_FEW = 4  # stages of plans that are searched first, because they rule out most others
_INFINITE = float("inf")
_ROUNDING = 1 + 1e-9
WORK = 1_000_000  # candidate stages that are compared again after reading exact peaks
LONG = 2_000_000_000  # candidate stages times device states, above which not all are distinguished
_CHEAP = LONG // 4  # the same number, up to which similar classes of devices are not merged
_STATES, _CELLS = (
    40_000,
    1_500_000,
)  # largest number of device states, and of device states times blocks, in tables
_CLASSES = 12  # largest number of device classes; 13 have a million states


class Hybrid(NamedTuple):
    """Plan of the search: its split, minimised value, number of compared candidate stages, and stages.

    No plan has a value below the `bound`.
    """

    split: Split
    value: float
    evaluated: int
    stages: tuple[Placed, ...]
    bound: float = 0.0


def searches(
    question: Question, shards: Sequence[Sharding] = ("none",), *, again: bool = False
) -> list[HybridSearch]:
    """Return the searches over a question.

    One, or one for each group of degrees with the same parts of shared parameters, since stages that share a
    parameter must hold the same part.
    """
    alike: dict[object, list[Degree]] = {}
    for degree in question.degrees:
        forms = tuple(shared.form for shared in question.measured(degree).shared)
        alike.setdefault((degree.tensor, forms) if forms else None, []).append(degree)
    return [HybridSearch(question, degrees, shards, again=again) for degrees in alike.values()]


def candidates(question: Question, shards: Sequence[Sharding], *, again: bool = False) -> int:
    """Return the number of stages that a search compares, with all ways to save memory."""
    every = searches(question, shards, again=again)
    return sum(search.candidates for search in every)


def leanest(question: Question, every: Sequence[HybridSearch] = ()) -> Hybrid:
    """Return the plan with the lowest peak; of equal ones, the one with the fewest estimated seconds.

    `every` are the question's searches. The value is in bytes, or a share of unequal budgets. The bound
    equals it, unless a limit of work has ended the search; then the best plan of whole replicas, whose peaks
    are exact, is compared too. The bound is also lower if device classes were merged.
    """
    every, best = every or searches(question, question.shards), list[Hybrid]()
    for _ in range(1 + WORK // candidates(question, question.shards)):
        level, number = min((search.level(), number) for number, search in enumerate(every))
        result = every[number].fastest(level, most=1)[0]
        best.append(result._replace(value=every[number].value(result)))
        if best[-1].value <= level:
            break
    least = level if best[-1].value <= level else min(one.level() for one in every)
    if best[-1].value > least and len(question.shards) > 1:
        best.insert(0, leanest(replace(question, options=replace(question.options, shard="none"))))
    result = min(reversed(best), key=lambda hybrid: hybrid.value)
    return result._replace(bound=min(result.value, least * every[0].kept))


def leanest_split(question: Question) -> Split:
    """Return the split of the leanest plan, without its value.

    Exact peaks are read only if there is work left for another search with them.
    """
    every = searches(question, question.shards)
    if candidates(question, question.shards) <= WORK:
        return leanest(question, every).split
    level, number = min((search.level(), number) for number, search in enumerate(every))
    return every[number].fastest(level, most=1)[0].split


def repeated(question: Question, hybrid: Hybrid) -> tuple[Decision, ...]:
    """Return the decisions of a plan to recompute, for all microbatches."""
    result = list[Decision]()
    for number, placed in enumerate(hybrid.stages):
        ends = question.edges[placed.start], question.edges[placed.stop]
        edges = question.edges if placed.way.recompute == "always" else ()
        for start, stop in pairwise(cuts(edges, *ends)) if placed.way.recompute != "never" else ():
            result.append(Decision(stage=number, subject=Run(start=start, stop=stop), what=What.RECOMPUTE))
    return tuple(result)


def budget_level(question: Question) -> float:
    """Return the level within which plans fit: bytes, or 1 for shares of unequal budgets."""
    return float(question.cluster.budgets[0]) if question.equal_budgets else 1.0


class StageTimes(NamedTuple):
    """Seconds of stages: a step with its end, a microbatch, its longer pass, and those its backward idles."""

    step: Floats
    each: Floats
    longer: Floats
    idle: Floats


def _kept(way: Way) -> Way:
    """Return a way without recomputation of separate blocks."""
    return way._replace(recompute="never") if way.recompute == "always" else way


class HybridSearch:
    """Choices of a question, for all degrees or some, and dynamic programs over them."""

    def __init__(
        self,
        question: Question,
        degrees: Sequence[Degree] | None = None,
        shards: Sequence[Sharding] = ("none",),
        *,
        again: bool = False,
    ) -> None:
        self.question, degrees, self.shards, self.again = question, degrees or question.degrees, shards, again
        self.tables = {degree: DegreeTables(question, degree) for degree in degrees}
        few = few_classes(question, self._is_cheap, self._is_possible)
        self.classes, self.kept = sorted(few.classes, key=lambda kind: kind.memory_bytes), few.kept
        self.states = States([len(cls_.devices) for cls_ in self.classes])
        self.choices = [
            StageRequest(degree, take) for degree in degrees for take in self.states.takes(degree.devices)
        ]
        self.barred = barred_cuts(question, self.tables)
        self.expects = False  # assume that other peaks exceed their bounds as much as the read ones
        self._reader = Reader(question)
        self._level = _INFINITE  # if it is known
        self._may_start: dict[float, list[range]] = {}  # by level
        self._times: dict[tuple[Degree, int, Way], StageTimes] = {}
        self._price: dict[tuple[Degree, int], BlockPrices] = {}
        self._quickest: dict[tuple[Degree, int, float], list[tuple[Way, Floats, Floats, Floats]]] = {}

    def _is_cheap(self, sizes: Sizes) -> bool:
        """Return whether a search over classes of these sizes is cheap."""
        cases = self._stages * len(self.tables) * len(sizes)
        return len(sizes) <= _CLASSES and cases * states_of(sizes) <= _CHEAP

    def _is_possible(self, sizes: Sizes) -> bool:
        """Return whether the tables for classes of these sizes are small enough."""
        return len(sizes) <= _CLASSES and states_of(sizes) <= min(_STATES, _CELLS / self.question.blocks)

    def ways(self, degree: Degree) -> list[Way]:
        """Return the ways in which a stage of this degree may save memory."""
        shards = self.shards if degree.data > 1 else ("none",)
        settings: tuple[Recompute, ...] = ("never", "always", "stages") if self.again else ("never",)
        return [Way(shard, recompute) for recompute in settings for shard in shards]

    @property
    def counts(self) -> range:
        """Numbers of stages. If each stage has one device, the stages use all devices."""
        fewest = min(degree.devices for degree in self.tables)
        pinned = self.question.options.stages
        most = max(1, min(self.question.blocks, len(self.question.cluster.devices) // fewest))
        pinned = self.question.stages if self.question.degrees == (SINGLE,) else pinned
        return range(1, most + 1) if pinned is None else range(pinned, pinned + 1)

    def level(self, at_most: float = _INFINITE) -> float:
        """Return the lowest highest peak of plans, in bytes or as a share; infinity if it is above `at_most`.

        A lower bound if replicas divide state. The level is cached until more peaks are read.
        """
        if self._level == _INFINITE:
            self._level = self._lowest(min(at_most, self._equal))
        return self._level

    def _lowest(self, at_most: float) -> float:
        """Return the level, if it is not above `at_most`."""

        def cost(left: int, choice: StageRequest) -> Cost:
            tables, ways, starts = (
                self.tables[choice.degree],
                self.ways(choice.degree),
                self._starts(at_most)[left],
            )
            width = self._widest(left, choice, at_most)
            peaks = np.minimum.reduce([tables.rows(left, way, width, starts) for way in ways])
            shares = peaks / self.unit(choice)
            shares = np.where(shares <= at_most, shares, _INFINITE)
            width = 1 + np.flatnonzero((shares < _INFINITE).any(axis=0)).max(initial=-1)
            return Cost(shares[:, :width], first=starts.start)

        programme = self.programme(cost)
        return min(programme.values[count - 1] for count in self.counts)

    def _widest(self, left: int, choice: StageRequest, level: float) -> int:
        """Return a number of blocks that no stage with this choice exceeds within a memory level."""
        tables, nbytes = self.tables[choice.degree], level * self.unit(choice)
        return max(tables.widest(left, way, nbytes) for way in self.ways(choice.degree))

    def _starts(self, level: float) -> list[range]:
        """Return the blocks at which stages may start within a memory level, by the stages left from there.

        The stages before have room for the blocks before, and the stages left for all others. Empty ranges
        become one block, for which no plan exists either.
        """
        if level not in self._may_start:
            blocks, fewest = self.question.blocks, min(degree.devices for degree in self.tables)
            most = min(self.counts[-1], max(1, len(self.question.cluster.devices) // fewest))
            widest = [
                max(self._widest(left, one, level) for one in self.choices) for left in range(1, most + 1)
            ]
            behind = [0, *accumulate(widest)]
            starts = [range(blocks)] * (1 + self.counts[-1])
            for left in range(1, most + 1):
                first = max(0, blocks - behind[left])
                last = min(blocks - left, behind[most] - behind[left])
                starts[left] = range(first, max(first, last) + 1)
            self._may_start[level] = starts
        return self._may_start[level]

    @property
    def _equal(self) -> float:
        """The lowest highest peak of plans whose stages have equal numbers of blocks and the same choice."""
        result, blocks = [_INFINITE], self.question.blocks
        for choice in self.choices:
            there = sum(len(cls_.devices) for cls_ in self.classes[choice.take.lowest :])
            stages = max((n for n in self.counts if n * choice.degree.devices <= there), default=0)
            edges = [number * blocks // stages for number in range(stages + 1)] if stages else []
            peaks = (
                min(
                    self.tables[choice.degree].peak(stages - n, way, *ends)
                    for way in self.ways(choice.degree)
                )
                for n, ends in enumerate(pairwise(edges))
            )
            result.append(max(peaks, default=_INFINITE) / self.unit(choice))
        return min(result) * _ROUNDING

    def best(self, cost: Costs) -> Hybrid:
        """Return the plan with the lowest value by these costs, over all numbers of stages."""
        programme = self.programme(cost)
        value, count = min((programme.values[count - 1], count) for count in self.counts)
        if value == _INFINITE:
            raise UsageError(
                f"{self.question.profile.parts} cannot be planned with at most "
                f"{counted(self.counts[-1], 'stage')} on the devices of {self.question.cluster.name} by "
                "these costs: use other numbers of replicas and shards, or leave them open"
            )
        return self._made(programme.best(count), value)

    def fastest(self, level: float, at_most: float = _INFINITE, most: int | None = None) -> list[Hybrid]:
        """Return up to `most` fastest plans within a memory level, one for each number of stages.

        A plan must not be slower than the best one of few stages, nor than `at_most` seconds.
        """
        few = self.programme(lambda left, choice: self._within(left, choice, level, at_most), most=_FEW)
        slowest = min((few.values[count - 1] for count in self.counts if count <= _FEW), default=_INFINITE)
        slowest, programme = min(slowest * _ROUNDING, at_most), few
        if most != 1 or self.counts[-1] > _FEW:
            programme = self.programme(lambda left, choice: self._within(left, choice, level, slowest))
        values = {count: programme.values[count - 1] for count in self.counts}
        result = sorted((value, count) for count, value in values.items() if value < _INFINITE)
        return [self._made(programme.best(count), value, level) for value, count in result[:most]]

    def _made(self, stages: tuple[Placed, ...], value: float, level: float = _INFINITE) -> Hybrid:
        left = range(len(stages), 0, -1)
        stages = tuple(
            placed._replace(way=self._way(n, placed, level)) for n, placed in zip(left, stages, strict=True)
        )
        return Hybrid(self.split(stages), value, self.evaluated, stages)

    def _way(self, left: int, placed: Placed, level: float) -> Way:
        """Return the way to save memory with the fewest seconds within a level."""

        def seconds(way: Way) -> float:
            peak = self.tables[placed.choice.degree].peak(left, way, placed.start, placed.stop)
            if peak / self.unit(placed.choice) > level:
                return _INFINITE
            result = float(self.seconds(placed.choice, _kept(way)).step[placed.start, placed.stop])
            if way.recompute == "always" and level < _INFINITE:
                ends = placed.stop - placed.start, range(placed.start, placed.start + 1)
                idle = self.seconds(placed.choice, _kept(way)).idle[placed.start, placed.stop]
                again = self._again(left, placed.choice, way, level, *ends)[0, -1] - idle
                result += self.question.training.microbatches * max(0.0, float(again))
            return result

        return min(self.ways(placed.choice.degree), key=seconds)

    def value(self, hybrid: Hybrid) -> float:
        """Return the highest peak of a plan's stages, in bytes or as a share; reads unknown peaks."""
        left = range(len(hybrid.stages), 0, -1)
        known = [
            self.tables[one.choice.degree].read(n, one.way, one.start, one.stop)
            for n, one in zip(left, hybrid.stages, strict=True)
        ]
        numbers = [number for number, nbytes in enumerate(known) if nbytes is None]
        decisions = repeated(self.question, hybrid)
        self._level = _INFINITE if numbers else self._level
        for number, nbytes in zip(numbers, self._reader.peaks(hybrid.split, numbers, decisions), strict=True):
            placed, known[number] = hybrid.stages[number], nbytes
            tables = self.tables[placed.choice.degree]
            tables.take(left[number], placed.way, placed.start, placed.stop, nbytes, expects=self.expects)
        return max(
            (nbytes or 0) / self.unit(one.choice) for nbytes, one in zip(known, hybrid.stages, strict=True)
        )

    @property
    def evaluated(self) -> int:
        """Number of candidate stages: all ranges of blocks, places, degrees, and choices of devices."""
        return self._stages * len(self.choices)

    @property
    def _stages(self) -> int:
        """Number of ranges of blocks at every place."""
        blocks = self.question.blocks
        return blocks * (blocks + 1) // 2 * self.counts[-1]

    @property
    def candidates(self) -> int:
        """Number of candidate stages with all ways to save memory."""
        return self.evaluated * len(self.ways(max(self.tables)))

    def programme(self, cost: Costs, most: int | None = None) -> Programme:
        """Return the tables for all numbers of stages, or for up to `most`, by these costs."""
        question = self.question
        return Programme(
            question.blocks,
            self.states.count,
            self.choices,
            cost,
            min(self.counts[-1], most or self.counts[-1]),
            self.barred,
        )

    # ---- Costs

    def unit(self, choice: StageRequest) -> int:
        """Return the divisor of peaks: the smallest budget of a stage's devices if budgets differ, else 1."""
        return 1 if self.question.equal_budgets else self.classes[choice.take.lowest].memory_bytes

    def shares(self, left: int, choice: StageRequest) -> Floats:
        """Return the lowest peak of stages over all ways to save memory, as a share if budgets differ."""
        tables, ways = self.tables[choice.degree], self.ways(choice.degree)
        peaks: Floats = np.minimum.reduce([tables.peaks(left, way) for way in ways])
        return peaks / self.unit(choice)

    def _within(self, left: int, choice: StageRequest, level: float, most: float = _INFINITE) -> Cost:
        """Return the seconds of stages by the fastest way whose peak is within the level.

        Infinity if the seconds are more than `most`.
        """
        unit, tables, starts = self.unit(choice), self.tables[choice.degree], self._starts(level)[left]
        stages = slice(starts.start, starts.stop), slice(self._widest(left, choice, level))
        quick = self._quick(choice, most)
        known = [(way, head[stages], add[stages], idle[stages]) for way, head, add, idle in quick]
        width = known[0][1].shape[1]
        best, each = np.full_like(known[0][1], _INFINITE), np.zeros_like(known[0][1])
        for way, head, add, idle in known if width else ():
            fits, again = tables.rows(left, way, width, starts) / unit <= level, np.zeros_like(head)
            if way.recompute == "always":
                again = np.maximum(self._again(left, choice, way, level, width, starts) - idle, 0.0)
            step = head + self.question.training.microbatches * again
            within = np.where(fits & (step <= most), step, _INFINITE)
            best, each = np.minimum(within, best), np.where(within < best, add + again, each)
        return Cost(best, each, starts.start)

    def _again(
        self, left: int, choice: StageRequest, way: Way, level: float, width: int, starts: range
    ) -> Floats:
        """Return the seconds in which stages recompute a microbatch's cheapest bytes, as many as they lack.

        Row i and column w are the w + 1 blocks from `starts[i]` on.
        """
        how, rows = self.question.training, np.arange(starts.start, starts.stop)[:, None]
        stops = np.minimum(rows + 1 + np.arange(width), self.question.blocks)
        kept = self.tables[choice.degree].rows(left, _kept(way), width, starts)
        held = in_flight(how, 0, left)
        prices = self._prices(choice)
        return (
            prices.seconds(kept - level * self.unit(choice), held, lambda sums: sums[stops] - sums[rows])
            / held
        )

    def _prices(self, choice: StageRequest) -> BlockPrices:
        """Return the prices of recomputation on the devices of a choice."""
        key = choice.degree, choice.take.lowest
        if key not in self._price:
            kinds = self._kinds(self._devices(choice))
            self._price[key] = BlockPrices(self.question.of_one(choice.degree), kinds)
        return self._price[key]

    def _quick(self, choice: StageRequest, most: float) -> list[tuple[Way, Floats, Floats, Floats]]:
        """Return every way's seconds of a step, up to `most`, of a microbatch, and idle ones of its backward.

        Without recomputation of separate blocks, whose seconds depend on the memory that stages lack.
        """
        key = choice.degree, choice.take.lowest, most
        if key not in self._quickest:
            every = [self.seconds(choice, _kept(way)) for way in self.ways(choice.degree)]
            quick = np.minimum.reduce([times.step for times in every]) <= most
            width = Cost.of(np.where(quick, 0.0, _INFINITE)).head.shape[1]
            self._quickest[key] = [
                (
                    way,
                    np.where(head <= most, head, _INFINITE),
                    banded(times.each, width),
                    banded(times.idle, width),
                )
                for way, times in zip(self.ways(choice.degree), every, strict=True)
                for head in (banded(times.step, width),)
            ]
        return self._quickest[key]

    def seconds(self, choice: StageRequest, way: Way | None = None) -> StageTimes:
        """Return the seconds of stages with this choice, in the given way or the first one."""
        way = way or self.ways(choice.degree)[0]
        key = choice.degree, choice.take.lowest, way
        if key not in self._times:
            devices = self._devices(choice)
            tables, kinds = self.tables[choice.degree], self._kinds(devices)
            (shards, replicas), cluster = choice.degree.groups(devices), self.question.cluster
            again = way.recompute != "never"
            passes = (tables.seconds(kind, Group.of(cluster, shards), again=again) for kind in kinds)
            slowest = StageSeconds(*(np.maximum.reduce(parts) for parts in zip(*passes, strict=True)))
            each, end, idle = tables.divided_seconds(slowest, Group.of(cluster, replicas), way.shard)
            step = self.question.training.microbatches * each + end
            longer = np.maximum(slowest.forward, slowest.backward)
            self._times[key] = StageTimes(step, each, longer, idle)
        return self._times[key]

    def _devices(self, choice: StageRequest) -> list[int]:
        """Return the devices of the classes that a choice may get."""
        return [
            device for number in self.states.classes(choice.take) for device in self.classes[number].devices
        ]

    def each(self, choice: StageRequest) -> Floats:
        """Return the seconds of a microbatch, with its part of the gradient all-reduce and of the update."""
        return self.seconds(choice)[0] / self.question.training.microbatches

    def barred_ranges(self, choice: StageRequest) -> Floats:
        """Return zero, or infinity for ranges that stages of this degree cannot hold."""
        return self.tables[choice.degree].barred

    def _kinds(self, devices: Sequence[int]) -> list[DeviceKind]:
        """Return the distinct kinds of some devices."""
        kinds = [self.question.cluster.devices[device].kind for device in devices]
        return list({kind.key: kind for kind in kinds}.values())

    def split(self, stages: tuple[Placed, ...]) -> Split:
        """Return the split of a plan on its devices."""
        edges = (0, *(stage.stop for stage in stages))
        hosts = [device.host for device in self.question.cluster.devices]
        free = [list(cls_.devices) for cls_ in self.classes]
        grids = grids_of([(stage.choice.degree, stage.choice.take.lowest) for stage in stages], free, hosts)
        grids = tuple(
            replace(
                grid, shard=placed.way.shard, buckets=buckets_of(placed.way.shard, placed.stop - placed.start)
            )
            for grid, placed in zip(grids, stages, strict=True)
        )
        return Split(edges, tuple(grid.devices[0] for grid in grids), grids)
