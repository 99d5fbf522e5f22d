"""The peaks of one split, to the byte, and whether they fit."""

from __future__ import annotations

from itertools import pairwise

from pipefit.planner.closed_forms.bands import stage_peak
from pipefit.planner.question import Question, Split


def stage_peaks(question: Question, split: Split) -> tuple[int, ...]:
    """The peak of every stage."""
    return tuple(range_peak(question, stage, *edges) for stage, edges in enumerate(pairwise(split.edges)))


def range_peak(question: Question, stage: int, start: int, stop: int) -> int:
    """The peak of blocks `start` to `stop - 1` as stage number `stage`."""
    band = question.ranges.band(stop - start, first=start, last=start)
    return int(stage_peak(band, question.surroundings(stage))[-1, 0])


def fits(question: Question, split: Split, peaks: tuple[int, ...]) -> bool:
    """Whether every stage fits its device."""
    budgets = question.cluster.budgets
    return all(peak <= budgets[device] for peak, device in zip(peaks, split.devices, strict=True))
