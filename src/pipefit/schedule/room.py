"""The room that arenas take where they are: on devices that only lend, on hosts and on their disks; and that which
checkpoints take beside them.

Devices and disks hold the slots and no more. A host also holds the buffers through which a device's bytes pass on their
way to or from a disk: two for each direction, so that one is copied while the other is written or read. And a host's
memory for GPUs is pinned, which torch allocates in powers of two; the slots of an arena are therefore packed into as
few bytes of such sizes as they can be. A checkpoint is written from a copy of all that is trained, in the memory of the
hosts whose workers store it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from pipefit.cost.shares import share_of
from pipefit.errors import OutOfMemory
from pipefit.places import Member, MemberKind
from pipefit.plans import Plan
from pipefit.schedule.arenas import Arena
from pipefit.units import format_bytes

DISK_BUFFERS = 4  # of a device that moves tensors to a disk: two out, two in
_BUFFER_BYTES = 1 << 22  # a disk is at its full rate with writes of this size

Room = dict[Member, Counter[int]]  # bytes that a member sets aside, by the device that they are for


def buffer_bytes(lent: Sequence[Arena], borrower: int) -> int:
    """The size of each of the host's buffers through which a device's tensors pass to a disk; 0 without such."""
    slots = [a.slot_bytes for a in lent if a.borrower == borrower and a.lender.kind is MemberKind.DISK]
    return min(_BUFFER_BYTES, max(slots, default=0))


def pinned_sizes(slot_bytes: int, slots: int) -> tuple[int, ...]:
    """Powers of two, as few bytes of them as possible, that hold so many slots in one piece each."""
    whole = 1 << (slot_bytes * slots - 1).bit_length()
    half = whole // 2
    if half < slot_bytes:
        return (whole,)
    return min((whole,), (half, *pinned_sizes(slot_bytes, slots - half // slot_bytes)), key=sum)


def room_needed(plan: Plan, lent: Sequence[Arena]) -> Room:
    """What every member of the cluster sets aside for arenas."""
    found: Room = defaultdict(Counter)
    on_gpus = plan.cluster.backend == "cuda"
    for arena in lent:
        pinned = on_gpus and arena.lender.kind is MemberKind.HOST
        nbytes = sum(pinned_sizes(arena.slot_bytes, arena.slots)) if pinned else arena.nbytes
        found[arena.lender][arena.borrower] += nbytes
    for borrower in {arena.borrower for arena in lent}:
        if buffer := buffer_bytes(lent, borrower):
            nbytes = sum(pinned_sizes(buffer, 1)) if on_gpus else buffer
            found[Member.host(plan.cluster.devices[borrower].host)][borrower] += DISK_BUFFERS * nbytes
    return found


def missing_bytes(plan: Plan, lent: Sequence[Arena]) -> dict[Member, int]:
    """The bytes that hosts, disks, and devices without a stage have too few of, for each that has.

    Devices that have a stage count what they lend with all else that they hold.
    """
    used = set(map(Member.device, plan.workers))
    needed = {member: shares.total() for member, shares in room_needed(plan, lent).items() if member not in used}
    excess = {member: nbytes - plan.cluster.capacity(member) for member, nbytes in needed.items()}
    return {member: nbytes for member, nbytes in excess.items() if nbytes > 0}


def check_room(plan: Plan, lent: Sequence[Arena]) -> None:
    """Check that no member has `missing_bytes`.

    Raises:
        OutOfMemory: one has not; says by how much, and for whom.
    """
    if found := shortage(plan, lent):
        raise OutOfMemory(f"{found}; move fewer tensors there, or those of fewer microbatches")


def shortage(plan: Plan, lent: Sequence[Arena]) -> str:
    """The first of the `missing_bytes` in words: of which member, for whom; empty where there are none."""
    for member, missing in missing_bytes(plan, lent).items():
        shares = room_needed(plan, lent)[member]
        return (
            f"{member} has {format_bytes(plan.cluster.capacity(member))} and would have to keep "
            f"{format_bytes(shares.total())} of moved tensors, {format_bytes(missing)} more: "
            + ", ".join(f"{format_bytes(share)} of device {n}" for n, share in shares.items())
        )
    return ""


def snapshot_bytes(plan: Plan) -> Counter[Member]:
    """The bytes of what a checkpoint holds, on the hosts whose workers store it, from the first update on.

    Of replicas the first stores what all have, and each what it owns; a shared parameter is stored once.
    """
    measurement, found = plan.measurement, Counter[Member]()
    costs = measurement.costs
    repeated = Counter[int]()  # of parameters that an earlier layer stores
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
                found[Member.host(plan.cluster.devices[device].host)] += nbytes
    return found


def snapshot_shortage(plan: Plan, lent: Sequence[Arena]) -> str:
    """Which host has no room for a copy of what is trained beside the arenas, and by how much; empty where all have."""
    needed = room_needed(plan, lent)
    for host, nbytes in snapshot_bytes(plan).items():
        rest = plan.cluster.capacity(host) - needed[host].total()
        if nbytes > rest:
            return (
                f"{host} has {format_bytes(plan.cluster.capacity(host))}, of which moved tensors take "
                f"{format_bytes(needed[host].total())}, and a copy of what it saves takes {format_bytes(nbytes)}, "
                f"{format_bytes(nbytes - rest)} more than is left"
            )
    return ""
