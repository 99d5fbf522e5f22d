"""Memory that a device borrows for offloaded tensors.

It consists of slots in arenas of the device's host, of a disk, and of other devices. All arenas of a run
follow from its program (`memory.arenas`) and exist before the first step, outside of the memory that torch's
allocator keeps for the device. Arenas of a host or a disk belong to the worker that uses them. Arenas of a
device with a worker are made by that worker, and other workers map them. A device without a worker lends
through its borrower.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from pipefit.errors import OutOfMemory, UsageError, first_line
from pipefit.memory import (
    Arena,
    arenas_of,
    arenas_of_copies,
    check_room,
    lent_bytes,
    pinned_sizes,
    room_needed,
)
from pipefit.runtime.hardware import Hardware, free_bytes
from pipefit.runtime.offload.copying import Beside, Copier, Slot, UnpacedCopies, in_a_row
from pipefit.runtime.offload.cuda import CudaDriver, OnStreams, StreamCopies
from pipefit.runtime.offload.disk import Buffers, Disks, check_folder, folder_of, plain_buffers
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import Member, MemberKind
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program
from pipefit.schema.trace import CATEGORIES, Category, DeviceTrace, MemorySample
from pipefit.units import format_bytes

# ---- Arenas of emulated devices and CPU workers
# Their memory is plain, shared with another worker, or on a disk. Shared memory is an unnamed file in memory,
# so nothing is left when all processes have ended.


class HostMemory:
    """Memory of the host and of its disk; `arenas` are all arenas of the run."""

    def __init__(self, cluster: Cluster, arenas: Sequence[Arena]) -> None:
        self._disks = Disks(cluster, arenas, lambda borrower, nbytes: plain_buffers(nbytes))

    def own(self, arena: Arena) -> list[Slot]:
        """Return the slots of an arena that only this process uses."""
        if arena.lender.kind is MemberKind.DISK:
            return self._disks.slots(arena)
        return _in(mmap.mmap(-1, arena.nbytes), arena)

    def lend(self, arena: Arena) -> tuple[tuple[str, str], Callable[[], None]]:
        """Make memory for a borrower.

        Return its description for the borrower's worker, and a callback after the mapping.
        """
        file = _nameless(arena)
        return (_machine(), f"/proc/{os.getpid()}/fd/{file}"), lambda: os.close(file)

    def borrow(self, arena: Arena, told: tuple[str, str]) -> list[Slot]:
        """Return the slots of an arena from a worker's description of it."""
        return _in(_mapped(arena, *told), arena)


