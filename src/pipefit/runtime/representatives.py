"""Representatives: a dry run executes some of all devices, whose memory stands for the others.

A device's memory follows from its own program, not from who is at the other end of a message or a sum: what it needs
for these it allocates and frees itself. So devices do the same if their stages and actions are equal but for the names
of members, and their rows but for the first one; if they lend as much, and report to an agreement or not. Such devices
are kin. Kin that divide the state of a stage differ in the layers that they own as well.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from pipefit.actions import Action
from pipefit.cost.shares import owners
from pipefit.cost.storages import StageStorages
from pipefit.places import Member
from pipefit.plans import Plan
from pipefit.program import Program
from pipefit.runtime.assembly import tells_norms
from pipefit.runtime.reserved import overheads
from pipefit.schedule.arenas import Arena, lent_bytes

Kin = tuple[int, ...]  # devices


def kin(plan: Plan, programs: Sequence[Program], arenas: Sequence[Arena]) -> list[Kin]:
    """All devices of a plan, together with those that do the same but for the layers that they own."""
    found = dict[Hashable, list[int]]()
    for device in plan.workers:
        lent = lent_bytes(arenas, Member.device(device))
        key = _place(plan, device), lent, overheads(plan, device), _actions(plan, programs, device)
        found.setdefault(key, []).append(device)
    return list(map(tuple, found.values()))


def owned_layers(plan: Plan) -> dict[int, frozenset[int]]:
    """For every device the layers that it owns of stages whose state replicas divide."""
    found = dict.fromkeys(plan.workers, frozenset[int]())
    for number, stage in enumerate(plan.stages):
        if stage.grid.shard != "none":
            of_layers = list(enumerate(owners(StageStorages.of(plan, number), stage.grid), start=stage.start))
            for device in stage.devices:
                replica = stage.grid.replica_of(device)
                found[device] |= {layer for layer, owner in of_layers if owner == replica}
    return found


def kept_layers(plan: Plan) -> dict[int, frozenset[int]]:
    """For every device the layers of its stages of which it keeps the parameters between steps."""
    owned = owned_layers(plan)
    found = dict.fromkeys(plan.workers, frozenset[int]())
    for stage in plan.stages:
        layers = frozenset(range(stage.start, stage.stop))
        for device in stage.devices:
            found[device] |= layers & owned[device] if stage.grid.shard == "parameters" else layers
    return found


def _place(plan: Plan, device: int) -> Hashable:
    """What the stages of a device are to it."""
    stages = plan.stages_of(device)
    agrees = plan.training.agrees
    return tuple((n, plan.stages[n].grid.shard_of(device), agrees and tells_norms(plan, n, device)) for n in stages)


def _actions(plan: Plan, programs: Sequence[Program], device: int) -> Hashable:
    """The actions of a device, without the names of members, and with its rows counted from its own first one."""
    plain = _plain(plan, device)
    return tuple(tuple(map(plain, program.actions[device])) for program in programs)


def _plain(plan: Plan, device: int) -> Callable[[Action], Hashable]:
    """A function that makes of each of a device's actions what it is of any device."""
    names, host = dict[Member, int](), plan.cluster.devices[device].host
    grids = {n: plan.stages[n].grid for n in plan.stages_of(device)}
    size = plan.training.microbatch_size
    first = {n: grid.replica_of(device) * (size // grid.data) for n, grid in grids.items()}

    def plain(action: Action) -> Hashable:
        kind, stage, microbatch, layers, subject, place, part, wait = action
        if part is not None:
            part = part[0] - first[stage], part[1] - first[stage]
        if place is None:
            return kind, stage, microbatch, layers, subject, part, wait
        members = [(member.at(host), parts) for member, parts in place]
        there = tuple((one.kind, names.setdefault(one, len(names)), parts) for one, parts in members)
        return kind, stage, microbatch, layers, subject, part, wait, there

    return plain
