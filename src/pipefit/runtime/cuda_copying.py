"""Copies of a GPU, beside its computing: on one stream, behind events instead of stops of the host.

Copies of both directions are on one stream, in the order of the program, which alternates them wherever its schedule
alternates forwards and backwards. That was faster than a stream for each direction, which take each other's bandwidth
(PipeOffload, arXiv 2503.01328). A copy begins when all that was launched before its start has been computed: the bytes
that leave are there, and memory for those that come is free. Its join lets the computing stream wait for it. What is
freed or read afterwards is so on the computing stream, whose allocations torch's allocator gives out again in the order
of that stream: no `record_stream`, which would make peaks depend on timing. The host does not wait at a join: before it
reads or writes what was copied, as an update on the host does, it settles the copy.

What goes to a disk or comes from one is copied by threads, on streams of their own: files know no events, so that the
join of such a copy stops the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pipefit.runtime.copying import Part, carry_and_forget
from pipefit.runtime.cuda_driver import CudaDriver, Driver
from pipefit.runtime.disk import DiskSlot


class Queue(Protocol):
    """What is used of a `torch.cuda.Stream`."""

    @property
    def cuda_stream(self) -> int:
        """The driver's name for it."""

    def record_event(self) -> Any:
        """An event behind all that is queued now."""

    def wait_event(self, event: Any) -> None:
        """Let what is queued from now on wait for an event."""

    def synchronize(self) -> None:
        """Let the host wait for all that is queued."""


@dataclass(slots=True)
class UnderWay:
    """A copy: the event behind it, its files if it has any, and the parts whose storages it needs until its join."""

    done: Any
    files: Future[None] | None
    parts: Sequence[Part]


class StreamCopies:
    """Copies between a GPU and the buffers before a disk, on a stream of their own."""

    def __init__(self, stream: Queue, driver: Driver) -> None:
        self._stream, self._driver = stream, driver

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._driver.copy(target, source, nbytes, self._stream.cuda_stream)

    def settle(self) -> None:
        self._stream.synchronize()


class OnStream:
    """Copies on the stream `copies`, beside those that compute.

    Args:
        computing: the stream that computes now.
        here: makes the device the current one.
    """

    beside = True

    def __init__(
        self,
        copies: Queue,
        computing: Callable[[], Queue],
        driver: Driver,
        here: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._copies, self._computing, self._driver, self._here = copies, computing, driver, here
        self._threads = [ThreadPoolExecutor(1, f"pipefit-files-{way}") for way in ("in", "out")]
        self._files: list[Future[None]] = []

    @classmethod
    def of(cls, device: torch.device) -> OnStream:
        """The copies of a GPU."""
        return cls(
            torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
            lambda: torch.cuda.current_stream(device),
            CudaDriver(),
            lambda: torch.cuda.device(device),
        )

    def start(self, parts: Sequence[Part], *, outward: bool, seconds: float) -> UnderWay:
        on_disks = [part for part in parts if isinstance(part.slot, DiskSlot)]
        with self._here():
            ready = self._computing().record_event()
            self._copies.wait_event(ready)
            for storage, offset, slot, within, nbytes in parts:
                if not isinstance(slot, DiskSlot):
                    here, there = storage.data_ptr() + offset, slot.address + within
                    target, source = (there, here) if outward else (here, there)
                    self._driver.copy(target, source, nbytes, self._copies.cuda_stream)
            done = self._copies.record_event()
        files = self._threads[outward].submit(self._through, ready, on_disks, outward) if on_disks else None
        self._files = [file for file in (*self._files, files) if file is not None and not file.done()]
        return UnderWay(done, files, parts)

    def join(self, handle: UnderWay) -> None:
        if handle.files is not None:
            handle.files.result()
        self._computing().wait_event(handle.done)
        handle.parts = ()

    def settle(self, handle: UnderWay) -> None:
        if handle.files is not None:
            handle.files.result()
        with self._here():
            handle.done.synchronize()
        handle.parts = ()

    def abandon(self) -> None:
        for file in self._files:
            file.exception()  # returns when it has ended
        self._files.clear()
        self._copies.synchronize()

    def _through(self, ready: Any, parts: list[Part], outward: bool) -> None:
        """Carry parts to files or back, when all that was launched before has been computed."""
        with self._here():
            ready.synchronize()
            carry_and_forget(parts, outward=outward)