def _in(memory: mmap.mmap, arena: Arena) -> list[Slot]:
    """Return the slots of an arena in this memory."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return in_a_row(arena.slot_bytes, arena.slots, start, memory)


def _nameless(arena: Arena) -> int:
    """Return an unnamed file in memory for an arena, with all of its pages allocated.

    Raises:
        OutOfMemory: the machine lacks the memory.
    """
    if not hasattr(os, "memfd_create"):
        raise UsageError("devices lend memory to other workers on Linux only: offload to the host instead")
    file = os.memfd_create("pipefit-arena")
    try:
        os.posix_fallocate(file, 0, arena.nbytes)
    except OSError as error:
        os.close(file)
        raise OutOfMemory(
            f"{arena.lender} cannot lend {format_bytes(arena.nbytes)} to device {arena.borrower} "
            f"({error.strerror}): offload less there"
        ) from error
    return file


def _machine() -> str:
    """Return an identifier of the machine's boot and PID namespace.

    Processes with the same identifier can use each other's PIDs.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def _mapped(arena: Arena, machine: str, path: str) -> mmap.mmap:
    """Map the file that the arena's lender has made on its machine.

    Raises:
        UsageError: it is another machine, where the same PID means another process; or there is no such file.
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
        f"device {arena.borrower} cannot use the memory of {arena.lender} ({why}): run their workers on one "
        "machine, as one user"
    )


# ---- Arenas of GPUs
# Their memory is pinned memory of the host, memory of this process's GPUs, or that of other processes. Pinned
# memory is allocated once, in few sizes, because its allocation stops the GPU. Memory that a GPU lends is a
# tensor of its worker, so that the worker's allocator counts it; other workers map it by the driver's
# handles, which vanish with the processes.

Told = tuple[bytes, int]  # a handle of an allocation, and the arena's offset in it


class CudaMemory:
    """Memory for tensors that the GPUs of this process offload; `arenas` are all arenas of the run.

    Args:
        device: returns this process's torch device for a device number of the cluster.
        stream: makes a stream of a device, for copies through the buffers before a disk.
    """

    def __init__(
        self,
        cluster: Cluster,
        arenas: Sequence[Arena],
        device: Callable[[int], torch.device],
        driver: CudaDriver,
        stream: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream,
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
        self._touched(arena).copy_(lent[:1])  # from here on torch lets the two GPUs access each other
        return in_a_row(arena.slot_bytes, arena.slots, lent.data_ptr(), lent)

    def lend(self, arena: Arena) -> tuple[Told, Callable[[], None]]:
        lent = self._lent[arena] = self._allocated(arena)
        with _shared(arena):
            return self._driver.export(lent.data_ptr()), lambda: None

    def borrow(self, arena: Arena, told: Told) -> list[Slot]:
        if arena in self._lent:  # a process cannot map its own memory
            return in_a_row(arena.slot_bytes, arena.slots, self._lent[arena].data_ptr(), self._lent[arena])
        handle, offset = told
        self._touched(arena)
        with _shared(arena):
            opened = Opened(self._driver, handle)
        return in_a_row(arena.slot_bytes, arena.slots, opened.start + offset, opened)

    def _buffers(self, borrower: int, nbytes: int) -> Buffers:
        """Return pinned buffers before a disk, for one direction of a device."""
        pinned = [_pinned(nbytes).numpy().data for _ in range(2)]
        return Buffers(pinned, StreamCopies(self._stream(self._device(borrower)), self._driver))

    def _touched(self, arena: Arena) -> Tensor:
        """Allocate a byte on the borrowing GPU, which creates this process's context there.

        The driver requires the context.
        """
        return torch.empty(1, dtype=torch.uint8, device=self._device(arena.borrower))

    def _allocated(self, arena: Arena) -> Tensor:
        """Allocate an arena on the GPU that lends it."""
        with _allocating(arena):
            return torch.empty(arena.nbytes, dtype=torch.uint8, device=self._device(arena.lender.number or 0))


class Opened:
    """An allocation of another process, mapped for the life of this object."""

    def __init__(self, driver: CudaDriver, handle: bytes) -> None:
        self.start = driver.open(handle)
        weakref.finalize(self, driver.close, self.start).atexit = False  # the end of a process unmaps it


def pinned_slots(arena: Arena, pinned: Callable[[int], Tensor]) -> list[Slot]:
    """Return the slots of an arena in pieces of pinned memory whose sizes are powers of two."""
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
    """Report errors of allocations in the context with the lender and the arena."""
    try:
        yield
    except RuntimeError as error:  # raised by torch for GPUs and pinned memory
        raise OutOfMemory(
            f"{arena.lender} cannot lend {format_bytes(arena.nbytes)} to device {arena.borrower} "
            f"({first_line(error)}): offload less there"
        ) from error


@contextmanager
def _shared(arena: Arena) -> Iterator[None]:
    """Report errors of the driver in the context as an arena that two processes cannot share."""
    try:
        yield
    except RuntimeError as error:
        raise UsageError(
            f"device {arena.borrower} cannot use the memory of {arena.lender} ({error}): this needs peer "
            "access between the two GPUs, one IPC namespace for their processes, and "
            "PYTORCH_CUDA_ALLOC_CONF without expandable_segments. Otherwise offload to the host"
        ) from error


# ---- Slots and lending


class Borrowed:
    """The slots that one device may use, by lender and size. Each is free or in use.

    With `makes_slots`, a slot that does not exist is made.
    """

    def __init__(self, slots: Iterable[tuple[Member, Slot]] = (), *, makes_slots: bool = False) -> None:
        self._makes_slots = makes_slots
        self._all: dict[tuple[Member, int], list[Slot]] = defaultdict(list)
        for lender, slot in slots:
            self._all[lender, slot.nbytes].append(slot)
        self.free_all()

    def take(self, lender: Member, nbytes: int) -> Slot:
        """Take a free slot."""
        if not nbytes:
            return Slot(0)
        free = self._free.get((lender, nbytes))
        if self._makes_slots and not free:
            self._all[lender, nbytes].append(made := Slot(nbytes))
            return made
        assert free, (
            f"the arena of {lender} lacks a free slot of {nbytes} bytes: arenas are sized by the program"
        )
        return free.pop()

    def keep(self, lender: Member, nbytes: int) -> Slot:
        """Take a slot for the whole run, which `free_all` does not free."""
        slot = self.take(lender, nbytes)
        if nbytes:
            self._all[lender, nbytes].remove(slot)
        return slot

    def give_back(self, lender: Member, slot: Slot) -> None:
        """Free the slot."""
        if slot.nbytes:
            self._free[lender, slot.nbytes].append(slot)

    def free_all(self) -> None:
        """Free all slots, as after a failed step."""
        self._free = {key: list(slots) for key, slots in self._all.items()}

    @property
    def in_use(self) -> int:
        """Number of slots in use."""
        return sum(map(len, self._all.values())) - sum(map(len, self._free.values()))


@dataclass(frozen=True, slots=True)
class Lending:
    """Arenas between lenders and borrowers of a run, and the copiers.

    A dry run copies nothing, and with `makes_slots` has as many slots as its devices take: they may stand for
    others. `mapped` are the slots of arenas that this worker shares with another one.
    """

    arenas: tuple[Arena, ...] = ()
    copier: Callable[[torch.device], Copier] = lambda device: Copier()
    memory: HostMemory | CudaMemory | None = None
    mapped: Mapping[Arena, list[Slot]] = field(default_factory=dict)
    makes_slots: bool = False

    @staticmethod
    def dry(plan: Plan, program: Program) -> Lending:
        """Return the arenas of a dry run: counted, but without memory."""
        return Lending(_checked(plan, program))

    @staticmethod
    def within(hardware: Hardware, program: Program) -> Lending:
        """Return the arenas of a run in one process.

        A GPU, or a single device, copies in parallel with computing.
        """
        plan = hardware.plan
        arenas = _checked_here(plan, program)
        if plan.cluster.backend == "cuda":
            return _on_gpus(plan, arenas, hardware.gpu)
        memory, alone = HostMemory(plan.cluster, arenas), len(plan.workers) == 1
        return Lending(arenas, lambda device: Beside() if alone else UnpacedCopies(), memory)

    @staticmethod
    def between(hardware: Hardware, program: Program, device: int, here: torch.device) -> Lending:
        """Return the arenas of a run with one worker per device; this one is for `device` and runs on `here`.

        All workers must call it.
        """
        plan = hardware.plan
        arenas = _checked_here(plan, program)
        if plan.cluster.backend == "cuda":
            lending = _on_gpus(
                plan, arenas, lambda number: here if number == device else hardware.gpu(number)
            )
        else:
            lending = Lending(arenas, lambda device: Beside(), HostMemory(plan.cluster, arenas))
        return replace(lending, mapped=_exchanged(lending.memory, device, _lending_shared(plan, arenas)))

    @staticmethod
    def at_once(device: torch.device) -> Copier:
        """Return the copier that copies immediately, without pacing."""
        return UnpacedCopies()

    def lent_by(self, device: int) -> int:
        """Return the bytes that a device lends in total."""
        return lent_bytes(self.arenas, Member.device(device))

    def borrowed_by(self, device: int) -> Borrowed:
        """Return the slots that a device may use."""
        slots = ((a.lender, slot) for a in self.arenas if a.borrower == device for slot in self._slots(a))
        return Borrowed(slots, makes_slots=self.makes_slots)

    def settle(self) -> None:
        """Wait until no GPU copies to or from another process's memory any more. All workers must call it.

        Hosts run ahead of their GPUs: a lender that ended would free memory that is still being read.
        """
        if isinstance(self.memory, CudaMemory) and dist.is_initialized():
            torch.cuda.synchronize()
            dist.barrier()

    def _slots(self, arena: Arena) -> list[Slot]:
        if self.memory is None:
            return [Slot(arena.slot_bytes) for _ in range(arena.slots)]
        return self.mapped.get(arena) or self.memory.own(arena)


def _on_gpus(plan: Plan, arenas: tuple[Arena, ...], device: Callable[[int], torch.device]) -> Lending:
    """Return the arenas of GPUs, which `device` finds by their numbers; without arenas, CUDA is not
    touched.
    """
    if not arenas:
        return Lending()
    return Lending(arenas, OnStreams.of, CudaMemory(plan.cluster, arenas, device, CudaDriver()))


def _lending_shared(plan: Plan, arenas: Sequence[Arena]) -> list[Arena]:
    """Return the arenas of devices that have a worker."""
    workers = set(map(Member.device, plan.workers))
    return [arena for arena in arenas if arena.lender in workers]


def _exchanged(
    memory: HostMemory | CudaMemory | None, device: int, shared: Sequence[Arena]
) -> dict[Arena, list[Slot]]:
    """Return the slots of the `shared` arenas that this device lends or borrows. All workers must call it."""
    if memory is None or not shared:
        return {}
    lent = {arena: memory.lend(arena) for arena in shared if arena.lender == Member.device(device)}
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, {arena: word for arena, (word, _) in lent.items()})
    words = {arena: word for of_one in told for arena, word in of_one.items()}
    mine = [arena for arena in shared if arena.borrower == device or arena in lent]
    mapped = {arena: memory.borrow(arena, words[arena]) for arena in mine}
    dist.barrier()
    for _, all_have_mapped in lent.values():
        all_have_mapped()
    return mapped


def check_lending(plan: Plan, program: Program) -> None:
    """Check before a launch that there is room for all offloaded tensors.

    Raises:
        OutOfMemory: a host, a disk, or a device that only lends, has too little room; says by how much.
        UsageError: the target is on another host, or a folder that cannot be used.
    """
    _checked_here(plan, program)


def lending_trace(plan: Plan, device: int, arenas: Sequence[Arena]) -> DeviceTrace:
    """Return the trace of a device without a worker here: its lent memory, if it is without stages."""
    used = any(device in stage.devices for stage in plan.stages)
    nbytes = 0 if used else lent_bytes(arenas, Member.device(device))
    levels: Any = tuple(nbytes * (category is Category.LENT) for category in CATEGORIES)
    sample = MemorySample(step=0, action="lends", seconds=0.0, bytes=levels)
    return DeviceTrace(
        device=device,
        budget_bytes=plan.cluster.devices[device].memory_bytes,
        events=(),
        memory=(sample,) if nbytes else (),
    )


def _checked(plan: Plan, program: Program) -> tuple[Arena, ...]:
    """Return the arenas of a program, after checking that they are possible and have room."""
    arenas, cluster = arenas_of(plan, program), plan.cluster
    for arena in arenas:
        kind, number = arena.lender
        if arena.lender == Member.device(arena.borrower):
            raise UsageError(f"device {arena.borrower} cannot offload to itself: give another place")
        host = cluster.devices[number or 0].host if kind is MemberKind.DEVICE else number
        if host != cluster.devices[arena.borrower].host:
            raise UsageError(
                f"device {arena.borrower} offloads to {arena.lender} on another host, which only the "
                "simulator supports: use a place on the same host"
            )
        cluster.tier(arena.borrower, arena.lender)  # raises an error if no link reaches the lender
    check_room(plan, arenas)
    return arenas


def _checked_here(plan: Plan, program: Program) -> tuple[Arena, ...]:
    """Return the arenas of the program's copies, after checking that this machine has room for them."""
    arenas = _checked(plan, program)
    needed, on_disk = 0, Counter[str]()
    for member, shares in room_needed(plan, arenas).items():
        if member.kind is MemberKind.HOST:
            needed += shares.total()
        elif member.kind is MemberKind.DISK:
            on_disk[folder_of(plan.cluster.hosts[member.number or 0].disk_folder)] += shares.total()
    if needed and needed > (free := free_bytes()):
        raise OutOfMemory(
            f"the offloaded tensors need {format_bytes(needed)} of this machine's memory, which has "
            f"{format_bytes(free)} free: offload less"
        )
    for folder, nbytes in on_disk.items():
        check_folder(folder, nbytes)
    return arenas_of_copies(plan, program)
