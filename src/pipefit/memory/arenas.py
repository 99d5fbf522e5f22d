"""Arenas: memory that devices, hosts and disks reserve for tensors of other devices, for a whole run.

A borrower takes a slot of the arena when an OFFLOAD starts, and returns it when the RELOAD is joined. So the
number of slots in use depends on its program alone. The lender reserves that many slots of each size before
the first step, and its peak does not depend on the speed of any device. Moved state, and everything that an
update at a place keeps there, has separate slots for the whole run. The module also counts NCCL communicators
and the host memory of checkpoints.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import NamedTuple

from pipefit.errors import OutOfMemory
from pipefit.memory.model_state import StageRest, share_of
from pipefit.memory.storages import StageStorages
from pipefit.schema.actions import COPIES, Action, Kind, Subject
from pipefit.schema.devices import Member, MemberKind, Place
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program, UncheckedProgram, channels
from pipefit.units import format_bytes

# ---- NCCL communicators: each takes GPU memory outside of the caching allocator


def members(plan: Plan, action: Action) -> tuple[int, ...]:
    """Return the devices that take part in a collective, in the order of their stages and replicas."""
    if action.kind is Kind.AGREE:
        return plan.workers
    if action.place is not None:
        return tuple(member.number for member in action.place.members if member.number is not None)
    if isinstance(action.subject, Subject):
        return tuple(
            device for stage in plan.summed[action.subject.layer] for device in plan.stages[stage].devices
        )
    return plan.stages[action.stage].devices


def sums(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return the device groups of all-reduces.

    These reduce gradients of replicas and of shared parameters, and the vectors of the agreement.
    """
    grids = [stage.grid for stage in plan.stages]
    replicated = [(grid,) for grid in grids if grid.data > 1]
    shared = [tuple(grids[stage] for stage in stages) for stages in plan.summed.values()]
    result = [
        tuple(device for grid in together for device in grid.holding(shard))
        for together in (*replicated, *shared)
        for shard in range(together[0].tensor)
    ]
    return tuple(dict.fromkeys([*result, *[plan.workers] * plan.training.agrees]))


