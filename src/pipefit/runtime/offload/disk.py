"""Slots on a disk: an unnamed file, read and written through buffers in host memory.

The file has the size of its arena from the start, so a full disk shows before the first step. The system
removes it with the last process that has it open. A copy alternates between two buffers: while one is filled
from the device, the other is written, and vice versa inward. Several storages are gathered in a buffer, so
that a bundle of small tensors is one write. The system may keep written bytes in its cache too, as long as
that memory is not needed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO

from pipefit.errors import OutOfMemory, UsageError, WorkerFailed
from pipefit.memory import Arena, buffer_bytes
from pipefit.runtime.offload.copying import Slot, SlotPart
from pipefit.schema.cluster import Cluster
from pipefit.schema.file_access import obstacle
from pipefit.units import format_bytes

Row = tuple[int, int]  # a row of bytes: address and size


def folder_of(named: str | None) -> str:
    """Return the folder for a disk's files: the one that the cluster names, or the system's temporary
    folder.
    """
    return named or tempfile.gettempdir()


def check_folder(folder: str, nbytes: int) -> None:
    """Check that a folder can hold `nbytes`.

    Raises:
        UsageError: the folder does not exist, or is not writable.
        OutOfMemory: its disk has too little room; says by how much.
    """
    reason = obstacle(folder)
    if reason:
        raise UsageError(
            f"tensors cannot be offloaded to {folder!r}, because a file cannot be created there ({reason}): "
            "give another disk_folder for the host, or set TMPDIR"
        )
    disk = os.statvfs(folder)
    if nbytes > (free := disk.f_bavail * disk.f_frsize):
        raise OutOfMemory(
            f"the offloaded tensors need {format_bytes(nbytes)} in {folder!r}, but its disk has only "
            f"{format_bytes(free)} free, {format_bytes(nbytes - free)} too little: offload less, or give "
            "another disk_folder for the host"
        )


def nameless_file(arena: Arena, folder: str) -> IO[bytes]:
    """Return an unnamed file with an arena's size.

    Raises:
        OutOfMemory: the disk lacks the room.
    """
    try:
        file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - it is open for the whole run
        os.posix_fallocate(file.fileno(), 0, arena.nbytes)
    except OSError as error:
        raise OutOfMemory(
            f"{arena.lender} cannot keep {format_bytes(arena.nbytes)} of device {arena.borrower} in "
            f"{folder!r} ({error.strerror}): offload less there"
        ) from error
    return file


class PlainCopies:
    """Copies within plain memory."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Begin to copy between two addresses."""
        ctypes.memmove(target, source, nbytes)

    def settle(self) -> None:
        """Wait until all copies that have begun are complete; here they are."""


