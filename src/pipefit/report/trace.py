"""A trace as text: how long a step took, and how full each device was when it was fullest."""

from __future__ import annotations

from pipefit.tables import Block, Table
from pipefit.trace import CATEGORIES, DeviceTrace, Trace
from pipefit.units import format_bytes, format_seconds


def describe_trace(trace: Trace) -> list[Block]:
    """Source, steps and times; a row for each device; and what held the bytes at the peaks."""
    busy = trace.utilisation() if trace.step_seconds else (0.0,) * len(trace.devices)
    rows = tuple(_device_row(trace, device, share) for device, share in zip(trace.devices, busy, strict=True))
    peaks = Table(("device", "peak", "budget", "full", "step", "at action", "computing"), rows)
    return [_head(trace), peaks, _categories(trace)]


def _head(trace: Trace) -> str:
    steps = f"{trace.steps} step{'s' if trace.steps != 1 else ''}"
    if not trace.has_clock or not trace.step_seconds:
        return f"{trace.source}: {steps}, without times"
    estimated = ", by estimated seconds of layers" if trace.estimated else ""
    return f"{trace.source}: {steps}, the last one {format_seconds(trace.step_seconds[-1])}{estimated}"


def _device_row(trace: Trace, device: DeviceTrace, share: float) -> tuple[str, ...]:
    peak = device.peak
    return (
        str(device.device),
        format_bytes(device.peak_bytes),
        format_bytes(device.budget_bytes),
        f"{100 * device.peak_bytes / device.budget_bytes:.1f} %" if device.budget_bytes else "-",
        str(peak.step) if peak else "-",
        peak.action if peak else "-",
        f"{100 * share:.0f} %" if trace.has_clock else "-",
    )


def _categories(trace: Trace) -> Table:
    """Bytes by category at each device's peak, without the categories that are empty on all devices."""
    peaks = [device.peak.by_category if device.peak else {} for device in trace.devices]
    used = [category for category in CATEGORIES if any(category in peak for peak in peaks)]
    rows = tuple(
        (str(device.device), *(format_bytes(peak.get(category, 0)) for category in used))
        for device, peak in zip(trace.devices, peaks, strict=True)
    )
    return Table(("device", *(category.value for category in used)), rows, title="at the peak")
