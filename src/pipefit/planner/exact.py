"""The exact planner, default for the objective `peak`: the plan with the proven lowest peak, in milliseconds.

For stages with one device each, the highest peak of all devices is as low as possible; among splits with that
highest peak the second highest is, and so on. The cost of a stage is its peak at its place in the schedule,
equal to the simulator's to the byte, so the plan needs no correction. 30 blocks on 4 devices take a few
milliseconds, 1,000 on 64 less than a second.

If the profile has the sizes of local batches, stages may have several devices, which share their work. Then
every number of stages and every degree of every stage is searched too (`planner.hybrid`), and grids are used
if they lower the highest peak.

Time is not considered: if balanced memory means unbalanced work, the step is slow. (Replaces the searches of
mCAP, section 3.4, and CAPTURE.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from pipefit.errors import UsageError
from pipefit.planner.closed_forms.bands import Band, stage_peak
from pipefit.planner.hybrid import HybridSearch, leanest, searches
from pipefit.planner.hybrid.search import Sizes, few_classes
from pipefit.planner.problem import SINGLE, PlannerResult, Question, Split
from pipefit.schema.actions import Kind

# ---- Lower bounds
#
# When a range of blocks grows, its parameters, gradients and optimizer state only grow, and so do the
# activations that are made and saved inside it (`Ranges.floor`). A stage that holds n microbatches at once
# needs for blocks i to j - 1 at least
#
#     owned(j) - owned(i) + n * (saved(j) - born(i))
#
# bytes. If it holds m microbatches while its gradients exist, the bound with m in place of n and gradients
# added to `owned` holds too. Both are a rising reach(j) minus a rising base(i), so binary search finds the
# last possible stop and the first possible start.

Floats = NDArray[np.float64]


class Window(NamedTuple):
    """Possible starts of a stage, blocks `first` to `last`, and possible widths, `narrowest` to `widest`."""

    first: int
    last: int
    narrowest: int
    widest: int


class _Line(NamedTuple):
    """One lower bound: blocks i to j - 1 need at least reach[j] - base[i] bytes."""

    reach: Floats
    base: Floats


class Bounds:
    """Lower bounds of all stages of a question."""

    def __init__(self, question: Question) -> None:
        self.stages, self.blocks = question.stages, question.blocks
        sums = (*question.ranges.owned(), *question.ranges.floor())
        owned, gradients, saved, born = (part.astype(float) for part in sums)
        self.lines: list[list[_Line]] = []
        for stage in range(self.stages):
            whole = (
                question.options.recompute != "always"
            )  # else one block of a microbatch has been recomputed
            held = [
                (s.in_flight + (s.kind is Kind.BACKWARD and (whole or not s.recomputed)), s.gradients)
                for s in question.surroundings(stage)
            ]
            n = max(number for number, _ in held)
            m = max((number for number, exist in held if exist), default=0)
            full = owned + gradients
            self.lines.append(
                [_Line(owned + n * saved, owned + n * born), _Line(full + m * saved, full + m * born)]
            )

    def windows(self, level: float) -> list[Window] | None:
        """Return the window of every stage if none may need more than `level` bytes, or None."""
        last = self._latest_starts(level)
        first = self._earliest_starts(level)
        if last[-1] < self.blocks or any(a > b for a, b in zip(first, last, strict=True)):
            return None
        return [self._window(stage, first, last, level) for stage in range(self.stages)]

    def greedy(self, level: float) -> tuple[int, ...] | None:
        """Return a split whose stages nearly keep to `level` by their bounds, early ones filled first."""
        last = self._latest_starts(level)
        if last[-1] < self.blocks or any(start < stage for stage, start in enumerate(last)):
            return None
        edges = [self.blocks]
        for stage in reversed(range(self.stages)):
            edges.append(min(last[stage], edges[-1] - 1))
        return tuple(reversed(edges))

    def lowest_split(self) -> tuple[int, ...]:
        """Return a split whose highest lower bound is about as low as possible, by bisection on the level."""
        high = float(max(line.reach[-1] for lines in self.lines for line in lines)) + 1.0
        low, best = 0.0, self.greedy(high)
        assert best is not None
        while high - low > 1e-3 * high:
            middle = (low + high) / 2
            result = self.greedy(middle)
            low, high, best = (middle, high, best) if result is None else (low, middle, result)
        return best

    def _latest_starts(self, level: float) -> list[int]:
        """Return the last possible start of every stage, then the number of blocks that all stages can hold.

        A later stage may have to start earlier than the one before: a block that is too large for one stage
        may fit a later one, which holds fewer microbatches.
        """
        starts = [0]
        for stage in range(self.stages):
            stop = int(self._stops(stage, np.array(starts[-1:]), level)[0])
            starts.append(min(stop, self.blocks - (self.stages - 1 - stage)))
        return starts

    def _stops(self, stage: int, starts: NDArray[np.intp], level: float) -> NDArray[np.intp]:
        """Return the last possible stop for each start."""
        lines = self.lines[stage]
        stops = [np.searchsorted(line.reach, level + line.base[starts], side="right") for line in lines]
        furthest: NDArray[np.intp] = np.minimum.reduce(stops) - 1
        return furthest

    def _earliest_starts(self, level: float) -> list[int]:
        """Return the first start of every stage from which it and the later ones can hold the rest."""
        starts = [self.blocks]
        for stage in reversed(range(self.stages)):
            lines = self.lines[stage]
            result = [
                int(np.searchsorted(line.base, line.reach[starts[-1]] - level, side="left")) for line in lines
            ]
            starts.append(max(stage, *result))
        return starts[::-1]

    def _window(self, stage: int, first: list[int], last: list[int], level: float) -> Window:
        starts = np.arange(first[stage], last[stage] + 1)
        widest = min(int((self._stops(stage, starts, level) - starts).max()), last[stage + 1] - first[stage])
        return Window(first[stage], last[stage], max(1, first[stage + 1] - last[stage]), max(1, widest))


# ---- Exact search
#
# It minimises the list of all stages' costs (bytes or shares of budgets), the highest first, in lexicographic
# order. A stage's cost depends on its blocks, position and device, not on other stages. If one placement of
# the first blocks has a lower list than another, its list stays lower after both get the same further stage.
# So dynamic programming is exact, over states (devices used of each class, blocks placed). A peak may fall
# when a block is added, because the cut then falls on a smaller tensor, so every width within the lower
# bounds is tried. Two passes:
#
#     1. from the last stage to the first: the lowest possible highest cost (the level), one number for each
#     state
#     2. from the first stage to the last: whole lists of costs, only for states that can stay within the
#     level
#
# Of splits with equal lists, the stages are compared from the last to the first: the smaller first block
# wins, then the earlier class of device.

Used = tuple[int, ...]  # number of devices of each class that hold a stage
Indices = NDArray[np.intp]

_FEW, _MANY = (
    4_000,
    20_000,
)  # tuples of used devices: up to this number without merging similar classes, and at most
_ROUNDING = 1 + 1e-9  # margin of bounds in bytes that are compared with shares of a budget


class Solution(NamedTuple):
    """The best split, its highest cost, and the number of evaluated candidate stages.

    `kept` is the smallest part of a budget that remains after merging device classes (`FewClasses`); if it is
    1, no split has a lower highest cost.
    """

    split: Split
    value: float
    evaluated: int
    kept: float


def solve(question: Question) -> Solution:
    """Return the best split of the question."""
    search = _ExactSearch(question)
    return search.best()


def _places(sizes: Sizes) -> int:
    """Return the number of tuples of used devices of each class."""
    return prod(size + 1 for size in sizes)


def is_possible(question: Question, level: float) -> bool:
    """Return whether the lower bounds allow a split whose highest cost is at most `level`."""
    units = [1 if question.equal_budgets else cls_.memory_bytes for cls_ in question.classes]
    return Bounds(question).windows(level * max(units) * _ROUNDING) is not None


class _Nodes(NamedTuple):
    """States after some stages: for each pair of `used` and `stop`, the costs of the best placement."""

    used: list[Used]
    place: Indices  # index into `used`
    stop: Indices
    costs: Floats  # shape (stages, nodes); for every node the highest first


class _Candidates(NamedTuple):
    """Candidate stages as parallel arrays.

    `target` is the number of the pair (used, stop).
    """

    source: Indices
    start: Indices
    kind: Indices
    target: Indices  # number of the pair (used, stop)
    cost: Floats

    def take(self, which: Indices | NDArray[np.bool_]) -> _Candidates:
        return _Candidates._make(part[which] for part in self)


class _ExactSearch:
    def __init__(self, question: Question) -> None:
        self.question, self.blocks, self.stages = question, question.blocks, question.stages
        self.classes, self.kept = few_classes(
            question, lambda sizes: _places(sizes) <= _FEW, lambda sizes: _places(sizes) <= _MANY
        )
        self.sizes = [len(c.devices) for c in self.classes]
        self.units = [1 if question.equal_budgets else c.memory_bytes for c in self.classes]
        self.bounds = Bounds(question)
        self.evaluated = 0
        self.windows: list[Window]
        self.band: Band

    def best(self) -> Solution:
        """Return the best split, by the two passes."""
        self._limit(self._achievable())
        self.band = self.question.ranges.band(max(window.widest for window in self.windows))
        rest = self._rest()
        level = float(rest[self._nothing][0])
        self._limit(level)
        return Solution(self._forward(rest, level), level, self.evaluated, self.kept)

    @property
    def _nothing(self) -> Used:
        return (0,) * len(self.sizes)

    def _limit(self, level: float) -> None:
        windows = self.bounds.windows(level * max(self.units) * _ROUNDING)
        assert windows is not None, "a level that some split achieves excludes every split"
        self.windows = windows

    def _achievable(self) -> float:
        """Return the highest cost of a split that is good by its bounds, on the largest devices."""
        edges = self.bounds.lowest_split()
        units = sorted(
            (u for u, n in zip(self.units, self.sizes, strict=True) for _ in range(n)), reverse=True
        )
        self.band = self.question.ranges.band(max(stop - start for start, stop in pairwise(edges)))
        ends = enumerate(pairwise(edges))
        return max(self._peak(s, *stage) / units[s] for s, stage in ends)

    def _peak(self, stage: int, start: int, stop: int) -> float:
        """Return the peak of blocks `start` to `stop - 1` as this stage."""
        within = slice(stop - start - 1, stop - start), slice(start, start + 1)
        return float(stage_peak(self.band, self.question.surroundings(stage), within).item())

    # ---- Costs

    def _costs(self, stage: int) -> Floats:
        """Return the peaks in the stage's window: row r has the ranges of `narrowest + r` blocks."""
        first, last, narrowest, widest = self.windows[stage]
        window = (slice(narrowest - 1, widest), slice(first, last + 1))
        peaks = stage_peak(self.band, self.question.surroundings(stage), window)
        self.evaluated += peaks.size
        return peaks.astype(float)

    def _places(self, stage: int) -> list[Used]:
        """Return every choice of `stage` devices, as numbers of each class, in rising order."""
        ways = product(*(range(size + 1) for size in self.sizes))
        return [used for used in ways if sum(used) == stage]

    def _next(self, used: Used) -> Iterator[tuple[int, Used]]:
        """Yield the classes with an unused device, each with `used` after taking one."""
        for kind, size in enumerate(self.sizes):
            if used[kind] < size:
                yield kind, (*used[:kind], used[kind] + 1, *used[kind + 1 :])

    # ---- Pass 1: the level

    def _rest(self) -> dict[Used, Floats]:
        """Return the lowest level of the remaining stages, by used devices and first unplaced block."""
        empty = np.full(self.blocks + self.band.valid.shape[0] + 2, np.inf)
        rest = {used: empty.copy() for used in self._places(self.stages)}
        for level in rest.values():
            level[self.blocks] = 0
        for stage in reversed(range(self.stages)):
            costs, window = self._costs(stage), self.windows[stage]
            by_kind = [costs / unit for unit in self.units]
            for used in self._places(stage):
                rest[used] = empty.copy()
                here = rest[used][window.first : window.last + 1]
                for kind, after in self._next(used):
                    following = _following(rest[after], window)
                    np.minimum(here, np.maximum(by_kind[kind], following).min(axis=0), out=here)
        return rest

    # ---- Pass 2: lists of costs

    def _forward(self, rest: dict[Used, Floats], level: float) -> Split:
        """Return the best split within the level, from the first stage to the last."""
        zero = np.zeros(1, np.intp)
        nodes = _Nodes([self._nothing], zero, zero, np.zeros((0, 1)))
        trail = []
        for stage in range(self.stages):
            chosen, nodes = self._step(stage, nodes, rest, level)
            trail.append(chosen)
        ends = [(*nodes.costs[:, node].tolist(), _path(trail, node)) for node in range(len(nodes.stop))]
        return self._split(min(ends)[-1])

    def _step(
        self, stage: int, nodes: _Nodes, rest: dict[Used, Floats], level: float
    ) -> tuple[_Candidates, _Nodes]:
        """Return the best candidate stage for every node after this stage, and those nodes."""
        places = self._places(stage + 1)
        result = list(self._within(stage, nodes, rest, level, places))
        candidates = _Candidates._make(map(np.concatenate, zip(*result, strict=True)))
        candidates = candidates.take(np.lexsort((candidates.kind, candidates.start, candidates.target)))
        chosen = _lowest(candidates, nodes.costs)
        place, stop = np.divmod(chosen.target, self.blocks + 1)
        return chosen, _Nodes(places, place, stop, _merged(nodes.costs, chosen))

    def _within(
        self, stage: int, nodes: _Nodes, rest: dict[Used, Floats], level: float, places: list[Used]
    ) -> Iterator[_Candidates]:
        """Yield the candidate stages after which all stages can stay within the level."""
        costs, window = self._costs(stage), self.windows[stage]
        by_kind = [costs / unit for unit in self.units]
        for place, used in enumerate(nodes.used):
            members = np.flatnonzero(nodes.place == place)
            columns = nodes.stop[members] - window.first
            for kind, after in self._next(used):
                cost = by_kind[kind][:, columns]
                row, column = np.nonzero(
                    np.maximum(cost, _following(rest[after], window)[:, columns]) <= level
                )
                start = nodes.stop[members[column]]
                target = places.index(after) * (self.blocks + 1) + start + row + window.narrowest
                yield _Candidates(
                    members[column], start, np.full_like(start, kind), target, cost[row, column]
                )

    def _split(self, path: tuple[tuple[int, int], ...]) -> Split:
        """Return the split of a path from the last stage to the first."""
        free = [iter(c.devices) for c in self.classes]
        starts = [start for start, _ in reversed(path)]
        return Split((*starts, self.blocks), tuple(next(free[kind]) for _, kind in reversed(path)))


