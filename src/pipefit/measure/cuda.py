"""The meter of a CUDA device, which reads the statistics of torch's caching allocator.

pipefit predicts `requested` bytes, those of tensors. Bytes that the allocator has `allocated` for them,
rounded up, and `reserved`, and the process total with context, libraries and communicators are other numbers;
`memory_figures` returns all of them. cuBLAS workspaces come from the allocator, and are requested bytes too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from pipefit.measure.cpu import Tracked
from pipefit.memory import ENVIRONMENT
from pipefit.schema.trace import CATEGORIES, AllocatorPeaks, Category, MemorySample

# ---- GPU time, from pairs of events on the compute stream
#
# The host launches kernels ahead of the GPU, so its clock shows launches. An event is queued after the
# kernels and records the time at which the GPU reaches it. Events cost microseconds each and do not block
# until they are read: once a step, when the step's result has arrived and the GPU has passed all events.

Mark = torch.cuda.Event
_MILLISECOND = 1e-3


class HostWatch:
    """A stopwatch for work that the host waits for: its marks are host seconds."""

    def mark(self) -> float:
        """Return the present time."""
        return time.perf_counter()

    def read(self, marks: Sequence[float]) -> list[float]:
        """Return the seconds of marks."""
        return list(marks)


class Stopwatch:
    """Marks times on the current stream of `device`, and reads them in seconds of `clock`.

    Args:
        clock: the host's clock, with which the GPU's is compared once, before the first mark.
        event: makes an event with timing; by default a `torch.cuda.Event`.
    """

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float],
        event: Callable[[], Mark] | None = None,
    ) -> None:
        self.device, self._clock = device, clock
        self._event = event or partial(torch.cuda.Event, enable_timing=True)
        self._known: tuple[Mark, float] | None = None

    def mark(self) -> Mark:
        """Mark the time at which the GPU completes the work queued so far."""
        if self._known is None:
            first = self._recorded()
            first.synchronize()
            self._known = first, self._clock()
        return self._recorded()

    def read(self, marks: Sequence[Mark]) -> list[float]:
        """Return the seconds of marks, in the order in which they were made. Waits for the last.

        The time between two events is a 32-bit float in milliseconds, so each mark is counted from the latest
        known one, not from the first.
        """
        if self._known is None or not marks:
            return []
        marks[-1].synchronize()
        known, seconds = self._known
        result = [seconds + known.elapsed_time(mark) * _MILLISECOND for mark in marks]
        self._known = marks[-1], result[-1]
        return result

    def has_come_to(self, mark: Mark) -> bool:
        """Return whether the GPU has passed a mark."""
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def _recorded(self) -> Mark:
        event = self._event()
        event.record(torch.cuda.current_stream(self.device))
        return event


# ---- The meter

_FIGURES = ("requested", "allocated", "reserved")
_KNOWN = (Category.PARAMETERS, Category.OPTIMIZER, Category.VERSIONS, Category.LENT)


class CudaMeter:
    """Peaks of requested bytes for every action, as the allocator counts them.

    Costs microseconds an action, nothing an operation: the statistics are read directly, without the flat
    copy of `torch.cuda.memory_stats`.

    The allocator does not know the purpose of bytes: parameters, their versions and optimizer state count
    from their tags until they are freed, and everything else counts as activations. Tagged memory that
    appears or disappears during an action counts as present at its peak.

    Torch's own peaks restart with every action, so `torch.cuda.max_memory_allocated` gives the last action's
    peak; `allocator` has the highest of all.

    With `cap_bytes`, torch's allocator reserves no more than this for the process from then on and raises an
    exception beyond it, so that a plan for a smaller GPU fails as it would there. Without, the present limit
    stays.
    """

    def __init__(self, device: torch.device, *, cap_bytes: int | None = None) -> None:
        self.device = device
        if cap_bytes is not None:
            _, total = torch.cuda.mem_get_info(device)
            torch.cuda.set_per_process_memory_fraction(min(max(cap_bytes, 0) / total, 1.0), device)
        self.action = ""
        self._held: dict[int, Tracked] = {}  # tagged storages, by their keys
        self._bytes = dict.fromkeys(_KNOWN, 0)
        self._before = dict(self._bytes)  # at the start of the action
        self._highest = dict.fromkeys(_FIGURES, 0)
        self._retries = 0

    def __enter__(self) -> CudaMeter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def begin(self, action: str) -> None:
        """Begin `action`: the peak restarts at the present level."""
        self.action = action
        torch.cuda.reset_peak_memory_stats(self.device)
        self._before = dict(self._bytes)

    def end(self, step: int, seconds: float, category: Category = Category.TEMPORARY) -> MemorySample:
        """Return the action's peak."""
        figures = torch.cuda.memory_stats_as_nested_dict(self.device)
        peaks = _peaks(figures)
        self._highest = {name: max(peaks[name], highest) for name, highest in self._highest.items()}
        self._retries = figures["num_alloc_retries"]
        known = max(self._before, self._bytes, key=lambda of: sum(of.values()))
        rest = max(peaks["requested"] - sum(known.values()), 0)  # other allocators report no statistics
        counted = tuple(known.get(c, rest if c is Category.ACTIVATIONS else 0) for c in CATEGORIES)
        return MemorySample(
            step=step,
            action=self.action,
            seconds=seconds,
            bytes=counted,  # type: ignore[arg-type]
        )

    @property
    def allocator(self) -> AllocatorPeaks:
        """Highest value of each statistic so far, and how often the process emptied its cache.

        Memory outside of the allocator is not included.
        """
        return AllocatorPeaks(
            settings=next((os.environ[name] for name in ENVIRONMENT if name in os.environ), ""),
            requested_bytes=self._highest["requested"],
            allocated_bytes=self._highest["allocated"],
            reserved_bytes=self._highest["reserved"],
            retries=self._retries,
        )

    def tag(self, tensors: Iterable[Tensor | None], category: Category) -> None:
        """Count the storages of tensors on the device as `category` from now on, until they are freed."""
        for tensor in tensors if category in self._bytes else ():
            if tensor is not None and tensor.device.type == self.device.type:
                storage = tensor.untyped_storage()
                tracked = self._held.get(storage._cdata)
                if tracked is None:
                    tracked = self._held[storage._cdata] = Tracked(storage, self._died)
                    tracked.key, tracked.nbytes = storage._cdata, 0
                self._count(tracked, 0)
                tracked.category = CATEGORIES.index(category)
                self._count(tracked, storage.nbytes())

    def reserve(self, nbytes: int) -> None:
        """Record the bytes that the device lends."""
        self._bytes[Category.LENT] = nbytes

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Update the category of a storage whose memory was freed or restored."""
        tracked = self._held.get(storage._cdata)
        if tracked is not None:
            self._count(tracked, storage.nbytes())

    def _count(self, tracked: Tracked, nbytes: int) -> None:
        """Set the bytes of a storage from now on."""
        if tracked.nbytes or nbytes:
            self._bytes[CATEGORIES[tracked.category]] += nbytes - tracked.nbytes
            tracked.nbytes = nbytes

    def _died(self, tracked: Tracked) -> None:
        del self._held[tracked.key]
        self._count(tracked, 0)


def memory_figures(device: torch.device) -> dict[str, int]:
    """Return separate memory numbers of a CUDA device.

    These are the peaks of requested, allocated and reserved bytes since torch's peaks were reset, and the
    bytes that all of its processes use now.
    """
    free, total = torch.cuda.mem_get_info(device)
    return {**_peaks(torch.cuda.memory_stats_as_nested_dict(device)), "process_total": total - free}


def _peaks(figures: dict[str, Any]) -> dict[str, int]:
    """Return the peaks of the allocator's statistics, over both of its pools."""
    return {name: int(figures[f"{name}_bytes"]["all"]["peak"]) for name in _FIGURES}
