"""Seconds of a pass through layers: measured where the profile holds seconds, otherwise estimated by the roofline.

An operation is estimated as the longer of two times, computing at a part of the device's peak FLOP/s and moving bytes
at a part of its memory bandwidth, since kernels reach neither figure (Williams et al., 2009), and a constant: what its
launch takes and what it loses until all of the device is busy. So small operations reach less than large ones. The
parts and the constant are the kind's (`pipefit.devices.DeviceKind`) and may be set. Which part large products reach
depends on more than the kind: narrow ones, as in attention, are bound by their bytes here. `benchmarks/bench_time.py`
compares with published training throughput; for seconds, measure with `pipefit profile --device cpu|cuda`.
"""

from __future__ import annotations

from typing import NamedTuple

from pipefit.cost.collectives import Group
from pipefit.devices import DeviceKind, Host
from pipefit.errors import UsageError
from pipefit.layer_costs import LayerCost
from pipefit.profiles import Measurement
from pipefit.work import Alike, Work

HOST_BANDWIDTH_REACHED = 0.8  # of a host's memory, by an optimizer with all cores


class Seconds(NamedTuple):
    """Seconds of a layer's passes: forward and backward of a microbatch, and the update of a step."""

    forward: float
    backward: float
    update: float


def seconds(work: Work, kind: DeviceKind, dtype: str = "float32") -> float:
    """Seconds of `work` on a device of `kind`; products whose dtype is not known are in `dtype`."""
    if work.seconds is not None:
        return work.seconds
    bandwidth = kind.memory_bandwidth * kind.bandwidth_reached
    rates = {own: kind.peak_flops(own or dtype) * kind.part_of_flops(own or dtype) for own in _dtypes(work)}
    return sum(
        number * (kind.operation_seconds + max(flops / rates[own], moved / bandwidth))
        for number, flops, moved, own in _operations(work)
    )


def _dtypes(work: Work) -> set[str]:
    return {alike.dtype for alike in _operations(work)}


def _operations(work: Work) -> tuple[Alike, ...]:
    """The operations of the work; one, where it is known as a whole only."""
    whole = (Alike(1, work.flops, work.moved_bytes),) if work.flops or work.moved_bytes else ()
    return work.operations or whole


def layer_seconds(
    measurement: Measurement, kind: DeviceKind, dtype: str = "float32", group: Group | None = None
) -> tuple[Seconds, ...]:
    """Seconds of every layer, and of the loss behind the last one.

    Those of a tensor-parallel rank are with its collectives, which it does with its `group`.
    """
    alike = [_seconds(cost, kind, dtype, group) for cost in measurement.kinds]
    return (*(alike[number] for number in measurement.layers), _seconds(measurement.loss, kind, dtype, group))


def _seconds(cost: LayerCost, kind: DeviceKind, dtype: str, group: Group | None) -> Seconds:
    works = cost.forward, cost.backward, cost.update
    together = (0.0 if group is None else group.seconds(work.collectives) for work in works)
    return Seconds(*(seconds(work, kind, dtype) + more for work, more in zip(works, together, strict=True)))


def copy_seconds(nbytes: int, kind: DeviceKind) -> float:
    """Seconds of a copy of `nbytes` within a device of `kind`, which reads and writes them."""
    return seconds(Work(flops=0, moved_bytes=2 * nbytes), kind)


def host_update_seconds(cost: LayerCost, host: Host) -> float:
    """Seconds of a layer's update on the CPU of `host`, in one pass that takes as long as its bytes move.

    It reads parameters, gradients and state, and writes all but the gradients: 28 bytes a parameter by AdamW in
    float32.

    Raises:
        UsageError: the host's memory bandwidth is not known.
    """
    if host.memory_bandwidth is None:
        raise UsageError("an update on a host takes as long as its memory needs: give the host a memory_bandwidth")
    moved = 2 * (cost.trained_bytes + cost.state_bytes) + cost.gradient_bytes
    return moved / (host.memory_bandwidth * HOST_BANDWIDTH_REACHED)
