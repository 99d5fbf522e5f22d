"""Copies of a GPU in parallel with its computing.

They run on separate streams, ordered by events, without stops of the host. Copies in the two directions run
in parallel; copies in one direction run in the order of the program. A copy between a GPU and several lenders
has a stream for each lender, so that stripes over several links move at once; the next copy of that direction
begins when all of them have ended. The simulator's clock has the same streams (`simulator.timed_program`),
and `Link.duplex` gives the joint speed of both directions.

A copy begins after all work that was launched before its start: outgoing bytes are then computed, and memory
for incoming ones is free. Its join makes the computing stream wait for it. Later frees and reads happen on
the computing stream, whose allocations torch's allocator reuses in that stream's order: `record_stream`,
which would make peaks depend on timing, is not needed. So copies of the two directions that use the same
memory, on the device or at a lender, are ordered by the join of the first. The host does not wait at a join:
before it reads or writes copied bytes, as an update on the host does, it settles the copy.

Copies to and from a disk run on threads with separate streams: files lack events, so the join of such a copy
stops the host.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from ctypes import byref, c_char, c_char_p, c_size_t, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch.cuda import Stream

from pipefit.errors import UsageError
from pipefit.runtime.offload.copying import Copier, SlotPart, carry_and_forget
from pipefit.runtime.offload.disk import DiskSlot, PlainCopies
from pipefit.schema.devices import Member

# ---- CUDA's driver
# Torch lacks a public function for copies between addresses, and for memory of another process whose handles
# leave no file. The driver's interface is stable over releases of torch and CUDA. The library is loaded when
# a driver is made, and only runs on GPUs make one. (CUDA Driver API, sections on memory management and on
# unified addressing.)

_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", c_char * _HANDLE_BYTES)]


class CudaDriver:
    """The driver of this machine. Every call is for the calling thread's current device.

    Raises:
        UsageError: the machine has none.
    """

    def __init__(self, library: Any = None) -> None:
        try:
            self._library = library or ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise UsageError(
                f"this machine does not have a CUDA driver ({error}): plan for emulated devices"
            ) from error

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy between two addresses, of any devices or pinned memory."""
        self._call("cuMemcpyAsync", c_uint64(target), c_uint64(source), c_size_t(nbytes), c_void_p(stream))

    def export(self, address: int) -> tuple[bytes, int]:
        """Return a handle of the allocation with an address of this device, and the address's offset."""
        start, nbytes, handle = c_uint64(), c_size_t(), _Handle()
        self._call("cuMemGetAddressRange_v2", byref(start), byref(nbytes), c_uint64(address))
        self._call("cuIpcGetMemHandle", byref(handle), c_uint64(address))
        return bytes(handle), address - start.value

    def open(self, handle: bytes) -> int:
        """Map another process's allocation until it is closed; return its first address in this process."""
        start = c_uint64()
        here = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", byref(start), here, c_uint(_LAZY_ENABLE_PEER_ACCESS))
        return start.value

    def close(self, start: int) -> None:
        """Unmap an allocation that `open` has mapped."""
        self._call("cuIpcCloseMemHandle", c_uint64(start))

    def _call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver.

        Raises:
            RuntimeError: it failed; names the function and the driver's error.
        """
        if error := getattr(self._library, name)(*arguments):
            words = c_char_p()
            self._library.cuGetErrorName(error, byref(words))
            raise RuntimeError(f"{name}: {(words.value or b'unknown error').decode()}")


# ---- Copies on streams


@dataclass(slots=True)
class UnderWay:
    """A copy in flight: its final event on every stream, its files if any, and its parts.

    The parts keep their storages until the join.
    """

    done: Sequence[Any]
    files: Future[None] | None
    parts: Sequence[SlotPart]


class StreamCopies(PlainCopies):
    """Copies between a GPU and the buffers before a disk, on a separate stream."""

    def __init__(self, stream: Stream, driver: CudaDriver) -> None:
        self._stream, self._driver = stream, driver

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._driver.copy(target, source, nbytes, self._stream.cuda_stream)

    def settle(self) -> None:
        self._stream.synchronize()


class OnStreams(Copier):
    """Copies on streams separate from the one that computes.

    Args:
        stream: makes a stream; called once for every direction and lender.
        computing: returns the stream that computes now.
        here: makes the device the current one.
    """

    beside = True

    def __init__(
        self,
        stream: Callable[[], Stream],
        computing: Callable[[], Stream],
        driver: CudaDriver,
        here: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._stream, self._computing, self._driver, self._here = stream, computing, driver, here
        self._streams: dict[tuple[bool, Member | None], Stream] = {}
        self._last: dict[bool, dict[Member | None, Any]] = {True: {}, False: {}}
        self._threads = [ThreadPoolExecutor(1, f"pipefit-files-{way}") for way in ("in", "out")]
        self._files: list[Future[None]] = []

    @classmethod
    def of(cls, device: torch.device) -> OnStreams:
        """Return the copies of a GPU."""
        return cls(
            lambda: torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
            lambda: torch.cuda.current_stream(device),
            CudaDriver(),
            lambda: torch.cuda.device(device),
        )

    def start(self, parts: Sequence[SlotPart], *, outward: bool, seconds: float) -> UnderWay:
        on_disks = [part for part in parts if isinstance(part.slot, DiskSlot)]
        by_lender: dict[Member | None, list[SlotPart]] = {}
        for part in parts:
            if not isinstance(part.slot, DiskSlot):
                by_lender.setdefault(part.lender, []).append(part)
        with self._here():
            ready = self._computing().record_event()
            done = {
                lender: self._queue(own, lender, ready, outward=outward) for lender, own in by_lender.items()
            }
        if done:
            self._last[outward] = done
        files = self._threads[outward].submit(self._through, ready, on_disks, outward) if on_disks else None
        self._files = [file for file in (*self._files, files) if file is not None and not file.done()]
        return UnderWay([*done.values()] or [ready], files, parts)  # an empty copy too

    def _queue(self, parts: Sequence[SlotPart], lender: Member | None, ready: Any, *, outward: bool) -> Any:
        """Queue the parts of one lender after `ready` and the previous copy; return the event after them."""
        stream = self._streams.get((outward, lender))
        if stream is None:
            stream = self._streams[outward, lender] = self._stream()
        stream.wait_event(ready)
        for other, before in self._last[outward].items():
            if other != lender:  # the own stream keeps the order anyway
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

    def _through(self, ready: Any, parts: list[SlotPart], outward: bool) -> None:
        """Copy parts to files or back, after all work that was launched before."""
        with self._here():
            ready.synchronize()
            carry_and_forget(parts, outward=outward)
