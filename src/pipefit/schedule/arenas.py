"""Arenas: memory that devices with room to spare, and hosts, reserve for tensors of other devices, for a whole run.

A borrower takes a slot of the arena when an OFFLOAD starts, and returns it when the RELOAD is joined. So the number of
slots that it uses at once depends on its program alone. The lender reserves that many slots of each size before the
first step, and its peak does not depend on the speed of any device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from pipefit.actions import COPIES, Action, Kind
from pipefit.cost.storages import StageStorages
from pipefit.places import Member, Place
from pipefit.plans import Plan
from pipefit.program import Program


class Arena(NamedTuple):
    """Memory of `lender` for device `borrower`: `slots` pieces of `slot_bytes` each."""

    lender: Member
    borrower: int
    slots: int
    slot_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes


def arenas(
    devices: Sequence[Sequence[Action]], moved_bytes: Callable[[Action], int], hosts: Sequence[int]
) -> tuple[Arena, ...]:
    """The arenas that every member of the cluster lends to each device.

    Args:
        devices: the actions of every device; only OFFLOADs and RELOADs matter.
        moved_bytes: how many bytes an OFFLOAD or RELOAD moves.
        hosts: the host of every device.
    """
    found: list[Arena] = []
    slots_of = cache(slots)
    for borrower, actions in enumerate(devices):
        in_use, most = Counter[tuple[Member, int]](), Counter[tuple[Member, int]]()  # by lender and slot size
        for action in actions:
            if action.kind not in COPIES or action.place is None or action.wait != (action.kind is Kind.RELOAD):
                continue
            for slot in slots_of(action.place, moved_bytes(action), hosts[borrower]):
                in_use[slot] += 1 if action.kind is Kind.OFFLOAD else -1
                most[slot] = max(most[slot], in_use[slot])
        used = sorted(slot for slot in most if slot[1] and most[slot])
        found += [Arena(lender, borrower, most[lender, nbytes], nbytes) for lender, nbytes in used]
    return tuple(found)


def slots(place: Place, nbytes: int, host: int) -> list[tuple[Member, int]]:
    """The slots, as lender and size, that an OFFLOAD of `nbytes` takes from a device on `host`."""
    return [
        (member if member.number is not None else Member(member.kind, host), share)
        for member, share in place.split(nbytes)
    ]


def arenas_of(plan: Plan, program: Program) -> tuple[Arena, ...]:
    """The arenas that `program` uses, which carries out `plan`."""
    storages = [StageStorages.of(plan, stage) for stage in range(len(plan.stages))]
    hosts = [device.host for device in plan.cluster.devices]
    return arenas(program.actions, moved_bytes(program, storages), hosts)


def moved_bytes(program: Program, stages: Sequence[StageStorages]) -> Callable[[Action], int]:
    """The bytes of the storages that an OFFLOAD or RELOAD moves, by action; what has been computed is kept."""
    known: dict[object, int] = {}

    def nbytes(action: Action) -> int:
        key = action.stage, action.subject
        if key not in known:
            known[key] = sum(map(stages[action.stage].nbytes, program.moved(action)))
        return known[key]

    return nbytes


def lent_bytes(lent: Sequence[Arena], lender: Member) -> int:
    """What a member of the cluster lends in all."""
    return sum(arena.nbytes for arena in lent if arena.lender == lender)
