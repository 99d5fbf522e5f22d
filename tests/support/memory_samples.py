"""Memory samples of traces as plain lists, for comparison."""

from __future__ import annotations

from pipefit.schema.trace import Trace


def samples(trace: Trace) -> list[list[tuple[int, str, tuple[int, ...]]]]:
    """Return step, action and bytes of every sample of every device."""
    return [[(s.step, s.action, s.bytes) for s in device.memory] for device in trace.devices]


def step_peaks_of(trace: Trace) -> list[list[int]]:
    """Return the peak of every device in every step."""
    return [[device.step_peak_bytes(step) for step in range(trace.steps)] for device in trace.devices]
