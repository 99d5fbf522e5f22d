"""Which blocks a stage can start at, and how many it can hold, if no stage may need more than a given level of bytes.

These are lower bounds, found in microseconds. When a range of blocks grows, its parameters, gradients and optimizer
state only grow, and so do the activations that are made and saved inside it (`Ranges.floor`). A stage that holds n
microbatches at once needs for blocks i to j - 1 at least

    owned(j) - owned(i) + n * (saved(j) - born(i))

bytes; and if it holds m microbatches while its gradients exist, the same with m instead of n and gradients added to
what is owned. Both are a rising reach(j) minus a rising base(i), so that the last possible stop and the first possible
start are found by binary search.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.actions import Kind
from pipefit.planner.question import Question

Floats = NDArray[np.float64]


class Window(NamedTuple):
    """The blocks at which a stage can start, `first` to `last`, and its possible widths, `narrowest` to `widest`."""

    first: int
    last: int
    narrowest: int
    widest: int


class _Line(NamedTuple):
    """One lower bound: blocks i to j - 1 need at least reach[j] - base[i] bytes."""

    reach: Floats
    base: Floats


class Bounds:
    """The lower bounds of all stages of a question."""

    def __init__(self, question: Question) -> None:
        self.stages, self.blocks = question.stages, question.blocks
        sums = (*question.ranges.owned(), *question.ranges.floor())
        owned, gradients, saved, born = (part.astype(float) for part in sums)
        self.lines: list[list[_Line]] = []
        for stage in range(self.stages):
            whole = question.options.recompute != "always"  # else one block of a microbatch has been recomputed
            held = [
                (s.in_flight + (s.kind is Kind.BACKWARD and (whole or not s.recomputed)), s.gradients)
                for s in question.surroundings(stage)
            ]
            n = max(number for number, _ in held)
            m = max((number for number, exist in held if exist), default=0)
            full = owned + gradients
            self.lines.append([_Line(owned + n * saved, owned + n * born), _Line(full + m * saved, full + m * born)])

    def windows(self, level: float) -> list[Window] | None:
        """The window of every stage if none may need more than `level` bytes; None if there is no such split."""
        last = self._latest_starts(level)
        first = self._earliest_starts(level)
        if last[-1] < self.blocks or any(a > b for a, b in zip(first, last, strict=True)):
            return None
        return [self._window(stage, first, last, level) for stage in range(self.stages)]

    def greedy(self, level: float) -> tuple[int, ...] | None:
        """A split whose stages nearly keep to `level` by their bounds, early ones filled first; None if none do."""
        last = self._latest_starts(level)
        if last[-1] < self.blocks or any(start < stage for stage, start in enumerate(last)):
            return None
        edges = [self.blocks]
        for stage in reversed(range(self.stages)):
            edges.append(min(last[stage], edges[-1] - 1))
        return tuple(reversed(edges))

    def lowest_split(self) -> tuple[int, ...]:
        """A split whose highest lower bound is about as low as possible, by bisection on the level."""
        high = float(max(line.reach[-1] for lines in self.lines for line in lines)) + 1.0
        low, best = 0.0, self.greedy(high)
        assert best is not None
        while high - low > 1e-3 * high:
            middle = (low + high) / 2
            found = self.greedy(middle)
            low, high, best = (middle, high, best) if found is None else (low, middle, found)
        return best

    def _latest_starts(self, level: float) -> list[int]:
        """For every stage, the last block at which it can start; then the number of blocks that all stages can hold.

        A later stage may have to start earlier than the one before: a block that is too large for one stage may fit a
        later one, which holds fewer microbatches.
        """
        starts = [0]
        for stage in range(self.stages):
            stop = int(self._stops(stage, np.array(starts[-1:]), level)[0])
            starts.append(min(stop, self.blocks - (self.stages - 1 - stage)))
        return starts

    def _stops(self, stage: int, starts: NDArray[np.intp], level: float) -> NDArray[np.intp]:
        """The last possible stop for each start."""
        lines = self.lines[stage]
        stops = [np.searchsorted(line.reach, level + line.base[starts], side="right") for line in lines]
        furthest: NDArray[np.intp] = np.minimum.reduce(stops) - 1
        return furthest

    def _earliest_starts(self, level: float) -> list[int]:
        """For every stage, the first block at which it can start such that it and the later ones hold the rest."""
        starts = [self.blocks]
        for stage in reversed(range(self.stages)):
            lines = self.lines[stage]
            found = [int(np.searchsorted(line.base, line.reach[starts[-1]] - level, side="left")) for line in lines]
            starts.append(max(stage, *found))
        return starts[::-1]

    def _window(self, stage: int, first: list[int], last: list[int], level: float) -> Window:
        starts = np.arange(first[stage], last[stage] + 1)
        widest = min(int((self._stops(stage, starts, level) - starts).max()), last[stage + 1] - first[stage])
        return Window(first[stage], last[stage], max(1, first[stage + 1] - last[stage]), max(1, widest))
