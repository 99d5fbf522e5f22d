"""The memory of arenas on emulated devices and CPU workers: plain, shared with another worker, or on a disk.

What workers share are files without a name in memory, so that nothing is left when all are gone, however they end.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pipefit.cluster import Cluster
from pipefit.errors import OutOfMemory, UsageError
from pipefit.places import MemberKind
from pipefit.runtime.copying import Slot, in_a_row
from pipefit.runtime.disk import Disks, plain_buffers
from pipefit.schedule.arenas import Arena
from pipefit.units import format_bytes


class Memory(Protocol):
    """Makes the memory of arenas, and lends it to other workers."""

    def own(self, arena: Arena) -> list[Slot]:
        """The slots of an arena that only this process uses."""

    def lend(self, arena: Arena) -> tuple[Any, Callable[[], None]]:
        """Make memory for a borrower: what to tell its worker, and what to call when that has mapped it."""

    def borrow(self, arena: Arena, told: Any) -> list[Slot]:
        """The slots of an arena of which another worker, or this one, has told."""


class HostMemory:
    """Memory of the host and of its disk; `arenas` are all of the run."""

    def __init__(self, cluster: Cluster, arenas: Sequence[Arena]) -> None:
        self._disks = Disks(cluster, arenas, lambda borrower, nbytes: plain_buffers(nbytes))

    def own(self, arena: Arena) -> list[Slot]:
        if arena.lender.kind is MemberKind.DISK:
            return self._disks.slots(arena)
        return _in(mmap.mmap(-1, arena.nbytes), arena)

    def lend(self, arena: Arena) -> tuple[tuple[str, str], Callable[[], None]]:
        file = _nameless(arena)
        return (_machine(), f"/proc/{os.getpid()}/fd/{file}"), lambda: os.close(file)

    def borrow(self, arena: Arena, told: tuple[str, str]) -> list[Slot]:
        return _in(_mapped(arena, *told), arena)


def _in(memory: mmap.mmap, arena: Arena) -> list[Slot]:
    """The slots of an arena that is this memory."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return in_a_row(arena.slot_bytes, arena.slots, start, memory)


def _nameless(arena: Arena) -> int:
    """A file in memory for an arena, with all of its pages.

    Raises:
        OutOfMemory: the machine has no memory for it.
    """
    if not hasattr(os, "memfd_create"):
        raise UsageError("devices lend memory to other workers on Linux only: move tensors to the host instead")
    file = os.memfd_create("pipefit-arena")
    try:
        os.posix_fallocate(file, 0, arena.nbytes)
    except OSError as error:
        os.close(file)
        raise OutOfMemory(
            f"{arena.lender} cannot lend {format_bytes(arena.nbytes)} to device {arena.borrower} ({error.strerror}): "
            "move fewer tensors there"
        ) from error
    return file


def _machine() -> str:
    """What only processes of one machine and container have in common, which know each other by their numbers."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def _mapped(arena: Arena, machine: str, path: str) -> mmap.mmap:
    """The memory of a file that the arena's lender has made on its machine.

    Raises:
        UsageError: that is another machine, where a process of the same number has other files; or there is none.
    """
    if machine != _machine():
        raise _unreached(arena, "it is on another machine")
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), arena.nbytes)
    except OSError as error:
        raise _unreached(arena, str(error.strerror)) from error


def _unreached(arena: Arena, why: str) -> UsageError:
    return UsageError(
        f"device {arena.borrower} cannot use what {arena.lender} lends ({why}): their workers have to run on one "
        "machine, as one user"
    )