class Buffers:
    """Two equal buffers for one direction: a thread writes or reads one while the other is copied."""

    def __init__(self, memory: Sequence[memoryview], copies: PlainCopies) -> None:
        self._memory, self._copies = memory, copies
        self._addresses = [ctypes.addressof(ctypes.c_char.from_buffer(buffer)) for buffer in memory]
        self._nbytes = len(memory[0])
        self._thread = ThreadPoolExecutor(1, "pipefit-disk")

    def write(self, file: int, at: int, rows: Sequence[Row]) -> None:
        """Write rows of memory one after the other, from byte `at` of the file on."""
        written: list[Future[None]] = []
        for number, chunk in enumerate(chunks(rows, self._nbytes)):
            if number >= 2:
                written[-2].result()
            size = self._copy(number % 2, chunk, gather=True)
            written.append(self._thread.submit(_write, file, self._memory[number % 2][:size], at))
            at += size
        for future in written[-2:]:
            future.result()

    def read(self, file: int, at: int, rows: Sequence[Row]) -> None:
        """Fill rows of memory one after the other from the file, from byte `at` on."""
        known, read = list(chunks(rows, self._nbytes)), list[Future[None]]()
        for number, chunk in enumerate(known):
            size = sum(nbytes for _, nbytes in chunk)
            if number >= 2:
                self._scatter(number - 2, known, read)
            read.append(self._thread.submit(_read, file, self._memory[number % 2][:size], at))
            at += size
        for number in range(max(len(known) - 2, 0), len(known)):
            self._scatter(number, known, read)

    def _scatter(self, number: int, known: Sequence[Sequence[Row]], read: Sequence[Future[None]]) -> None:
        read[number].result()
        self._copy(number % 2, known[number], gather=False)

    def _copy(self, buffer: int, chunk: Sequence[Row], *, gather: bool) -> int:
        """Copy rows into a buffer, or out of it; return their bytes."""
        address = self._addresses[buffer]
        for row, nbytes in chunk:
            self._copies.copy(*((address, row) if gather else (row, address)), nbytes)
            address += nbytes
        self._copies.settle()
        return address - self._addresses[buffer]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DiskSlot(Slot):
    """A slot from byte `address` of the file `owner` on, with its device's buffers for each direction."""

    owner: IO[bytes]
    outward: Buffers
    inward: Buffers

    def carry(self, parts: Sequence[SlotPart], *, outward: bool) -> None:
        rows = [(part.storage.data_ptr() + part.offset, part.nbytes) for part in parts]
        carry = self.outward.write if outward else self.inward.read
        try:
            carry(self.owner.fileno(), self.address + parts[0].within, rows)
        except OSError as error:
            raise WorkerFailed(
                f"an offloaded tensor cannot be {'written to' if outward else 'read from'} the disk "
                f"({error.strerror}): offload to the host instead, or give it another disk_folder"
            ) from error


def plain_buffers(nbytes: int) -> Buffers:
    """Return buffers in plain memory."""
    return Buffers([memoryview(mmap.mmap(-1, nbytes)) for _ in range(2)], PlainCopies())


class Disks:
    """Disk arenas of the devices of a process.

    Args:
        arenas: all arenas of the run; they determine the size of the buffers.
        buffers: makes the buffers for one direction of a device, given the device and the bytes of each.
    """

    def __init__(
        self, cluster: Cluster, arenas: Sequence[Arena], buffers: Callable[[int, int], Buffers]
    ) -> None:
        self._cluster, self._arenas, self._make = cluster, arenas, buffers
        self._buffers: dict[int, tuple[Buffers, Buffers]] = {}

    def slots(self, arena: Arena) -> list[Slot]:
        """Return the slots of an arena, in a new file."""
        borrower, host = arena.borrower, self._cluster.hosts[arena.lender.number or 0]
        if borrower not in self._buffers:
            nbytes = buffer_bytes(self._arenas, borrower)
            self._buffers[borrower] = self._make(borrower, nbytes), self._make(borrower, nbytes)
        outward, inward = self._buffers[borrower]
        file = nameless_file(arena, folder_of(host.disk_folder))
        return [
            DiskSlot(nbytes=arena.slot_bytes, address=start, owner=file, outward=outward, inward=inward)
            for start in range(0, arena.nbytes, arena.slot_bytes)
        ]


def chunks(rows: Sequence[Row], nbytes: int) -> Iterator[list[Row]]:
    """Yield rows in lists of `nbytes` together, the last one smaller; a row may be cut."""
    chunk, left = list[Row](), nbytes
    for row, size in rows:
        offset = 0
        while offset < size:
            taken = min(left, size - offset)
            chunk.append((row + offset, taken))
            offset, left = offset + taken, left - taken
            if not left:
                yield chunk
                chunk, left = [], nbytes
    if chunk:
        yield chunk


def _write(file: int, rest: memoryview, at: int) -> None:
    while rest:
        count = os.pwrite(file, rest, at)
        rest, at = rest[count:], at + count


def _read(file: int, rest: memoryview, at: int) -> None:
    while rest:
        count = os.preadv(file, [rest], at)
        if not count:
            raise OSError(0, "the file has been truncated")
        rest, at = rest[count:], at + count
