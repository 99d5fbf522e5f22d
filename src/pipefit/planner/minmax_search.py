"""The exact search: the split, and the order of devices, with the lexicographically lowest list of costs.

The list has the cost of every stage, highest first. So the highest cost is as low as possible; of the splits with that
highest cost, the second highest is as low as possible; and so on. A stage's cost is its peak, in bytes or as a share of
its device's budget.

A stage's cost depends on its blocks, its position and its device, but not on the other stages. If one placement of the
first blocks has a lower list than another, it still has after both get the same further stage, because adding one cost
to two lists does not change which is lower. So dynamic programming is exact, with the states

    (number of devices of each class that are used, number of blocks that are placed)

A peak may fall when a block is added, because the cut then falls on a smaller tensor. So every width within the bounds
of `planner.windows` is tried. There are two passes:

    1. from the last stage to the first: the lowest possible highest cost (the level), as one number for each state
    2. from the first stage to the last: whole lists of costs, but only for states that can stay within the level

Between splits with equal lists, the stages are compared from the last to the first: the one with the smaller first
block wins, then the one with the earlier class of device.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from pipefit.planner.closed_forms.bands import Band, stage_peak
from pipefit.planner.few_classes import Sizes, few_classes
from pipefit.planner.question import Question, Split
from pipefit.planner.windows import Bounds, Floats, Window

Used = tuple[int, ...]  # number of devices of each class that hold a stage
Indices = NDArray[np.intp]

_FEW, _MANY = 4_000, 20_000  # numbers of devices of each class that are listed: with little loss, and in any case
_ROUNDING = 1 + 1e-9  # for bounds in bytes that are compared with shares of a budget


class Solution(NamedTuple):
    """The best split, its highest cost, how many candidate stages were evaluated, and the part of budgets that was kept
    (`FewClasses`): if it is 1, no split has a lower highest cost.
    """

    split: Split
    value: float
    evaluated: int
    kept: float


def solve(question: Question) -> Solution:
    """The best split of the question."""
    search = _Search(question)
    return search.best()


def _places(sizes: Sizes) -> int:
    """How many numbers of devices of each class there are."""
    return prod(size + 1 for size in sizes)


def is_possible(question: Question, level: float) -> bool:
    """Whether bounds allow for a split whose highest cost is no more than this."""
    units = [1 if question.equal_budgets else one.memory_bytes for one in question.classes]
    return Bounds(question).windows(level * max(units) * _ROUNDING) is not None


class _Nodes(NamedTuple):
    """The states after some stages: for each pair of `used` and `stop`, the costs of the best placement."""

    used: list[Used]
    place: Indices  # which of `used`
    stop: Indices
    costs: Floats  # shape (stages, nodes); of every node the highest first


class _Candidates(NamedTuple):
    """Candidate stages as parallel arrays: source node, first block, class of device, target node and cost."""

    source: Indices
    start: Indices
    kind: Indices
    target: Indices  # number of the pair (used, stop)
    cost: Floats

    def take(self, which: Indices | NDArray[np.bool_]) -> _Candidates:
        return _Candidates._make(part[which] for part in self)


class _Search:
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
        """The best split, by the two passes."""
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
        """The highest cost of a split that is good by its lower bounds, with its stages on the largest devices."""
        edges = self.bounds.lowest_split()
        units = sorted((u for u, n in zip(self.units, self.sizes, strict=True) for _ in range(n)), reverse=True)
        self.band = self.question.ranges.band(max(stop - start for start, stop in pairwise(edges)))
        ends = enumerate(pairwise(edges))
        return max(self._peak(s, *stage) / units[s] for s, stage in ends)

    def _peak(self, stage: int, start: int, stop: int) -> float:
        """The peak of blocks `start` to `stop - 1` as this stage."""
        within = slice(stop - start - 1, stop - start), slice(start, start + 1)
        return float(stage_peak(self.band, self.question.surroundings(stage), within).item())

    # ---------------------------------------------------------------- costs

    def _costs(self, stage: int) -> Floats:
        """Peaks of every range in the stage's window: row r is the ranges of `narrowest + r` blocks."""
        first, last, narrowest, widest = self.windows[stage]
        window = (slice(narrowest - 1, widest), slice(first, last + 1))
        peaks = stage_peak(self.band, self.question.surroundings(stage), window)
        self.evaluated += peaks.size
        return peaks.astype(float)

    def _places(self, stage: int) -> list[Used]:
        """Every way to choose `stage` devices, as numbers of each class, in rising order."""
        ways = product(*(range(size + 1) for size in self.sizes))
        return [used for used in ways if sum(used) == stage]

    def _next(self, used: Used) -> Iterator[tuple[int, Used]]:
        """The classes of which a device is left, each with `used` after taking one."""
        for kind, size in enumerate(self.sizes):
            if used[kind] < size:
                yield kind, (*used[:kind], used[kind] + 1, *used[kind + 1 :])

    # ---------------------------------------------------------------- pass 1: the level

    def _rest(self) -> dict[Used, Floats]:
        """For the devices used and the first block not placed: the lowest possible level of the stages to come."""
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

    # ---------------------------------------------------------------- pass 2: lists of costs

    def _forward(self, rest: dict[Used, Floats], level: float) -> Split:
        """The best split within the level, from the first stage to the last."""
        zero = np.zeros(1, np.intp)
        nodes = _Nodes([self._nothing], zero, zero, np.zeros((0, 1)))
        trail = []
        for stage in range(self.stages):
            chosen, nodes = self._step(stage, nodes, rest, level)
            trail.append(chosen)
        ends = [(*nodes.costs[:, node].tolist(), _path(trail, node)) for node in range(len(nodes.stop))]
        return self._split(min(ends)[-1])

    def _step(self, stage: int, nodes: _Nodes, rest: dict[Used, Floats], level: float) -> tuple[_Candidates, _Nodes]:
        """The best candidate stage for every node after this stage, and those nodes."""
        places = self._places(stage + 1)
        found = list(self._within(stage, nodes, rest, level, places))
        candidates = _Candidates._make(map(np.concatenate, zip(*found, strict=True)))
        candidates = candidates.take(np.lexsort((candidates.kind, candidates.start, candidates.target)))
        chosen = _lowest(candidates, nodes.costs)
        place, stop = np.divmod(chosen.target, self.blocks + 1)
        return chosen, _Nodes(places, place, stop, _merged(nodes.costs, chosen))

    def _within(
        self, stage: int, nodes: _Nodes, rest: dict[Used, Floats], level: float, places: list[Used]
    ) -> Iterator[_Candidates]:
        """The candidate stages after which all stages can stay within the level."""
        costs, window = self._costs(stage), self.windows[stage]
        by_kind = [costs / unit for unit in self.units]
        for place, used in enumerate(nodes.used):
            members = np.flatnonzero(nodes.place == place)
            columns = nodes.stop[members] - window.first
            for kind, after in self._next(used):
                cost = by_kind[kind][:, columns]
                row, column = np.nonzero(np.maximum(cost, _following(rest[after], window)[:, columns]) <= level)
                start = nodes.stop[members[column]]
                target = places.index(after) * (self.blocks + 1) + start + row + window.narrowest
                yield _Candidates(members[column], start, np.full_like(start, kind), target, cost[row, column])

    def _split(self, path: tuple[tuple[int, int], ...]) -> Split:
        """The split of a path from the last stage to the first."""
        free = [iter(c.devices) for c in self.classes]
        starts = [start for start, _ in reversed(path)]
        return Split((*starts, self.blocks), tuple(next(free[kind]) for _, kind in reversed(path)))