def _path(trail: list[_Candidates], node: int) -> tuple[tuple[int, int], ...]:
    """Return the first block and device class of a path's stages, from the last stage to the first."""
    path = []
    for chosen in reversed(trail):
        path.append((int(chosen.start[node]), int(chosen.kind[node])))
        node = int(chosen.source[node])
    return tuple(path)


def _following(level: Floats, window: Window) -> Floats:
    """Return the element of `level` for the block after every range of the window."""
    first, last, narrowest, widest = window
    return sliding_window_view(level[first + narrowest : last + widest + 1], last - first + 1)


def _lowest(candidates: _Candidates, costs: Floats) -> _Candidates:
    """Return for every target the candidate with the lowest list of costs, the first one of equals.

    Candidates must be sorted by target. With a cost c, a list a0 >= a1 >= ... becomes the list max(a0, c),
    max(a1, min(a0, c)), max(a2, min(a1, c)), ...
    """
    high = np.full(len(candidates.cost), np.inf)
    for column in (*costs, np.zeros(costs.shape[1])):
        begins = _begins(candidates.target)
        if len(begins) == len(candidates.target):
            return candidates
        low = column[candidates.source]
        merged = np.maximum(low, np.minimum(high, candidates.cost))
        lowest = np.minimum.reduceat(merged, begins)
        keep = merged == np.repeat(lowest, np.diff(begins, append=len(merged)))
        candidates, high = candidates.take(keep), low[keep]
    return candidates.take(_begins(candidates.target))


