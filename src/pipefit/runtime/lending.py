"""Memory that a device borrows for what it moves away: slots in arenas of its host and of other devices.

All arenas of a run follow from its program (`pipefit.schedule.arenas`) and exist before the first step. They are plain
memory, outside of every device's allocator. The arenas of a host are memory of the worker that uses them. Those of a
device with a worker are made by that worker, for others to map: files without a name in memory, so that nothing is left
when all are gone, however they end. A device without a worker lends through its borrower.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from pipefit.errors import OutOfMemory, UsageError
from pipefit.places import Member, MemberKind
from pipefit.plans import Plan
from pipefit.program import Program
from pipefit.runtime.copying import AtOnce, Beside, Copier, NoCopier, Slot
from pipefit.runtime.host import free_bytes
from pipefit.schedule.arenas import Arena, arenas_of, check_room, lent_bytes
from pipefit.trace import CATEGORIES, Category, DeviceTrace, MemorySample
from pipefit.units import format_bytes


class Borrowed:
    """The slots that one device may use, by lender and size. Each is free or in use."""

    def __init__(self, slots: Iterable[tuple[Member, Slot]] = ()) -> None:
        self._all: dict[tuple[Member, int], list[Slot]] = defaultdict(list)
        for lender, slot in slots:
            self._all[lender, slot.nbytes].append(slot)
        self.free_all()

    def take(self, lender: Member, nbytes: int) -> Slot:
        """A slot that is free."""
        if not nbytes:
            return Slot(0)
        free = self._free.get((lender, nbytes))
        assert free, f"the arena of {lender} has no slot of {nbytes} bytes left: arenas are counted by the program"
        return free.pop()

    def give_back(self, lender: Member, slot: Slot) -> None:
        """The slot is free again."""
        if slot.nbytes:
            self._free[lender, slot.nbytes].append(slot)

    def free_all(self) -> None:
        """No slot is in use, as after a failed step."""
        self._free = {key: list(slots) for key, slots in self._all.items()}

    @property
    def in_use(self) -> int:
        """How many slots are in use."""
        return sum(map(len, self._all.values())) - sum(map(len, self._free.values()))


@dataclass(frozen=True, slots=True)
class Lending:
    """Who lends what to whom in a run, and what copies: nothing in a dry run, whose slots have no memory.

    `shared` is the memory of arenas that this worker shares with another one.
    """

    arenas: tuple[Arena, ...] = ()
    copier: Callable[[], Copier] = NoCopier
    shared: Mapping[Arena, mmap.mmap] = field(default_factory=dict)

    @staticmethod
    def dry(plan: Plan, program: Program) -> Lending:
        """The arenas of a dry run: counted, but without memory."""
        return Lending(_checked(plan, program))

    @staticmethod
    def within(plan: Plan, program: Program) -> Lending:
        """The arenas of a run in one process. A device that has it to itself copies beside computing."""
        return Lending(_checked_here(plan, program), Beside if len(plan.ranks) == 1 else AtOnce)

    @staticmethod
    def between(plan: Plan, program: Program, device: int) -> Lending:
        """The arenas of a run of one worker for each device, of which this one is for `device`. All must call it."""
        arenas, used = _checked_here(plan, program), {stage.device for stage in plan.stages}
        shared = [arena for arena in arenas if arena.lender.kind is MemberKind.DEVICE and arena.lender.number in used]
        if not shared:
            return Lending(arenas, Beside)
        files = {arena: _nameless(arena) for arena in shared if arena.lender.number == device}
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (os.getpid(), files))
        found = {arena: f"/proc/{process}/fd/{file}" for process, of_one in told for arena, file in of_one.items()}
        mine = [arena for arena in shared if device in (arena.borrower, arena.lender.number)]
        mapped = {arena: _mapped(arena, found[arena]) for arena in mine}
        dist.barrier()
        for file in files.values():
            os.close(file)
        return Lending(arenas, Beside, mapped)

    def lent_by(self, device: int) -> int:
        """Bytes that a device lends in all."""
        return lent_bytes(self.arenas, Member.device(device))

    def borrowed_by(self, device: int) -> Borrowed:
        """The slots that a device may use."""
        return Borrowed((a.lender, slot) for a in self.arenas if a.borrower == device for slot in self._slots(a))

    def _slots(self, arena: Arena) -> list[Slot]:
        if self.copier is NoCopier:
            return [Slot(arena.slot_bytes) for _ in range(arena.slots)]
        memory = self.shared.get(arena) or mmap.mmap(-1, arena.nbytes)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        return [Slot(arena.slot_bytes, start + n * arena.slot_bytes, memory) for n in range(arena.slots)]


def check_lending(plan: Plan, program: Program) -> None:
    """Check before a launch that what is moved away has room where it goes.

    Raises:
        OutOfMemory: a host, or a device that only lends, has no room for it; says by how much.
        UsageError: it goes to a disk or to a device of another host, or the plan is for GPUs.
    """
    _checked_here(plan, program)


def lending_trace(plan: Plan, device: int, arenas: Sequence[Arena]) -> DeviceTrace:
    """The trace of a device that no worker here runs: what it lends, if it has no stage at all."""
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
    """The arenas of a program, if they can be made and have room."""
    arenas, devices = arenas_of(plan, program), plan.cluster.devices
    for arena in arenas:
        kind, number = arena.lender
        if kind is MemberKind.DISK:
            raise UsageError(f"device {arena.borrower} moves tensors to {arena.lender}: only simulated yet; use a host")
        host = devices[number or 0].host if kind is MemberKind.DEVICE else number
        if host != devices[arena.borrower].host:
            raise UsageError(
                f"device {arena.borrower} moves tensors to {arena.lender}, which is on another host: only simulated "
                "yet; use members of the same host"
            )
    check_room(plan, arenas)
    return arenas


def _checked_here(plan: Plan, program: Program) -> tuple[Arena, ...]:
    """The same, if this machine can make them."""
    arenas = _checked(plan, program)
    if arenas and plan.cluster.backend == "cuda":
        raise UsageError(
            "the plan moves saved tensors away, which GPUs cannot do yet: certify it, and train on emulated devices"
        )
    needed = sum(arena.nbytes for arena in arenas if arena.lender.kind is MemberKind.HOST)
    if needed and needed > (free := free_bytes()):
        raise OutOfMemory(
            f"the moved tensors need {format_bytes(needed)} of this machine's memory, which has {format_bytes(free)} "
            "to spare: move fewer"
        )
    return arenas


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


def _mapped(arena: Arena, path: str) -> mmap.mmap:
    """The memory of a file that the arena's lender has made.

    Raises:
        UsageError: there is no such file here: the lender runs on another machine.
    """
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), arena.nbytes)
    except OSError as error:
        raise UsageError(
            f"device {arena.borrower} cannot use what {arena.lender} lends ({error.strerror}): their workers have to "
            "run on one machine, as one user"
        ) from error