def tensor_groups(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return the groups of devices that hold the shards of one replica and compute its layers together."""
    divided = (stage.grid for stage in plan.stages if stage.grid.tensor > 1)
    return tuple(dict.fromkeys(grid.group_of(device) for grid in divided for device in grid.devices))


def communicators(plan: Plan, program: Program, device: int) -> int:
    """Return the number of communicators that a device's worker creates.

    There is one for each direction of a boundary to another device, one for each all-reduce group or
    tensor-parallel group of the device, and one that brings the loss to all workers.
    """
    if len(plan.workers) == 1:
        return 0
    own = tuple(actions if other == device else () for other, actions in enumerate(program.actions))
    ends = channels(own, program.placement)  # the device itself is one end of each
    here = [devices for devices in (*sums(plan), *tensor_groups(plan)) if device in devices]
    return len(ends) + len(here) + 1


# ---- Arenas


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
    """Return the arenas that every member of the cluster lends to each device.

    Args:
        devices: the actions of every device; only OFFLOADs, RELOADs and updates at a place matter.
        moved: for every device, the bytes that an OFFLOAD or RELOAD moves, and that an update keeps and needs
            at its place.
        hosts: the host of every device.
    """
    return tuple(chain(*(arenas_for(n, actions, moved[n], hosts[n]) for n, actions in enumerate(devices))))


def arenas_for(
    borrower: int, actions: Sequence[Action], moved_bytes: Callable[[Action], int], host: int
) -> Iterator[Arena]:
    """Yield the arenas of one device on `host` with these actions."""
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
    """Return whether an action keeps its slots for the whole run."""
    return action.moves_state or action.kind is Kind.STEP


def _key(action: Action) -> tuple[object, ...]:
    """Return a key that is equal for actions with the same slots."""
    return action.stage, action.layers, action.subject, action.place


def slots(place: Place, nbytes: int, host: int) -> list[tuple[Member, int]]:
    """Return the slots, as lender and size, that an OFFLOAD of `nbytes` takes from a device on `host`."""
    return [
        (member if member.number is not None else Member(member.kind, host), share)
        for member, share in place.split(nbytes)
    ]


def arenas_of(plan: Plan, program: Program) -> tuple[Arena, ...]:
    """Return the arenas that `program`, lowered from `plan`, uses."""
    return _arenas(plan, program, program.actions)


def arenas_of_copies(plan: Plan, program: Program) -> tuple[Arena, ...]:
    """Return the arenas without the memory of updates at a place, which their optimizer allocates."""
    return _arenas(
        plan, program, [[a for a in actions if a.kind is not Kind.STEP] for actions in program.actions]
    )


def _arenas(plan: Plan, program: Program, devices: Sequence[Sequence[Action]]) -> tuple[Arena, ...]:
    hosts = [device.host for device in plan.cluster.devices]
    return arenas(devices, moved_by_devices(plan, program), hosts)


def moved_by_devices(plan: Plan, program: Program) -> list[Callable[[Action], int]]:
    """Return, for every device, the `moved_bytes` of its actions."""
    storages = [StageStorages.of(plan, stage) for stage in range(len(plan.stages))]

    def rests(device: int) -> dict[int, StageRest]:
        """Return the non-microbatch bytes of each stage of the device."""
        shares = {stage: share_of(plan, stage, device) for stage in plan.stages_of(device)}
        return {n: StageRest(storages[n], program.microbatches, share=share) for n, share in shares.items()}

    return [moved_bytes(program, rests(device)) for device in range(len(program.actions))]


def moved_bytes(program: UncheckedProgram, rests: Mapping[int, StageRest]) -> Callable[[Action], int]:
    """Return a cached function from a device's OFFLOAD or RELOAD to the bytes that it moves.

    `rests` are the device's stages.

    For an update at a place, these are the bytes that the place needs in addition to the moved gradients and
    parameters.
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
    """Return the total bytes that a member of the cluster lends."""
    return sum(arena.nbytes for arena in lent if arena.lender == lender)


# ---- Room for arenas and checkpoints
#
# Devices and disks hold only the slots. A host also holds the buffers through which a device's bytes pass to
# or from a disk: two for each direction, so that one is copied while the other is written or read. A host's
# memory for GPUs is pinned, and torch allocates pinned memory in powers of two; an arena's slots are packed
# into as few such bytes as possible.

DISK_BUFFERS = 4  # of a device that moves tensors to a disk: two out, two in
_BUFFER_BYTES = 1 << 22  # a disk reaches its full rate with writes of this size

Room = dict[Member, Counter[int]]  # bytes that a member reserves, by borrowing device


def buffer_bytes(lent: Sequence[Arena], borrower: int) -> int:
    """Return the size of each host buffer through which a device's tensors pass to a disk.

    Returns 0 without an arena on a disk.
    """
    slots = [a.slot_bytes for a in lent if a.borrower == borrower and a.lender.kind is MemberKind.DISK]
    return min(_BUFFER_BYTES, max(slots, default=0))


def pinned_sizes(slot_bytes: int, slots: int) -> tuple[int, ...]:
    """Return powers of two with the least sum that hold `slots` slots, each slot in one piece."""
    whole = 1 << (slot_bytes * slots - 1).bit_length()
    half = whole // 2
    if half < slot_bytes:
        return (whole,)
    return min((whole,), (half, *pinned_sizes(slot_bytes, slots - half // slot_bytes)), key=sum)


def room_needed(plan: Plan, lent: Sequence[Arena]) -> Room:
    """Return the bytes that every member of the cluster reserves for arenas."""
    result: Room = defaultdict(Counter)
    on_gpus = plan.cluster.backend == "cuda"
    for arena in lent:
        pinned = on_gpus and arena.lender.kind is MemberKind.HOST
        nbytes = sum(pinned_sizes(arena.slot_bytes, arena.slots)) if pinned else arena.nbytes
        result[arena.lender][arena.borrower] += nbytes
    for borrower in {arena.borrower for arena in lent}:
        if buffer := buffer_bytes(lent, borrower):
            nbytes = sum(pinned_sizes(buffer, 1)) if on_gpus else buffer
            result[Member.host(plan.cluster.devices[borrower].host)][borrower] += DISK_BUFFERS * nbytes
    return result


def missing_bytes(plan: Plan, lent: Sequence[Arena]) -> dict[Member, int]:
    """Return the bytes that hosts, disks and devices without a stage lack for their arenas.

    Devices with a stage are excluded, because their peak includes the memory that they lend.
    """
    used = set(map(Member.device, plan.workers))
    needed = {
        member: shares.total() for member, shares in room_needed(plan, lent).items() if member not in used
    }
    excess = {member: nbytes - plan.cluster.capacity(member) for member, nbytes in needed.items()}
    return {member: nbytes for member, nbytes in excess.items() if nbytes > 0}


def check_room(plan: Plan, lent: Sequence[Arena]) -> None:
    """Check that no member has `missing_bytes`.

    Raises:
        OutOfMemory: a member lacks memory; says how much, and for which devices.
    """
    if result := shortage(plan, lent):
        raise OutOfMemory(f"{result}; offload less there, or only from fewer microbatches")


def shortage(plan: Plan, lent: Sequence[Arena]) -> str:
    """Describe the first of the `missing_bytes`: the member and its borrowers; empty if there is none."""
    for member, missing in missing_bytes(plan, lent).items():
        shares = room_needed(plan, lent)[member]
        return (
            f"{member} has {format_bytes(plan.cluster.capacity(member))}, but would need "
            f"{format_bytes(shares.total())} for offloaded tensors, {format_bytes(missing)} too much: "
            + ", ".join(f"{format_bytes(share)} of device {n}" for n, share in shares.items())
        )
    return ""


def snapshot_bytes(plan: Plan) -> Counter[Member]:
    """Return the bytes of a checkpoint on each host whose workers store it, from the first update on.

    A checkpoint is written from a copy of all saved tensors in host memory. The first replica stores what all
    replicas have, and each replica stores what it owns; a shared parameter is stored once.
    """
    measurement, result = plan.measurement, Counter[Member]()
    costs = measurement.costs
    repeated = Counter[int]()  # bytes of parameters that an earlier layer stores
    repeated_state = Counter[int]()
    for shared in measurement.shared:
        for _, user in shared.pairs:
            repeated[user] += shared.nbytes
            repeated_state[user] += shared.state_bytes
    for number, stage in enumerate(plan.stages):
        first, tensor = stage.grid.devices[0], stage.grid.tensor
        share = share_of(plan, number, first)
        for layer in range(stage.start, stage.stop):
            cost = costs[layer]
            owner = first if share is None else stage.grid.devices[share.owner(layer) * tensor]
            stores = owner if share is not None and share.divides_parameters else first
            kept = cost.parameter_bytes - repeated[layer] + cost.buffer_bytes + cost.constant_bytes
            for device, nbytes in ((stores, kept), (owner, cost.state_bytes - repeated_state[layer])):
                result[Member.host(plan.cluster.devices[device].host)] += nbytes
    return result


def snapshot_shortage(plan: Plan, lent: Sequence[Arena]) -> str:
    """Describe the host without room for a checkpoint's copy next to the arenas, and the lacking bytes.

    Returns an empty text if all copies fit.
    """
    needed = room_needed(plan, lent)
    for host, nbytes in snapshot_bytes(plan).items():
        rest = plan.cluster.capacity(host) - needed[host].total()
        if nbytes > rest:
            return (
                f"{host} has {format_bytes(plan.cluster.capacity(host))}, but needs "
                f"{format_bytes(needed[host].total())} for offloaded tensors and {format_bytes(nbytes)} for "
                f"a copy of the saved state, {format_bytes(nbytes - rest)} too much"
            )
    return ""