def _begins(target: Indices) -> Indices:
    """Return the first index of each run of equal numbers."""
    return np.flatnonzero(np.concatenate(([True], target[1:] != target[:-1])))


def _merged(costs: Floats, chosen: _Candidates) -> Floats:
    """Return the lists of costs of the chosen candidates, highest first."""
    lists = costs[:, chosen.source]
    lists = np.vstack([lists, np.zeros((1, lists.shape[1]))])
    above = np.vstack([np.full((1, lists.shape[1]), np.inf), lists[:-1]])
    merged: Floats = np.maximum(lists, np.minimum(above, chosen.cost))
    return merged


# ---- Planner


def exact(question: Question) -> PlannerResult:
    """Return the plan with the lowest peak; without grids, also with the lowest second peak, and so on."""
    return _exact(question, ())


def _exact(question: Question, every: Sequence[HybridSearch]) -> PlannerResult:
    """Return the exact plan, found with the prepared searches `every` if there are any."""
    if question.degrees == (SINGLE,) and question.options.recompute != "always":
        return _alone(question)
    result = leanest(question, every)
    best = PlannerResult(result.split, question.objective, result.value, result.evaluated)
    if (
        SINGLE in question.degrees
        and question.options.recompute != "always"
        and is_possible(question, result.value)
    ):
        best = min(_alone(question), best, key=lambda one: one.value)
    return best._replace(proven=result.bound >= best.value, bound=min(result.bound, best.value))


