"""The meter of a CUDA device, which reads the figures of torch's caching allocator.

`requested` bytes, those of tensors, are what pipefit predicts. What the allocator has `allocated` for them, rounded,
and `reserved`, and what the process takes in total with context, libraries and communicators, are other numbers;
`memory_figures` gives all of them. cuBLAS's workspaces come from the allocator, and are requested bytes of its own.
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
from pipefit.memory.cuda_allocator import ENVIRONMENT
from pipefit.schema.trace import CATEGORIES, AllocatorPeaks, Category, MemorySample

# ----------------------------------------------------------------------------------------------------
# Seconds of what a GPU computes, from pairs of events on its computing stream.
#
# The host launches kernels ahead of the GPU, so that its own clock tells when they were launched. An event is
# queued behind them and keeps the time at which the GPU comes to it. Events cost microseconds each and make
# nobody wait, until their times are read: once a step, when the step's result has come and the GPU has passed
# them all.

Mark = torch.cuda.Event
_MILLISECOND = 1e-3


class HostWatch:
    """A stopwatch for what computes while the host waits: its marks are the host's own seconds."""

    def mark(self) -> float:
        """The present moment."""
        return time.perf_counter()

    def read(self, marks: Sequence[float]) -> list[float]:
        """The seconds of moments."""
        return list(marks)


class Stopwatch:
    """Marks moments on the current stream of `device`, and reads them in seconds of `clock`.

    Args:
        clock: the host's, with which the GPU's is compared once, before the first mark.
        event: makes an event with timing; a `torch.cuda.Event` unless given.
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
        """The moment at which the GPU has done what it was given so far."""
        if self._known is None:
            first = self._recorded()
            first.synchronize()
            self._known = first, self._clock()
        return self._recorded()

    def read(self, marks: Sequence[Mark]) -> list[float]:
        """The seconds of moments, in the order in which they were marked. Waits for the last.

        Events tell the time between two of them in milliseconds of 32 bits: so each is counted from the latest that is
        known, and not from the first.
        """
        if self._known is None or not marks:
            return []
        marks[-1].synchronize()
        known, seconds = self._known
        found = [seconds + known.elapsed_time(mark) * _MILLISECOND for mark in marks]
        self._known = marks[-1], found[-1]
        return found

    def has_come_to(self, mark: Mark) -> bool:
        """Whether the GPU is past a moment."""
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def _recorded(self) -> Mark:
        made = self._event()
        made.record(torch.cuda.current_stream(self.device))
        return made


# ----------------------------------------------------------------------------------------------------

_FIGURES = ("requested", "allocated", "reserved")
_KNOWN = (Category.PARAMETERS, Category.OPTIMIZER, Category.VERSIONS, Category.LENT)


class CudaMeter:
    """Peaks of every action: requested bytes, as the allocator counts them. Costs microseconds an action, nothing an
    operation: its figures are read as they are, without the flat copy that `torch.cuda.memory_stats` makes.

    The allocator does not know what bytes are for: parameters, their versions and optimizer state are counted when they
    are tagged, as long as they are there, and everything else is activations. What comes or goes in an action counts
    as if it had been there at its peak.

    Torch's own peaks begin anew with every action, so that `torch.cuda.max_memory_allocated` tells the last one's;
    `allocator` has the highest of all.

    With `cap_bytes` torch's allocator reserves no more for this process from then on, and raises an exception where it
    would have to, so that a plan for a smaller GPU fails where it would fail there. Without, the limit that the process
    has stays.
    """

    def __init__(self, device: torch.device, *, cap_bytes: int | None = None) -> None:
        self.device = device
        if cap_bytes is not None:
            _, total = torch.cuda.mem_get_info(device)
            torch.cuda.set_per_process_memory_fraction(min(max(cap_bytes, 0) / total, 1.0), device)
        self.action = ""
        self._held: dict[int, Tracked] = {}  # tagged storages, by their keys
        self._bytes = dict.fromkeys(_KNOWN, 0)
        self._before = dict(self._bytes)  # as the action began
        self._highest = dict.fromkeys(_FIGURES, 0)
        self._retries = 0

    def __enter__(self) -> CudaMeter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def begin(self, action: str) -> None:
        """`action` begins: the peak restarts at the present level."""
        self.action = action
        torch.cuda.reset_peak_memory_stats(self.device)
        self._before = dict(self._bytes)

    def end(self, step: int, seconds: float, category: Category = Category.TEMPORARY) -> MemorySample:
        """The action's peak."""
        figures = torch.cuda.memory_stats_as_nested_dict(self.device)
        peaks = _peaks(figures)
        self._highest = {name: max(peaks[name], highest) for name, highest in self._highest.items()}
        self._retries = figures["num_alloc_retries"]
        known = max(self._before, self._bytes, key=lambda of: sum(of.values()))
        rest = max(peaks["requested"] - sum(known.values()), 0)  # no figures come of other allocators than torch's own
        counted = tuple(known.get(c, rest if c is Category.ACTIVATIONS else 0) for c in CATEGORIES)
        return MemorySample(step=step, action=self.action, seconds=seconds, bytes=counted)  # type: ignore[arg-type]

    @property
    def allocator(self) -> AllocatorPeaks:
        """The highest of each figure in all actions so far; how often the process has emptied its cache. Nothing is
        said of what is outside of the allocator.
        """
        return AllocatorPeaks(
            settings=next((os.environ[name] for name in ENVIRONMENT if name in os.environ), ""),
            requested_bytes=self._highest["requested"],
            allocated_bytes=self._highest["allocated"],
            reserved_bytes=self._highest["reserved"],
            retries=self._retries,
        )

    def tag(self, tensors: Iterable[Tensor | None], category: Category) -> None:
        """Count the storages of tensors on the device as `category` from now on, as long as they are there."""
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
        """Remember the bytes that the device lends."""
        self._bytes[Category.LENT] = nbytes

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has lost its memory, or has it again: the allocator has counted that, and here its category."""
        tracked = self._held.get(storage._cdata)
        if tracked is not None:
            self._count(tracked, storage.nbytes())

    def drop_graph(self) -> None:
        pass

    def forget_graphs(self) -> None:
        """Nothing to do: the allocator has counted what was freed."""

    def _count(self, tracked: Tracked, nbytes: int) -> None:
        """A storage takes so much from now on."""
        if tracked.nbytes or nbytes:
            self._bytes[CATEGORIES[tracked.category]] += nbytes - tracked.nbytes
            tracked.nbytes = nbytes

    def _died(self, tracked: Tracked) -> None:
        del self._held[tracked.key]
        self._count(tracked, 0)


def memory_figures(device: torch.device) -> dict[str, int]:
    """Numbers of a CUDA device that are never mixed: peaks of requested, allocated and reserved bytes since torch's
    were reset, and what all of its processes take now.
    """
    free, total = torch.cuda.mem_get_info(device)
    return {**_peaks(torch.cuda.memory_stats_as_nested_dict(device)), "process_total": total - free}


def _peaks(figures: dict[str, Any]) -> dict[str, int]:
    """The peaks of the allocator's figures, over both of its pools."""
    return {name: int(figures[f"{name}_bytes"]["all"]["peak"]) for name in _FIGURES}
