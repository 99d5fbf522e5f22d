"""The best split by any predictor of stage peaks: the exact one, mCAP's additive one, or your own.

    best_split(AdditiveCosts(mem_isolated=..., mem_added=...), blocks, devices)
    best_split(true_peaks(profile, training, stages=devices), blocks, devices)

The highest peak is as low as possible; among splits with that highest peak the second highest is, and so on.
This is the rule of mCAP-BF, which tries every split. Dynamic programming over (stages, blocks placed) finds
the same split: adding the same peak to two lists of peaks, highest first, does not change which list is
lower. It takes O(P L^2) predictions for L blocks on P devices: a few hundredths of a second for 42 blocks on
8. All devices count as equal. (mCAP, section 3.4.)
"""

from __future__ import annotations

from bisect import insort
from functools import cache
from typing import NamedTuple, Protocol

from pipefit.errors import UsageError
from pipefit.lowering import Recompute
from pipefit.planner.closed_forms.bands import Ints, stage_peak
from pipefit.planner.closed_forms.ranges import ranges_of
from pipefit.planner.closed_forms.surroundings import surroundings
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.texts import counted


class _Partial(NamedTuple):
    """Split of the first blocks.

    `peaks` are negated and rising; `starts` are the first blocks of the stages, from the last stage on.
    """

    peaks: tuple[int, ...]
    starts: tuple[int, ...]


class Predictor(Protocol):
    """Predictor of the bytes that a stage needs."""

    def __call__(self, stage: int, start: int, stop: int) -> int:
        """Return the peak bytes of blocks `start` to `stop - 1` as stage number `stage`."""


def best_split(predictor: Predictor, blocks: int, devices: int) -> tuple[int, ...]:
    """Return edges 0 = e0 < e1 < ... = `blocks`; stage s holds blocks e_s to e_(s+1) - 1.

    Of splits with equal peaks, the stages are compared from the last to the first: the smaller first block
    wins.

    Raises:
        UsageError: no device, or fewer blocks than devices.
    """
    if not 1 <= devices <= blocks:
        raise UsageError(
            f"{counted(blocks, 'block')} cannot be split over {counted(devices, 'device')}, because each "
            "device holds at least one block"
        )
    partials: dict[int, _Partial] = {0: _Partial((), ())}
    for stage in range(devices):
        last = blocks - (devices - 1 - stage)
        stops = range(stage + 1, last + 1) if stage < devices - 1 else (blocks,)
        partials = {stop: _lowest(predictor, stage, stop, partials) for stop in stops}
    return (*reversed(partials[blocks].starts), blocks)


def _lowest(predictor: Predictor, stage: int, stop: int, partials: dict[int, _Partial]) -> _Partial:
    """Return the best split of the blocks before `stop` into stages up to number `stage`."""
    result = (
        _extended(partial, predictor(stage, start, stop), start)
        for start, partial in partials.items()
        if start < stop
    )
    return min(result, key=lambda partial: ([-peak for peak in partial.peaks], partial.starts))


def _extended(partial: _Partial, peak: int, start: int) -> _Partial:
    """Return the partial split with one more stage, which starts at `start` and has this peak."""
    peaks = list(partial.peaks)
    insort(peaks, -peak)
    return _Partial(tuple(peaks), (start, *partial.starts))


def true_peaks(
    profile: ModelProfile, training: Training, *, stages: int, recompute: Recompute = "never"
) -> Predictor:
    """Return the exact predictor of peaks, in bytes, for pipelines of `stages` stages.

    Raises:
        UsageError: the schedule is unknown, or the microbatch size was not profiled.
    """
    ranges = ranges_of(profile.at(training.microbatch_size), profile.edges, training.microbatches, recompute)
    band = ranges.band(ranges.count)

    @cache
    def table(stage: int) -> Ints:
        schedule, count = training.schedule, training.microbatches
        met = surroundings(schedule, stage, stages, count, recompute, versions=training.versions)
        return stage_peak(band, met)

    return lambda stage, start, stop: int(table(stage)[stop - start - 1, start])
