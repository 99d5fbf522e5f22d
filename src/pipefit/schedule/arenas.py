"""Arenas: memory that devices with room to spare, and hosts, reserve for tensors of other devices, for a whole run.

A borrower takes a slot of the arena when an OFFLOAD starts, and returns it when the RELOAD is joined. So the number of
slots that it uses at once depends on its program alone. The lender reserves that many slots of each size before the
first step, and its peak does not depend on the speed of any device.

State that is moved has slots of its own for the whole run, and so has what an update at a place keeps and needs there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

from pipefit.actions import COPIES, Action, Kind
from pipefit.cost.rest import StageRest
from pipefit.cost.shares import share_of
from pipefit.cost.storages import StageStorages
from pipefit.places import Member, Place
from pipefit.plans import Plan
from pipefit.program import Program, UncheckedProgram


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
    devices: Sequence[Sequence[Action]], moved: Sequence[Callable[[Action], int]], hosts: Sequence[int]
) -> tuple[Arena, ...]:
    """The arenas that every member of the cluster lends to each device.

    Args:
        devices: the actions of every device; only OFFLOADs, RELOADs and updates at a place matter.
        moved: of every device, how many bytes an OFFLOAD or RELOAD moves, and an update keeps and needs at its place.
        hosts: the host of every device.
    """
    return tuple(chain(*(arenas_for(n, actions, moved[n], hosts[n]) for n, actions in enumerate(devices))))


def arenas_for(
    borrower: int, actions: Sequence[Action], moved_bytes: Callable[[Action], int], host: int
) -> Iterator[Arena]:
    """The arenas for one device on `host`, with these actions."""
    slots_of = cache(slots)
    in_use, most = Counter[tuple[Member, int]](), Counter[tuple[Member, int]]()  # by lender and slot size
    lasting = Counter[tuple[Member, int]]()
    for action in {_key(action): action for action in actions if action.place and _lasts(action)}.values():
        assert action.place is not None
        lasting.update(slots_of(action.place, moved_bytes(action), host))
    for action in actions:
        if action.microbatch is None:
            continue
        if action.kind not in COPIES or action.place is None or action.wait != (action.kind is Kind.RELOAD):
            continue
        for slot in slots_of(action.place, moved_bytes(action), host):
            in_use[slot] += 1 if action.kind is Kind.OFFLOAD else -1
            most[slot] = max(most[slot], in_use[slot])
    most += lasting
    for lender, nbytes in sorted(slot for slot in most if slot[1] and most[slot]):
        yield Arena(lender, borrower, most[lender, nbytes], nbytes)


def _lasts(action: Action) -> bool:
    """Whether the slots of an action are its own for the whole run."""
    return action.moves_state or action.kind is Kind.STEP


def _key(action: Action) -> tuple[object, ...]:
    """Equal for actions with the same slots."""
    return action.stage, action.layers, action.subject, action.place


def slots(place: Place, nbytes: int, host: int) -> list[tuple[Member, int]]:
    """The slots, as lender and size, that an OFFLOAD of `nbytes` takes from a device on `host`."""
    return [
        (member if member.number is not None else Member(member.kind, host), share)
        for member, share in place.split(nbytes)
    ]


def arenas_of(plan: Plan, program: Program) -> tuple[Arena, ...]:
    """The arenas that `program` uses, which carries out `plan`."""
    return _arenas(plan, program, program.actions)


def arenas_of_copies(plan: Plan, program: Program) -> tuple[Arena, ...]:
    """The same without what updates at a place need there, which is no slot: their optimizer allocates it."""
    return _arenas(plan, program, [[a for a in actions if a.kind is not Kind.STEP] for actions in program.actions])


def _arenas(plan: Plan, program: Program, devices: Sequence[Sequence[Action]]) -> tuple[Arena, ...]:
    hosts = [device.host for device in plan.cluster.devices]
    return arenas(devices, moved_by_devices(plan, program), hosts)


def moved_by_devices(plan: Plan, program: Program) -> list[Callable[[Action], int]]:
    """For every device, the `moved_bytes` of its actions."""
    storages = [StageStorages.of(plan, stage) for stage in range(len(plan.stages))]

    def rests(device: int) -> dict[int, StageRest]:
        """What the device has of its stages."""
        shares = {stage: share_of(plan, stage, device) for stage in plan.stages_of(device)}
        return {n: StageRest(storages[n], program.microbatches, share=share) for n, share in shares.items()}

    return [moved_bytes(program, rests(device)) for device in range(len(program.actions))]


def moved_bytes(program: UncheckedProgram, rests: Mapping[int, StageRest]) -> Callable[[Action], int]:
    """The bytes of the storages that an OFFLOAD or RELOAD of a device moves, by action; what has been computed is kept.
    The device has stages with these `rests`.

    Of an update at a place it is what that place needs for it, beside gradients and parameters, which are moved.
    """
    known: dict[object, int] = {}

    def of(action: Action) -> int:
        rest = rests[action.stage]
        storages = rest.storages
        if action.kind is Kind.STEP:
            return rest.update_room_bytes(*(action.layers or (storages.start, storages.stop)))
        subjects = program.moved(action)
        if action.moves_state:
            return sum(rest.state_bytes_of(subject) for subject in subjects)
        return sum(map(storages.nbytes, subjects))

    def nbytes(action: Action) -> int:
        key = action.stage, action.subject, action.layers, action.microbatch is None
        if key not in known:
            known[key] = of(action)
        return known[key]

    return nbytes


def lent_bytes(lent: Sequence[Arena], lender: Member) -> int:
    """What a member of the cluster lends in all."""
    return sum(arena.nbytes for arena in lent if arena.lender == lender)
