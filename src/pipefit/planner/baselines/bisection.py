"""The bisection planner: guess a peak, fill the stages greedily up to it, and halve the interval of guesses.

Then the stage with the highest peak is fixed, and the blocks before and after it are split in the same way.
Stage s is on device s. A guess reads one column of peaks for each stage, so a thousand blocks take less than
a second. The result has the lowest peak if the peak of a stage never falls with one more block, and every
block fits wherever greedy filling puts it. Neither always holds: a cut may fall on a smaller tensor, and
under 1F1B a large block may fit only on a late stage. In these cases `exact` finds a lower peak. (CAPSlog,
PDP 2024.)
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipefit.planner.baselines.simple import equal_lengths
from pipefit.planner.closed_forms.bands import stage_peak
from pipefit.planner.driver import range_peak, stage_peaks
from pipefit.planner.exact import Bounds, Floats
from pipefit.planner.problem import PlannerResult, Question

_FINEST = 1e-12  # negligible share of a budget
_ROUNDING = 1 + 1e-9


def bisection(question: Question) -> PlannerResult:
    """Return the split with the lowest peak of greedy filling, improved around the fullest stage."""
    filling = _Filling(question)
    split = question.in_order(filling.best())
    value = question.value(stage_peaks(question, split), split.devices)
    return PlannerResult(split, question.objective, value, filling.looked_at, proven=False)


class _StageRun(NamedTuple):
    """Stages `first` to `first + len(edges) - 2`, cut at `edges`."""

    first: int
    edges: tuple[int, ...]


class _Filling:
    """Filler of stages up to a level, in bytes or, if budgets differ, as a share of the budget."""

    def __init__(self, question: Question) -> None:
        self.question = question
        budgets = question.cluster.budgets
        self.units = [1 if question.equal_budgets else budget for budget in budgets[: question.stages]]
        self.finest = 1.0 if question.equal_budgets else _FINEST
        self.columns: dict[tuple[int, int], Floats] = {}
        self.start = equal_lengths(question.blocks, question.stages)
        ends = enumerate(pairwise(self.start))
        level = max(range_peak(question, stage, *end) / self.units[stage] for stage, end in ends)
        windows = Bounds(question).windows(level * max(self.units) * _ROUNDING)
        assert windows is not None, "a level that equal lengths achieve excludes every split"
        self.width = max(
            window.widest for window in windows
        )  # a wider stage would exceed the peak of equal lengths
        self.band = question.ranges.band(self.width)

    @property
    def looked_at(self) -> int:
        """Number of candidate stages whose peak was computed."""
        return sum(map(len, self.columns.values()))

    def best(self) -> tuple[int, ...]:
        """Return the edges of the resulting split, computed one part after the other."""
        edges = list(self.start)
        waiting = [_StageRun(0, self.start)]
        while waiting:
            part = waiting.pop()
            result = self._lowest(part)
            edges[part.first : part.first + len(result.edges)] = result.edges
            costs = self._costs(result)
            fullest = costs.index(max(costs))
            before = _StageRun(result.first, result.edges[: fullest + 1])
            behind = _StageRun(result.first + fullest + 1, result.edges[fullest + 1 :])
            waiting += [side for side in (before, behind) if len(side.edges) > 2]
        return tuple(edges)

    def _lowest(self, part: _StageRun) -> _StageRun:
        """Return the same blocks on the same stages with the lowest peak that filling finds."""
        low, high = 0.0, max(self._costs(part))
        while high - low > self.finest:
            middle = (low + high) / 2
            if middle in {low, high}:
                break
            result = self._filled(part, middle)
            if result is None:
                low = middle
            else:
                part, high = result, max(self._costs(result))
        return part

    def _filled(self, part: _StageRun, level: float) -> _StageRun | None:
        """Return stages filled to the level from the first on, with at least one block each.

        None if blocks remain.
        """
        end, stages = part.edges[-1], len(part.edges) - 1
        edges = [part.edges[0]]
        for number in range(stages):
            longest = end - (stages - 1 - number) - edges[-1]
            column = self._column(part.first + number, edges[-1])[:longest]
            if number == stages - 1:
                column = np.append(np.full(longest - 1, np.inf), column[longest - 1 :])
            allowed = np.flatnonzero(column <= level)
            if not len(allowed):
                return None
            edges.append(edges[-1] + int(allowed[-1]) + 1)
        return _StageRun(part.first, tuple(edges))

    def _column(self, stage: int, start: int) -> Floats:
        """Return the costs of stage number `stage` from block `start` on, with 1, 2, ... blocks."""
        if (stage, start) not in self.columns:
            rows = min(self.width, self.question.blocks - start)
            window = (slice(0, rows), slice(start, start + 1))
            peaks = stage_peak(self.band, self.question.surroundings(stage), window)
            self.columns[stage, start] = peaks[:, 0] / self.units[stage]
        return self.columns[stage, start]

    def _costs(self, part: _StageRun) -> list[float]:
        ends = enumerate(pairwise(part.edges), part.first)
        return [float(self._column(stage, start)[stop - start - 1]) for stage, (start, stop) in ends]
