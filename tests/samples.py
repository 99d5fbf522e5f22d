"""What traces say of memory, as plain lists, so that two can be compared."""

from __future__ import annotations

from pipefit.schema.trace import Trace


def samples(trace: Trace) -> list[list[tuple[int, str, tuple[int, ...]]]]:
    """Step, action and bytes of every sample of every device."""
    return [[(s.step, s.action, s.bytes) for s in device.memory] for device in trace.devices]


def step_peaks_of(trace: Trace) -> list[list[int]]:
    """The peak of every device in every step."""
    return [[device.step_peak_bytes(step) for step in range(trace.steps)] for device in trace.devices]
