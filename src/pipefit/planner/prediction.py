"""The best split by any predictor of stage peaks: ours, mCAP's additive one, or one's own.

    best_split(AdditiveCosts(mem_isolated=..., mem_added=...), layers, devices)
    best_split(true_peaks(profile, training, stages=devices), layers, devices)

Best means: the fullest device is as empty as can be; left out, so is the fullest of the rest, and so on. That is the
rule of mCAP-BF, which tries every split; dynamic programming over (stages, layers placed) finds the same one, because
adding the same peak to two lists in descending order leaves their order as it is. O(P L^2) predictions for L layers
on P devices, lists of P numbers: 42 layers on 8 devices take a few hundredths of a second. Devices are alike.
(mCAP, section 3.4.)
"""

from __future__ import annotations

from bisect import insort
from functools import cache
from typing import Protocol

from pipefit.errors import UsageError
from pipefit.planner.closed_forms.bands import Ints, stage_peak
from pipefit.planner.closed_forms.ranges import Ranges
from pipefit.planner.closed_forms.surroundings import surroundings
from pipefit.profiles import ModelProfile
from pipefit.schedule.whole_stages import Recompute
from pipefit.training import Training

_Way = tuple[tuple[int, ...], tuple[int, ...]]  # minus the peaks, in rising order; starts from the last stage


class Predictor(Protocol):
    """Says how many bytes a stage will need."""

    def __call__(self, stage: int, start: int, stop: int) -> int:
        """Peak bytes of layers `start` to `stop - 1` as stage number `stage`."""


def best_split(predictor: Predictor, layers: int, devices: int) -> tuple[int, ...]:
    """Edges 0 = e0 < e1 < ... = `layers`; stage s holds layers e_s to e_(s+1) - 1. Among equals, stages are compared
    from the last to the first: the smaller first layer wins.

    Raises:
        UsageError: no device, or fewer layers than devices.
    """
    if not 1 <= devices <= layers:
        raise UsageError(f"{layers} layers cannot be split over {devices} devices: each holds at least one")
    ways: dict[int, _Way] = {0: ((), ())}
    for stage in range(devices):
        last = layers - (devices - 1 - stage)
        stops = range(stage + 1, last + 1) if stage < devices - 1 else (layers,)
        ways = {stop: _lowest(predictor, stage, stop, ways) for stop in stops}
    return (*reversed(ways[layers][1]), layers)


def _lowest(predictor: Predictor, stage: int, stop: int, ways: dict[int, _Way]) -> _Way:
    """The best way to end stage number `stage` before layer `stop`."""
    found = (_extended(way, predictor(stage, start, stop), start) for start, way in ways.items() if start < stop)
    return min(found, key=lambda way: ([-peak for peak in way[0]], way[1]))


def _extended(way: _Way, peak: int, start: int) -> _Way:
    peaks = list(way[0])
    insort(peaks, -peak)
    return tuple(peaks), (start, *way[1])


def true_peaks(profile: ModelProfile, training: Training, *, stages: int, recompute: Recompute = "never") -> Predictor:
    """Our predictor for pipelines of so many stages: the peak at the stage's place in the schedule, to the byte.

    Raises:
        UsageError: no such schedule, or a microbatch size that was not profiled.
    """
    ranges = Ranges(profile.at(training.microbatch_size), microbatches=training.microbatches)
    band = ranges.band(ranges.count)

    @cache
    def table(stage: int) -> Ints:
        return stage_peak(band, surroundings(training.schedule, stage, stages, training.microbatches, recompute))

    return lambda stage, start, stop: int(table(stage)[stop - start - 1, start])
