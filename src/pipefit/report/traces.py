"""Traces as text: step times, peaks of devices, and the comparison of predicted and measured figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipefit.errors import UsageError
from pipefit.memory import most_receive_buffers, receive_buffers
from pipefit.schema.json_io import CompareAnswer
from pipefit.schema.plan import TIGHT, Plan, fullness
from pipefit.schema.trace import CATEGORIES, AllocatorPeaks, DeviceTrace, Trace
from pipefit.simulator import Simulation
from pipefit.tables import Block, Table
from pipefit.texts import counted
from pipefit.units import format_bytes, format_seconds

# ---- Comparison of predicted and measured figures: a subtraction of two traces


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceComparison:
    """One device's peaks, in bytes."""

    device: int
    predicted_bytes: int
    measured_bytes: int

    @property
    def difference_bytes(self) -> int:
        """Measured minus predicted bytes: positive if the prediction was too low."""
        return self.measured_bytes - self.predicted_bytes

    @property
    def difference(self) -> float | None:
        """The difference as a share of the measured bytes; None if nothing was measured."""
        return self.difference_bytes / self.measured_bytes if self.measured_bytes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two traces of the same devices.

    Seconds are those of the last step, None for a dry run, which is without times.

    `predicted_estimated` and `measured_estimated` mark seconds that derive from estimated layer seconds.
    """

    predicted_source: str
    measured_source: str
    devices: tuple[DeviceComparison, ...]
    predicted_seconds: float | None
    measured_seconds: float | None
    predicted_estimated: bool
    measured_estimated: bool

    def __repr__(self) -> str:
        """Return one line: the two sources, and the largest difference of peaks."""
        apart = max((abs(row.difference_bytes) for row in self.devices), default=0)
        sources, devices = (
            f"{self.predicted_source} beside {self.measured_source}",
            counted(len(self.devices), "device"),
        )
        return f"<Comparison: {sources}, {devices}, peaks at most {format_bytes(apart)} apart>"

    def as_json(self) -> CompareAnswer:
        """Return plain data, the shape of `pipefit compare --json`."""
        return {
            "predicted": {
                "source": self.predicted_source,
                "step_seconds": self.predicted_seconds,
                "estimated": self.predicted_estimated,
            },
            "measured": {
                "source": self.measured_source,
                "step_seconds": self.measured_seconds,
                "estimated": self.measured_estimated,
            },
            "devices": [
                {
                    "device": row.device,
                    "predicted_bytes": row.predicted_bytes,
                    "measured_bytes": row.measured_bytes,
                    "difference_bytes": row.difference_bytes,
                    "difference": row.difference,
                }
                for row in self.devices
            ],
        }


def compare(predicted: Trace, measured: Trace) -> Comparison:
    """Compare peaks and step seconds of two traces, device by device.

    Raises:
        UsageError: they are traces of different devices.
    """
    ours, theirs = (
        {device.device: device.peak_bytes for device in trace.devices} for trace in (predicted, measured)
    )
    if ours.keys() != theirs.keys():
        raise UsageError(
            f"the traces are of different devices, {_list(ours)} and {_list(theirs)}: compare two traces of "
            "one plan"
        )
    rows = (
        DeviceComparison(device=d, predicted_bytes=ours[d], measured_bytes=theirs[d]) for d in sorted(ours)
    )
    return Comparison(
        predicted_source=predicted.source,
        measured_source=measured.source,
        devices=tuple(rows),
        predicted_seconds=predicted.last_seconds,
        measured_seconds=measured.last_seconds,
        predicted_estimated=predicted.estimated,
        measured_estimated=measured.estimated,
    )


def describe_comparison(comparison: Comparison) -> list[Block]:
    """Return a row for each device, and a sentence about time."""
    rows = tuple(
        (
            str(row.device),
            format_bytes(row.predicted_bytes),
            format_bytes(row.measured_bytes),
            f"{row.difference_bytes:+d}",
            "-" if row.difference is None else f"{100 * row.difference:+z.2f} %",
        )
        for row in comparison.devices
    )
    columns = (
        "device",
        f"peak, {comparison.predicted_source}",
        f"peak, {comparison.measured_source}",
        "bytes apart",
        "%",
    )
    return [Table(columns, rows), _time(comparison)]


def _time(comparison: Comparison) -> str:
    ours, theirs = comparison.predicted_seconds, comparison.measured_seconds
    if ours is None or theirs is None:
        return "step time: not compared, because a dry run does not measure time"
    apart = f" ({100 * (theirs / ours - 1):+z.1f} %)" if ours else ""
    return (
        f"step time: {format_seconds(ours)} "
        f"{comparison.predicted_source}{_how(comparison.predicted_estimated)}, "
        f"{format_seconds(theirs)} {comparison.measured_source}{_how(comparison.measured_estimated)}{apart}"
    )


def _how(estimated: bool) -> str:
    return " by estimates" if estimated else ""


def _list(devices: dict[int, int]) -> str:
    """Format the device numbers: all of them, or their count and the first ones."""
    numbers = sorted(devices)
    some = ", ".join(map(str, numbers[:8])) or "none"
    return some if len(numbers) <= 8 else f"{len(numbers)} of them ({some}, ...)"


# ---- Traces


def describe_trace(trace: Trace) -> list[Block]:
    """Describe a trace: source, steps and times; a row for each device; and its contents at the peak."""
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
    """Return the bytes by category at each device's peak, without categories that are empty on all
    devices.
    """
    peaks = [device.peak.by_category if device.peak else {} for device in trace.devices]
    used = [category for category in CATEGORIES if any(category in peak for peak in peaks)]
    rows = tuple(
        (str(device.device), *(format_bytes(peak.get(category, 0)) for category in used))
        for device, peak in zip(trace.devices, peaks, strict=True)
    )
    return Table(("device", *(category.value for category in used)), rows, title="at the peak")


def _allocators(trace: Trace) -> list[Block]:
    """Return the peaks of GPU allocators, and the other memory of processes, which training does not
    measure.
    """
    known = [(device, device.allocator) for device in trace.devices if device.allocator]
    if not known:
        return []
    of_tensors = ("device", "requested", "allocated", "reserved")
    of_a_process = ("of that cuBLAS", "context", "communicators", "process", "full")
    measured = trace.source == "measured"
    rows = tuple(
        (
            str(device.device),
            *(
                format_bytes(size)
                for size in (peaks.requested_bytes, peaks.allocated_bytes, peaks.reserved_bytes)
            ),
            *(() if measured else _process(peaks, device.budget_bytes)),
            str(peaks.retries) if peaks.fits else "out of memory",
        )
        for device, peaks in known
    )
    columns = (*of_tensors, *(() if measured else of_a_process), "cache emptied")
    settings = known[0][1].settings or "default"
    table = Table(
        columns, rows, title=f"most memory that a GPU holds (caching allocator: {settings} settings)"
    )
    return [table, *_planned([(device.device, peaks) for device, peaks in known]), *_shortage(trace)]


def _planned(known: Sequence[tuple[int, AllocatorPeaks]]) -> Iterator[str]:
    """Yield what planned addresses would save on the device that reserves the most."""
    device, peaks = max(known, key=lambda one: one[1].reserved_bytes)
    if 0 < peaks.planned_bytes < peaks.reserved_bytes:
        yield (
            f"With addresses planned before the run, {format_bytes(peaks.planned_bytes)} would do on device "
            f"{device}, where the allocator reserves {format_bytes(peaks.reserved_bytes)}."
        )


def _process(peaks: AllocatorPeaks, memory: int) -> tuple[str, ...]:
    """Format a process's memory outside of its allocator's reserved bytes."""
    return (
        _times(peaks.workspaces, peaks.workspace_bytes),
        format_bytes(peaks.context_bytes),
        _times(peaks.communicators, peaks.communicator_bytes),
        format_bytes(peaks.process_bytes),
        _full(peaks.process_bytes, memory),
    )


def _full(process: int, memory: int) -> str:
    """Format how full a GPU is with its whole process."""
    return fullness(process / memory, tight=process >= TIGHT * memory) if memory else "-"


def _shortage(trace: Trace) -> Iterator[str]:
    """Yield the device that lacks the most memory for its process, by how much, and a remedy."""
    worst = max(trace.devices, key=lambda device: device.lack_bytes)
    if worst.lack_bytes and worst.allocator:
        yield f"Out of memory: {worst.shortage}. To fit, {worst.remedy}."


def _times(count: int, nbytes: int) -> str:
    return f"{count} x {format_bytes(nbytes)}" if count and nbytes else "-"


def describe_engine(plan: Plan, trace: Trace) -> Iterator[Block]:
    """Yield a table with a row for each device, and the sentence about receive buffers.

    `trace` is that of the plan's simulation on torch's engine. The other tensors are the batch, outputs until
    their backward, sent tensors until the engine drops them, and losses, as far as they raise the peak.
    """
    own, buffers = Simulation(plan).peak_bytes, receive_buffers(plan)
    rows = []
    for device in plan.workers:
        peak = trace.devices[device].peak_bytes
        more = peak - own[device]
        others = max(0, more - buffers[device])
        rows.append((str(device), *map(format_bytes, (own[device], peak, buffers[device], others))))
    yield "on torch's engine"
    yield Table(
        ("device", "pipefit's peak", "peak here", "receive buffers", "others at the peak"), tuple(rows)
    )
    if sentence := most_receive_buffers(plan):
        yield sentence
