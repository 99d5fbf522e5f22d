"""The memory of arenas for GPUs: pinned memory of the host, memory of this process's GPUs, and that of other processes.

Pinned memory is allocated once, in few sizes, because allocating it stops the GPU. What a GPU lends is a tensor of its
worker, so that its allocator counts it; other workers map it by the driver's handles, of which nothing is left however
the processes end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pipefit.cluster import Cluster
from pipefit.errors import OutOfMemory, UsageError, first_line
from pipefit.places import MemberKind
from pipefit.runtime.copying import Slot, in_a_row
from pipefit.runtime.cuda_copying import Queue, StreamCopies
from pipefit.runtime.cuda_driver import Driver
from pipefit.runtime.disk import Buffers, Disks
from pipefit.schedule.arenas import Arena
from pipefit.schedule.room import pinned_sizes
from pipefit.units import format_bytes

Told = tuple[bytes, int]  # a handle of an allocation, and how far into it the arena begins


class CudaMemory:
    """Memory for what the GPUs of this process move; `arenas` are all of the run.

    Args:
        device: where this process reaches a device of the cluster, by its number there.
        stream: makes one of a device, for what passes through buffers before a disk.
    """

    def __init__(
        self,
        cluster: Cluster,
        arenas: Sequence[Arena],
        device: Callable[[int], torch.device],
        driver: Driver,
        stream: Callable[[torch.device], Queue] = torch.cuda.Stream,
    ) -> None:
        self._device, self._driver, self._stream = device, driver, stream
        self._disks = Disks(cluster, arenas, self._buffers)
        self._lent: dict[Arena, Tensor] = {}

    def own(self, arena: Arena) -> list[Slot]:
        if arena.lender.kind is MemberKind.DISK:
            return self._disks.slots(arena)
        if arena.lender.kind is MemberKind.HOST:
            return pinned_slots(arena, _pinned)
        lent = self._allocated(arena)
        self._touched(arena).copy_(lent[:1])  # from here on torch lets the two GPUs reach each other
        return in_a_row(arena.slot_bytes, arena.slots, lent.data_ptr(), lent)

    def lend(self, arena: Arena) -> tuple[Told, Callable[[], None]]:
        lent = self._lent[arena] = self._allocated(arena)
        with _shared(arena):
            return self._driver.export(lent.data_ptr()), lambda: None

    def borrow(self, arena: Arena, told: Told) -> list[Slot]:
        if arena in self._lent:  # a process cannot map what is its own
            return in_a_row(arena.slot_bytes, arena.slots, self._lent[arena].data_ptr(), self._lent[arena])
        handle, offset = told
        self._touched(arena)
        with _shared(arena):
            opened = Opened(self._driver, handle)
        return in_a_row(arena.slot_bytes, arena.slots, opened.start + offset, opened)

    def _buffers(self, borrower: int, nbytes: int) -> Buffers:
        """Pinned buffers before a disk, for one direction of a device."""
        pinned = [_pinned(nbytes).numpy().data for _ in range(2)]
        return Buffers(pinned, StreamCopies(self._stream(self._device(borrower)), self._driver))

    def _touched(self, arena: Arena) -> Tensor:
        """A byte of the GPU that borrows, which has a context of this process from here on: the driver needs it."""
        return torch.empty(1, dtype=torch.uint8, device=self._device(arena.borrower))

    def _allocated(self, arena: Arena) -> Tensor:
        """An arena as memory of the GPU that lends it."""
        with _allocating(arena):
            return torch.empty(arena.nbytes, dtype=torch.uint8, device=self._device(arena.lender.number or 0))


class Opened:
    """An allocation of another process, mapped as long as anything refers to this."""

    def __init__(self, driver: Driver, handle: bytes) -> None:
        self.start = driver.open(handle)
        weakref.finalize(self, driver.close, self.start).atexit = False  # the end of a process unmaps by itself


def pinned_slots(arena: Arena, pinned: Callable[[int], Tensor]) -> list[Slot]:
    """The slots of an arena in pieces of pinned memory whose sizes are powers of two."""
    slots: list[Slot] = []
    for nbytes in pinned_sizes(arena.slot_bytes, arena.slots):
        with _allocating(arena):
            piece = pinned(nbytes)
        count = min(nbytes // arena.slot_bytes, arena.slots - len(slots))
        slots += in_a_row(arena.slot_bytes, count, piece.data_ptr(), piece)
    return slots


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


@contextmanager
def _allocating(arena: Arena) -> Iterator[None]:
    """Whoever cannot give the memory of an arena is named."""
    try:
        yield
    except RuntimeError as error:  # torch's, of GPUs and of pinned memory
        raise OutOfMemory(
            f"{arena.lender} cannot give {format_bytes(arena.nbytes)} to device {arena.borrower} "
            f"({first_line(error)}): move fewer tensors there"
        ) from error


@contextmanager
def _shared(arena: Arena) -> Iterator[None]:
    """Errors of the driver are those of an arena that two processes cannot share."""
    try:
        yield
    except RuntimeError as error:
        raise UsageError(
            f"device {arena.borrower} cannot use what {arena.lender} lends ({error}): the two GPUs have to reach each "
            "other, their processes to share one IPC namespace, and PYTORCH_CUDA_ALLOC_CONF not to ask for "
            "expandable_segments; otherwise move tensors to the host"
        ) from error
