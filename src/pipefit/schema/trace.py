"""Traces: timed actions by stream, and memory over time by category, for every device.

The simulator, the dry run and the runtime all return a `Trace`, so predictions and measurements can be
compared. The dry run is without a clock: its times are positions in the program (`Trace.has_clock`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import chain
from typing import Literal

from pipefit.errors import UsageError
from pipefit.texts import counted, shortened
from pipefit.units import MIB, format_bytes

Source = Literal["simulated", "dry run", "measured"]
MOST_STEPS = 1000  # of a prediction, which keeps all their actions and samples
LONGEST_SECONDS = 1e100  # keeps sums and differences of times finite


class Stream(StrEnum):
    """A part of a device that can be busy; a device can compute, communicate and copy at the same time."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    COPY = "copy"


class Category(StrEnum):
    """The use of bytes.

    `parameters` includes buffers such as batch-norm statistics; `workspace` is memory that a kernel allocates
    for itself and frees before it returns.
    """

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    ACTIVATIONS = "activations"
    VERSIONS = "weight versions"
    BOUNDARY = "boundary buffers"
    LENT = "lent memory"
    TEMPORARY = "temporary"
    WORKSPACE = "workspace"


CATEGORIES = tuple(Category)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An action on a stream of a device, in seconds since the start of the first step."""

    step: int
    action: str
    stream: Stream
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySample:
    """The bytes at the peak of one action, by category in the order of `CATEGORIES`."""

    step: int
    action: str
    seconds: float
    bytes: tuple[int, int, int, int, int, int, int, int, int]

    @property
    def total_bytes(self) -> int:
        """The bytes of all categories together."""
        return sum(self.bytes)

    @property
    def by_category(self) -> dict[Category, int]:
        """The bytes of the categories that are not empty."""
        return {category: nbytes for category, nbytes in zip(CATEGORIES, self.bytes, strict=True) if nbytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorPeaks:
    """Peaks of a GPU's caching allocator, and the memory of its process outside of the allocator.

    `requested_bytes` is the peak of tensors, as in all traces; `allocated_bytes` that of the blocks that hold
    them; `reserved_bytes` that of the segments that the allocator has from the driver. The last two include
    `workspaces` of `workspace_bytes` each, in which cuBLAS computes. Outside of the allocator are the CUDA
    context and NCCL's communicators.

    `settings` are as in `PYTORCH_CUDA_ALLOC_CONF`. `retries` counts how often cached memory was returned to
    the driver because the device had no more. If the memory does not suffice (`fits`), the figures are those
    of a device with enough, and `expandable_bytes` are the reserved bytes with expandable segments if these
    would fit, else 0. `planned_bytes` is the size of an arena in which every tensor would have an address
    that is planned before the run; 0 if it was not computed. For a real GPU's allocator, `settings` are as
    the user wrote them, and the number of workspaces and the memory outside of the allocator are unknown:
    zeros.

    Raises:
        UsageError: a negative count or size.
    """

    settings: str
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    retries: int = 0
    fits: bool = True
    workspaces: int = 0
    workspace_bytes: int = 0
    context_bytes: int = 0
    communicators: int = 0
    communicator_bytes: int = 0
    expandable_bytes: int = 0
    planned_bytes: int = 0

    def __post_init__(self) -> None:
        figures = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name != "settings"
        }
        if wrong := next((name for name, figure in figures.items() if figure < 0), None):
            raise UsageError(f"{wrong} of an allocator must be zero or more, not {figures[wrong]}")

    @property
    def outside_bytes(self) -> int:
        """The bytes of the context and all communicators."""
        return self.context_bytes + self.communicators * self.communicator_bytes

    @property
    def process_bytes(self) -> int:
        """The bytes that the process takes of the device."""
        return self.reserved_bytes + self.outside_bytes

    @property
    def other_segments(self) -> str:
        """The setting with which the process would fit, in words after others; empty if there is none."""
        if not self.expandable_bytes:
            return ""
        return (
            "; with expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF it would reserve "
            f"{format_bytes(self.expandable_bytes)} and fit"
        )

    def __str__(self) -> str:
        told = (
            f"{format_bytes(self.reserved_bytes)} reserved for {format_bytes(self.requested_bytes)} of "
            "tensors, "
            f"{format_bytes(self.context_bytes)} for its context"
        )
        if not self.communicators:
            return told
        nbytes = format_bytes(self.communicators * self.communicator_bytes)
        return f"{told} and {nbytes} for {counted(self.communicators, 'communicator')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTrace:
    """Events and memory of one device.

    `budget_bytes` is its whole budget; `allocator` is present if one was simulated, or measured on a GPU.
    """

    device: int
    budget_bytes: int
    events: tuple[Event, ...]
    memory: tuple[MemorySample, ...]
    allocator: AllocatorPeaks | None = None

    @property
    def peak(self) -> MemorySample | None:
        """The first sample with the most bytes; None without samples."""
        return max(self.memory, key=lambda sample: sample.total_bytes, default=None)

    @property
    def peak_bytes(self) -> int:
        """The most bytes ever allocated."""
        return self.peak.total_bytes if self.peak else 0

    @property
    def lack_bytes(self) -> int:
        """The bytes that the device lacks for its process, or for its tensors without an allocator.

        0 if everything fits. At least 1 if `per_process_memory_fraction` gives the allocator less than the
        device has, and this does not suffice.
        """
        if self.allocator is None:
            return max(0, self.peak_bytes - self.budget_bytes)
        over = self.allocator.process_bytes - self.budget_bytes
        return max(over, 0 if self.allocator.fits else 1)

    @property
    def shortage(self) -> str:
        """The memory that a device needs and its excess over the budget, in words."""
        of = format_bytes(self.budget_bytes)
        if self.allocator is None:
            at = self.peak.action if self.peak else "-"
            need = format_bytes(self.peak_bytes)
            return f"device {self.device} needs {need} at {at}, {format_bytes(self.lack_bytes)} over its {of}"
        process = self.allocator
        over = process.process_bytes - self.budget_bytes
        by = f"{format_bytes(over)} over its {of}" if over > 0 else f"more than it may of its {of}"
        return (
            f"the process of device {self.device} needs {format_bytes(process.process_bytes)}, {by}: "
            f"{process}{process.other_segments}"
        )

    @property
    def remedy(self) -> str:
        """Advice about a lack of memory: a larger reserve, if that leaves memory, or smaller stages."""
        others = self.allocator.process_bytes - self.allocator.requested_bytes if self.allocator else 0
        reserve = -(-others // MIB)
        if not 0 < reserve * MIB < self.budget_bytes:
            return "plan again for this cluster with smaller microbatches or more devices"
        return (
            f"plan with --reserve {reserve}MiB, which keeps that memory free for everything other than "
            "tensors"
        )

    def step_peak_bytes(self, step: int) -> int:
        """Return the most bytes allocated during one step."""
        return max((sample.total_bytes for sample in self.memory if sample.step == step), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All devices over their steps. The first step differs from later ones: it creates the optimizer state.

    `estimated` marks times that derive from estimates: those of a simulation without measured seconds. Events
    and samples may have numbers beyond the last step: those of an evaluation, or of a step that failed.

    Raises:
        UsageError: steps without seconds, a duplicate device, or an impossible number: a negative count or
            size, an end
        before its start, or a time out of range.
    """

    source: Source
    steps: int
    devices: tuple[DeviceTrace, ...]
    step_seconds: tuple[float, ...]
    estimated: bool = False

    def __post_init__(self) -> None:
        if self.steps != len(self.step_seconds):
            raise UsageError(
                f"a trace needs the seconds of each of its {self.steps} steps, not {len(self.step_seconds)}"
            )
        numbers = [device.device for device in self.devices]
        if len(set(numbers)) != len(numbers) or min(numbers, default=0) < 0:
            raise UsageError(
                f"a trace must name each device once, by a non-negative number, not {_some(numbers)}"
            )
        if not all(0 <= seconds <= LONGEST_SECONDS for seconds in self.step_seconds):
            raise UsageError(
                f"the seconds of a step must be from 0 to {LONGEST_SECONDS:g}, not {_some(self.step_seconds)}"
            )
        for wrong in chain.from_iterable(map(_wrong, self.devices)):
            raise UsageError(wrong)

    def __repr__(self) -> str:
        """Return one line, without events and samples."""
        highest = max(self.peak_bytes, default=0)
        return (
            f"<Trace: {self.source}, {counted(self.steps, 'step')} on "
            f"{counted(len(self.devices), 'device')}, at most "
            f"{format_bytes(highest)} on one>"
        )

    @property
    def last_seconds(self) -> float | None:
        """Seconds of the last step; None without a clock, or without steps."""
        return self.step_seconds[-1] if self.has_clock and self.step_seconds else None

    @property
    def has_clock(self) -> bool:
        """True if times are seconds; those of a dry run are positions in the program."""
        return self.source != "dry run"

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most bytes allocated on every device."""
        return tuple(device.peak_bytes for device in self.devices)

    def utilisation(self) -> tuple[float, ...]:
        """Return the share of the last step that every device spent computing."""
        last, seconds = self.steps - 1, self.step_seconds[-1]
        busy = [
            sum(
                e.end_seconds - e.start_seconds
                for e in d.events
                if e.step == last and e.stream is Stream.COMPUTE
            )
            for d in self.devices
        ]
        return tuple(b / seconds if seconds else 0.0 for b in busy)


def _wrong(device: DeviceTrace) -> Iterator[str]:
    """Yield the impossible figures of a device, in sentences."""
    if device.budget_bytes < 0:
        yield f"device {device.device} has {device.budget_bytes} bytes, but a budget must be zero or more"
    for event in device.events:
        start, end = event.start_seconds, event.end_seconds
        if event.step < 0 or not -LONGEST_SECONDS <= start <= end <= LONGEST_SECONDS:
            what = f"{shortened(event.action)} of step {event.step} from {start:g} to {end:g} s"
            yield (
                f"device {device.device} has {what}, but events must be at step 0 or later, end after they "
                f"start, and be at most {LONGEST_SECONDS:g} s away"
            )
    for sample in device.memory:
        if (
            sample.step < 0
            or min(sample.bytes) < 0
            or not -LONGEST_SECONDS <= sample.seconds <= LONGEST_SECONDS
        ):
            at = f"{shortened(sample.action)} of step {sample.step}, {sample.seconds:g} s"
            yield (
                f"device {device.device} has {list(sample.bytes)} bytes at {at}, but samples must be at "
                f"step 0 or later, have non-negative bytes, and be at most {LONGEST_SECONDS:g} s away"
            )


def _some(numbers: Sequence[float]) -> str:
    """Format the first ten of these numbers."""
    return f"{', '.join(map(str, numbers[:10]))}{', ...' if len(numbers) > 10 else ''}"