def leanest_of(questions: Iterable[Question]) -> tuple[Question, PlannerResult]:
    """Return the question whose plan has the lowest peak, and that plan; its bound holds for all questions.

    Questions whose lower bound is not below a known peak are skipped. Questions with recomputation come
    first, because they mostly have the lowest peak.

    Raises:
        UsageError: no question has a plan; the error of the last one.
    """
    levels, refusal, best, known = list[tuple[float, int, Question]](), None, None, float("inf")
    kept: tuple[float, int, Sequence[HybridSearch]] = known, -1, ()  # of the lowest level, with cached tables
    for number, question in sorted(enumerate(questions), key=lambda one: one[1].options.recompute == "never"):
        try:
            alone = question.degrees == (SINGLE,) and question.options.recompute != "always"
            every = [] if alone else searches(question, question.shards)
            reached = min((search.level(known) for search in every), default=0.0)
        except UsageError as error:
            refusal = error
            continue
        level = reached * min((one.kept for one in every), default=1.0)
        levels.append((level, number, question))
        kept = min(kept, (level, number, every), key=lambda one: one[:2])
        if reached and question.shards == ("none",):  # a plan with this peak exists
            known = min(known, reached)
    bound = float("inf")
    for level, number, question in sorted(levels, key=lambda one: one[:2]):
        if best is not None and level >= best[1].value:
            bound = min(bound, level)
            break
        result = _exact(question, kept[2] if number == kept[1] else ())
        bound = min(bound, result.value if result.proven or result.bound is None else result.bound)
        if best is None or result.value < best[1].value:
            best = question, result
    if best is None:
        raise refusal or UsageError("no planning problem was given")
    question, result = best
    return question, result._replace(proven=bound >= result.value, bound=min(bound, result.value))


def _alone(question: Question) -> PlannerResult:
    """Return the best split with one device for each stage."""
    split, value, evaluated, kept = solve(question)
    value = int(value) if question.equal_budgets else value
    return PlannerResult(
        split,
        question.objective,
        value,
        evaluated,
        proven=kept == 1,
        bound=None if kept == 1 else value * kept,
    )
