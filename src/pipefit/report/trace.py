"""A trace as text: how long a step took, and how full each device was when it was fullest."""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.predictions import TIGHT, fullness
from pipefit.tables import Block, Table
from pipefit.texts import counted
from pipefit.trace import CATEGORIES, AllocatorPeaks, DeviceTrace, Trace
from pipefit.units import format_bytes, format_seconds


def describe_trace(trace: Trace) -> list[Block]:
    """Source, steps and times; a row for each device; and what held the bytes at the peaks."""
    busy = trace.utilisation() if trace.step_seconds else (0.0,) * len(trace.devices)
    rows = tuple(_device_row(trace, device, share) for device, share in zip(trace.devices, busy, strict=True))
    peaks = Table(("device", "peak", "budget", "full", "step", "at action", "computing"), rows)
    return [_head(trace), peaks, _categories(trace), *_allocators(trace)]


def _head(trace: Trace) -> str:
    steps = counted(trace.steps, "step")
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
        fullness(device.peak_bytes / device.budget_bytes, tight=False) if device.budget_bytes else "-",
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


def _allocators(trace: Trace) -> list[Block]:
    """What a GPU's allocator holds at most, and what the process takes besides, which was not measured in training."""
    known = [(device, device.allocator) for device in trace.devices if device.allocator]
    if not known:
        return []
    of_tensors = ("device", "requested", "allocated", "reserved")
    of_a_process = ("of that cuBLAS", "context", "communicators", "process", "full")
    measured = trace.source == "measured"
    rows = tuple(
        (
            str(device.device),
            *(format_bytes(size) for size in (peaks.requested_bytes, peaks.allocated_bytes, peaks.reserved_bytes)),
            *(() if measured else _process(peaks, device.budget_bytes)),
            str(peaks.retries) if peaks.fits else "out of memory",
        )
        for device, peaks in known
    )
    columns = (*of_tensors, *(() if measured else of_a_process), "cache emptied")
    settings = known[0][1].settings or "default"
    table = Table(columns, rows, title=f"what a GPU holds at most (caching allocator: {settings} settings)")
    return [table, *_shortage(trace)]


def _process(peaks: AllocatorPeaks, memory: int) -> tuple[str, ...]:
    """What a process takes besides what its allocator has reserved."""
    return (
        _times(peaks.workspaces, peaks.workspace_bytes),
        format_bytes(peaks.context_bytes),
        _times(peaks.communicators, peaks.communicator_bytes),
        format_bytes(peaks.process_bytes),
        _full(peaks.process_bytes, memory),
    )


def _full(process: int, memory: int) -> str:
    """How full a GPU is with its whole process."""
    return fullness(process / memory, tight=process >= TIGHT * memory) if memory else "-"


def _shortage(trace: Trace) -> Iterator[str]:
    """Which device has too little memory for its process, by how much, and what to plan with."""
    worst = max(trace.devices, key=lambda device: device.lack_bytes)
    if worst.lack_bytes and worst.allocator:
        yield f"Out of memory: {worst.shortage}. To fit, {worst.remedy}."


def _times(count: int, nbytes: int) -> str:
    return f"{count} x {format_bytes(nbytes)}" if count and nbytes else "-"