def _path(trail: list[_Candidates], node: int) -> tuple[tuple[int, int], ...]:
    """First block and class of device of the stages that lead to a final node, from the last stage to the first."""
    path = []
    for chosen in reversed(trail):
        path.append((int(chosen.start[node]), int(chosen.kind[node])))
        node = int(chosen.source[node])
    return tuple(path)


def _following(level: Floats, window: Window) -> Floats:
    """The element of `level` for the block after every range of the window."""
    first, last, narrowest, widest = window
    return sliding_window_view(level[first + narrowest : last + widest + 1], last - first + 1)


def _lowest(candidates: _Candidates, costs: Floats) -> _Candidates:
    """For every target the candidate with the lowest list of costs, the first one of equals.

    Candidates must be sorted by target. With a cost c, a list a0 >= a1 >= ... becomes the list
    max(a0, c), max(a1, min(a0, c)), max(a2, min(a1, c)), ...
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
    """Where each run of equal numbers begins."""
    return np.flatnonzero(np.concatenate(([True], target[1:] != target[:-1])))


def _merged(costs: Floats, chosen: _Candidates) -> Floats:
    """The lists of costs of the chosen candidates, highest first."""
    lists = costs[:, chosen.source]
    lists = np.vstack([lists, np.zeros((1, lists.shape[1]))])
    above = np.vstack([np.full((1, lists.shape[1]), np.inf), lists[:-1]])
    merged: Floats = np.maximum(lists, np.minimum(above, chosen.cost))
    return merged
