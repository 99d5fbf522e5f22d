"""Seconds of a pass through layers: measured where the profile holds seconds, otherwise estimated by the roofline.

The roofline estimate is the longer of two times: computing at a part of the device's peak FLOP/s, and moving bytes at a
part of its memory bandwidth, since kernels reach neither figure (Williams et al., 2009). It is good enough to compare
layers and splits; for seconds, measure with `pipefit profile --device cpu|cuda`.
"""

from __future__ import annotations

from collections.abc import Iterable

from pipefit.devices import DeviceKind
from pipefit.profiles import LayerCost, Measurement, Work

FLOPS_REACHED = 0.6  # share of the peak FLOP/s that large matrix products reach
BANDWIDTH_REACHED = 0.8  # share of the peak bandwidth that elementwise kernels reach


def seconds(work: Work, kind: DeviceKind, dtype: str = "float32") -> float:
    """Seconds of `work` on a device of `kind`, which computes in `dtype`."""
    if work.seconds is not None:
        return work.seconds
    compute = work.flops / (kind.peak_flops(dtype) * FLOPS_REACHED)
    return max(compute, work.moved_bytes / (kind.memory_bandwidth * BANDWIDTH_REACHED))


def _costs_of(measurement: Measurement, start: int, stop: int) -> Iterable[LayerCost]:
    """The costs of layers `start` to `stop - 1`, and of the loss behind the model's last layer."""
    yield from (measurement.kinds[kind] for kind in measurement.layers[start:stop])
    if stop == len(measurement.layers):
        yield measurement.loss


def forward_seconds(measurement: Measurement, start: int, stop: int, kind: DeviceKind, dtype: str = "float32") -> float:
    """Seconds of a forward of one microbatch through layers `start` to `stop - 1`."""
    return sum(seconds(cost.forward, kind, dtype) for cost in _costs_of(measurement, start, stop))


def backward_seconds(
    measurement: Measurement, start: int, stop: int, kind: DeviceKind, dtype: str = "float32"
) -> float:
    """Seconds of a backward of one microbatch through layers `start` to `stop - 1`."""
    return sum(seconds(cost.backward, kind, dtype) for cost in _costs_of(measurement, start, stop))


def update_seconds(measurement: Measurement, start: int, stop: int, kind: DeviceKind, dtype: str = "float32") -> float:
    """Seconds of an optimizer step over layers `start` to `stop - 1`."""
    return sum(seconds(cost.update, kind, dtype) for cost in _costs_of(measurement, start, stop))


def copy_seconds(nbytes: int, kind: DeviceKind) -> float:
    """Seconds of a copy of `nbytes` within a device of `kind`, which reads and writes them."""
    return seconds(Work(flops=0, moved_bytes=2 * nbytes), kind)
