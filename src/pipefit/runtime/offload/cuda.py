"""Copies of a GPU, beside its computing: on streams of their own, behind events instead of stops of the host.

Copies out and copies in run side by side. Those of one direction follow one another in the order of the program. A copy
between a GPU and several lenders has a stream for each of them, so that stripes over several links move at once; the
next copy of that direction begins when all of them have ended. The simulator's clock has the same streams
(`pipefit.simulate.timed_program`), and links say how fast both directions are together (`Link.duplex`).

A copy begins when all that was launched before its start has been computed: the bytes that leave are there, and memory
for those that come is free. Its join lets the computing stream wait for it. What is freed or read afterwards is so on
the computing stream, whose allocations torch's allocator gives out again in the order of that stream: no
`record_stream`, which would make peaks depend on timing. So copies of the two directions that use the same memory, on
the device or at a lender, are ordered by the join of the first. The host does not wait at a join: before it reads or
writes what was copied, as an update on the host does, it settles the copy.

What goes to a disk or comes from one is copied by threads, on streams of their own: files know no events, so that the
join of such a copy stops the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from ctypes import byref, c_char, c_char_p, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pipefit.errors import UsageError
from pipefit.runtime.offload.copying import Part, carry_and_forget
from pipefit.runtime.offload.disk import DiskSlot
from pipefit.schema.devices import Member

# ----------------------------------------------------------------------------------------------------
# CUDA's driver, for what torch has no public function: copies between addresses, and memory of another
# process.
#
# The driver's interface is stable, so that this works with every release of torch and CUDA. Handles of memory
# for other processes leave no file, unlike torch's own way to share tensors. The library is loaded when a
# driver is made, and only runs on GPUs make one. (CUDA Driver API, sections on memory management and on
# unified addressing.)

_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1


class Driver(Protocol):
    """Copies, and memory that processes share. Every call is for the calling thread's current device."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy between two addresses, whatever devices or pinned memory they are of."""

    def export(self, address: int) -> tuple[bytes, int]:
        """A handle of the allocation that an address of this device is in, and how far into it the address is."""

    def open(self, handle: bytes) -> int:
        """Where another process's allocation begins here; it is mapped until it is closed."""

    def close(self, start: int) -> None:
        """Unmap what was opened there."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", c_char * _HANDLE_BYTES)]


class CudaDriver:
    """The driver of this machine.

    Raises:
        UsageError: it has none.
    """

    def __init__(self, library: Any = None) -> None:
        try:
            self._library = library or ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise UsageError(f"this machine has no CUDA driver ({error}): plan for emulated devices") from error

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._call("cuMemcpyAsync", c_uint64(target), c_uint64(source), c_size_t(nbytes), c_void_p(stream))

    def export(self, address: int) -> tuple[bytes, int]:
        start, nbytes, handle = c_uint64(), c_size_t(), _Handle()
        self._call("cuMemGetAddressRange_v2", byref(start), byref(nbytes), c_uint64(address))
        self._call("cuIpcGetMemHandle", byref(handle), c_uint64(address))
        return bytes(handle), address - start.value

    def open(self, handle: bytes) -> int:
        start = c_uint64()
        here = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", byref(start), here, c_uint(_LAZY_ENABLE_PEER_ACCESS))
        return start.value

    def close(self, start: int) -> None:
        self._call("cuIpcCloseMemHandle", c_uint64(start))

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver.

        Raises:
            RuntimeError: it failed; in the driver's words.
        """
        if error := getattr(self._library, name)(*arguments):
            words = c_char_p()
            self._library.cuGetErrorName(error, byref(words))
            raise RuntimeError(f"{name}: {(words.value or b'unknown error').decode()}")


# ----------------------------------------------------------------------------------------------------


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
    """A copy: the event behind it on every stream, its files if it has any, and the parts whose storages it needs until
    its join.
    """

    done: Sequence[Any]
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


class OnStreams:
    """Copies on streams of their own, beside the one that computes.

    Args:
        stream: makes a stream; asked once for every direction and lender.
        computing: the stream that computes now.
        here: makes the device the current one.
    """

    beside = True

    def __init__(
        self,
        stream: Callable[[], Queue],
        computing: Callable[[], Queue],
        driver: Driver,
        here: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._stream, self._computing, self._driver, self._here = stream, computing, driver, here
        self._streams: dict[tuple[bool, Member | None], Queue] = {}
        self._last: dict[bool, dict[Member | None, Any]] = {True: {}, False: {}}
        self._threads = [ThreadPoolExecutor(1, f"pipefit-files-{way}") for way in ("in", "out")]
        self._files: list[Future[None]] = []

    @classmethod
    def of(cls, device: torch.device) -> OnStreams:
        """The copies of a GPU."""
        return cls(
            lambda: torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
            lambda: torch.cuda.current_stream(device),
            CudaDriver(),
            lambda: torch.cuda.device(device),
        )

    def start(self, parts: Sequence[Part], *, outward: bool, seconds: float) -> UnderWay:
        on_disks = [part for part in parts if isinstance(part.slot, DiskSlot)]
        by_lender: dict[Member | None, list[Part]] = {}
        for part in parts:
            if not isinstance(part.slot, DiskSlot):
                by_lender.setdefault(part.lender, []).append(part)
        with self._here():
            ready = self._computing().record_event()
            done = {lender: self._queue(own, lender, ready, outward=outward) for lender, own in by_lender.items()}
        if done:
            self._last[outward] = done
        files = self._threads[outward].submit(self._through, ready, on_disks, outward) if on_disks else None
        self._files = [file for file in (*self._files, files) if file is not None and not file.done()]
        return UnderWay([*done.values()] or [ready], files, parts)  # even a copy of nothing comes after what was ready

    def _queue(self, parts: Sequence[Part], lender: Member | None, ready: Any, *, outward: bool) -> Any:
        """Queue the parts of one lender behind `ready` and the copy before; the event behind them."""
        stream = self._streams.get((outward, lender))
        if stream is None:
            stream = self._streams[outward, lender] = self._stream()
        stream.wait_event(ready)
        for other, before in self._last[outward].items():
            if other != lender:  # what is on this stream comes before anyway
                stream.wait_event(before)
        for storage, offset, slot, within, nbytes, _ in parts:
            here, there = storage.data_ptr() + offset, slot.address + within
            target, source = (there, here) if outward else (here, there)
            self._driver.copy(target, source, nbytes, stream.cuda_stream)
        return stream.record_event()

    def join(self, handle: UnderWay) -> None:
        if handle.files is not None:
            handle.files.result()
        for done in handle.done:
            self._computing().wait_event(done)
        handle.parts = ()

    def settle(self, handle: UnderWay) -> None:
        if handle.files is not None:
            handle.files.result()
        with self._here():
            for done in handle.done:
                done.synchronize()
        handle.parts = ()

    def abandon(self) -> None:
        for file in self._files:
            file.exception()  # returns when it has ended
        self._files.clear()
        for stream in self._streams.values():
            stream.synchronize()

    def _through(self, ready: Any, parts: list[Part], outward: bool) -> None:
        """Carry parts to files or back, when all that was launched before has been computed."""
        with self._here():
            ready.synchronize()
            carry_and_forget(parts, outward=outward)
