"""Memory that a device borrows for what it moves away: slots in arenas of its host, of a disk, and of other devices.

All arenas of a run follow from its program (`pipefit.schedule.arenas`) and exist before the first step, outside of what
torch's allocator keeps for the device. Those of a host or a disk belong to the worker that uses them. Those of a device
with a worker are made by that worker, for others to map. A device without a worker lends through its borrower.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from pipefit.errors import OutOfMemory, UsageError
from pipefit.places import Member, MemberKind
from pipefit.plans import Plan
from pipefit.program import Program
from pipefit.runtime.copying import AtOnce, Beside, Copier, NoCopier, Slot
from pipefit.runtime.cuda_copying import OnStreams
from pipefit.runtime.cuda_driver import CudaDriver
from pipefit.runtime.cuda_memory import CudaMemory
from pipefit.runtime.disk import check_folder, folder_of
from pipefit.runtime.hardware import Hardware
from pipefit.runtime.host import free_bytes
from pipefit.runtime.memory import HostMemory, Memory
from pipefit.schedule.arenas import Arena, arenas_of, arenas_of_copies, lent_bytes
from pipefit.schedule.room import check_room, room_needed
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

    def keep(self, lender: Member, nbytes: int) -> Slot:
        """A slot that is in use for the whole run, which `free_all` leaves alone."""
        slot = self.take(lender, nbytes)
        if nbytes:
            self._all[lender, nbytes].remove(slot)
        return slot

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

    `mapped` are the slots of arenas that this worker shares with another one.
    """

    arenas: tuple[Arena, ...] = ()
    copier: Callable[[torch.device], Copier] = lambda device: NoCopier()
    memory: Memory | None = None
    mapped: Mapping[Arena, list[Slot]] = field(default_factory=dict)

    @staticmethod
    def dry(plan: Plan, program: Program) -> Lending:
        """The arenas of a dry run: counted, but without memory."""
        return Lending(_checked(plan, program))

    @staticmethod
    def within(hardware: Hardware, program: Program) -> Lending:
        """The arenas of a run in one process. A GPU, or a device that has it to itself, copies beside computing."""
        plan = hardware.plan
        arenas = _checked_here(plan, program)
        if plan.cluster.backend == "cuda":
            return _on_gpus(plan, arenas, hardware.gpu)
        memory, alone = HostMemory(plan.cluster, arenas), len(plan.workers) == 1
        return Lending(arenas, lambda device: Beside() if alone else AtOnce(), memory)

    @staticmethod
    def between(hardware: Hardware, program: Program, device: int, here: torch.device) -> Lending:
        """The arenas of a run of one worker for each device, of which this one is for `device` and runs `here`.

        All must call it.
        """
        plan = hardware.plan
        arenas = _checked_here(plan, program)
        if plan.cluster.backend == "cuda":
            lending = _on_gpus(plan, arenas, lambda number: here if number == device else hardware.gpu(number))
        else:
            lending = Lending(arenas, lambda device: Beside(), HostMemory(plan.cluster, arenas))
        return replace(lending, mapped=_exchanged(lending.memory, device, _shared(plan, arenas)))

    @staticmethod
    def at_once(device: torch.device) -> Copier:
        """What copies in no time of any link."""
        return AtOnce()

    def lent_by(self, device: int) -> int:
        """Bytes that a device lends in all."""
        return lent_bytes(self.arenas, Member.device(device))

    def borrowed_by(self, device: int) -> Borrowed:
        """The slots that a device may use."""
        return Borrowed((a.lender, slot) for a in self.arenas if a.borrower == device for slot in self._slots(a))

    def settle(self) -> None:
        """Return when no GPU copies to or from another process's memory any more. All workers must call it.

        Processes on GPUs run ahead of them: a lender that ended would take back memory that is still being read.
        """
        if isinstance(self.memory, CudaMemory) and dist.is_initialized():
            torch.cuda.synchronize()
            dist.barrier()

    def _slots(self, arena: Arena) -> list[Slot]:
        if self.memory is None:
            return [Slot(arena.slot_bytes) for _ in range(arena.slots)]
        return self.mapped.get(arena) or self.memory.own(arena)


def _on_gpus(plan: Plan, arenas: tuple[Arena, ...], device: Callable[[int], torch.device]) -> Lending:
    """The arenas of GPUs, which `device` finds by their numbers; without any, nothing of CUDA is touched."""
    if not arenas:
        return Lending()
    return Lending(arenas, OnStreams.of, CudaMemory(plan.cluster, arenas, device, CudaDriver()))


def _shared(plan: Plan, arenas: Sequence[Arena]) -> list[Arena]:
    """The arenas of devices that have a worker of their own."""
    workers = set(map(Member.device, plan.workers))
    return [arena for arena in arenas if arena.lender in workers]


def _exchanged(memory: Memory | None, device: int, shared: Sequence[Arena]) -> dict[Arena, list[Slot]]:
    """The slots of those arenas that this device lends or borrows. All workers must call it."""
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
    """Check before a launch that what is moved away has room where it goes.

    Raises:
        OutOfMemory: a host, a disk, or a device that only lends, has no room for it; says by how much.
        UsageError: it goes to another host, or to a folder that cannot be used.
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
    arenas, cluster = arenas_of(plan, program), plan.cluster
    for arena in arenas:
        kind, number = arena.lender
        if arena.lender == Member.device(arena.borrower):
            raise UsageError(f"device {arena.borrower} cannot move a tensor to itself: name other members")
        host = cluster.devices[number or 0].host if kind is MemberKind.DEVICE else number
        if host != cluster.devices[arena.borrower].host:
            raise UsageError(
                f"device {arena.borrower} moves tensors to {arena.lender}, which is on another host: only simulated "
                "yet; use members of the same host"
            )
        cluster.tier(arena.borrower, arena.lender)  # refuses what no link reaches
    check_room(plan, arenas)
    return arenas


def _checked_here(plan: Plan, program: Program) -> tuple[Arena, ...]:
    """The arenas of its copies, if this machine can make them, and has room for all that goes there."""
    arenas = _checked(plan, program)
    needed, on_disk = 0, Counter[str]()
    for member, shares in room_needed(plan, arenas).items():
        if member.kind is MemberKind.HOST:
            needed += shares.total()
        elif member.kind is MemberKind.DISK:
            on_disk[folder_of(plan.cluster.hosts[member.number or 0].disk_folder)] += shares.total()
    if needed and needed > (free := free_bytes()):
        raise OutOfMemory(
            f"the moved tensors need {format_bytes(needed)} of this machine's memory, which has {format_bytes(free)} "
            "to spare: move fewer"
        )
    for folder, nbytes in on_disk.items():
        check_folder(folder, nbytes)
    return arenas_of_copies(plan, program)
