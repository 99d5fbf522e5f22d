"""Room for arenas: on disks with their buffers, in pinned memory, and on members with too little."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipefit.errors import OutOfMemory
from pipefit.memory.arenas import Arena, check_room, pinned_sizes, room_needed
from pipefit.schema.devices import Host, Member, MemberKind
from pipefit.schema.plan import Plan
from support.pipelines import equal_profile, make_cluster, make_plan

HOST, DISK = Member.host(0), Member(MemberKind.DISK, 0)


def made(backend: str = "emulated", **host: int) -> Plan:
    """Build two stages on the first two of three devices; their host has a disk."""
    cluster = replace(make_cluster(3, memory_bytes=100), hosts=(Host(**{"memory_bytes": 1 << 40, **host}),))
    plan = make_plan(equal_profile(2), [1, 1], microbatches=1, cluster=replace(cluster, backend=backend))
    assert len(plan.stages) == 2
    return plan


@given(st.integers(1, 3000), st.integers(1, 60))
def test_pinned_sizes_hold_all_slots_in_powers_of_two(slot_bytes: int, slots: int) -> None:
    """Pieces are powers of two, each holds whole slots, and their sum is less than twice the slots."""
    sizes = pinned_sizes(slot_bytes, slots)
    assert all(size & (size - 1) == 0 for size in sizes)
    assert sum(size // slot_bytes for size in sizes) >= slots
    assert sum(sizes) < 2 * slot_bytes * slots
    assert len(sizes) <= (slot_bytes * slots).bit_length()


@pytest.mark.parametrize("slot_bytes", [1, 3, 5, 7, 8, 12])
@pytest.mark.parametrize("slots", range(1, 9))
def test_no_other_powers_of_two_are_fewer_bytes(slot_bytes: int, slots: int) -> None:
    """No other choice of that many powers of two or fewer, each at least a slot, has fewer bytes."""
    powers = [1 << n for n in range(8) if 1 << n >= slot_bytes]
    fewest = min(
        sum(sizes)
        for count in range(1, slots + 1)
        for sizes in combinations_with_replacement(powers, count)
        if sum(size // slot_bytes for size in sizes) >= slots
    )
    assert sum(pinned_sizes(slot_bytes, slots)) == fewest


def test_members_set_aside_what_they_lend_to_whom() -> None:
    """Slots of equal and other sizes add up, by lender and borrower."""
    arenas = [
        Arena(HOST, 0, 2, 10),
        Arena(HOST, 0, 1, 7),
        Arena(HOST, 1, 3, 10),
        Arena(Member.device(2), 1, 1, 9),
    ]
    assert room_needed(made(), arenas) == {HOST: {0: 27, 1: 30}, Member.device(2): {1: 9}}
    pinned = {HOST: {0: sum(pinned_sizes(10, 2) + pinned_sizes(7, 1)), 1: 32}, Member.device(2): {1: 9}}
    assert room_needed(made("cuda"), arenas) == pinned


def test_buffers_before_a_disk_are_bounded() -> None:
    """Slots of 16 MiB pass through four buffers of 4 MiB, for any number of slots; smaller ones through four
    of the largest slot's size. Every device has separate buffers.
    """
    for slots in (1, 9):
        needed = room_needed(
            made(), [Arena(DISK, 0, slots, 16 << 20), Arena(DISK, 1, 2, 30), Arena(DISK, 1, 1, 20)]
        )
        assert needed == {DISK: {0: slots * (16 << 20), 1: 80}, HOST: {0: 4 * (4 << 20), 1: 4 * 30}}
    assert room_needed(made("cuda"), [Arena(DISK, 1, 2, 30)])[HOST] == {1: 4 * 32}


@pytest.mark.parametrize(
    ("arena", "room"),
    [
        (Arena(HOST, 0, 5, 10), {"memory_bytes": 50}),
        (Arena(DISK, 0, 5, 10), {"disk_bytes": 50}),
        (Arena(Member.device(2), 0, 10, 10), {}),
    ],
)
def test_a_member_with_a_byte_too_little_is_named(arena: Arena, room: dict[str, int]) -> None:
    """Exactly enough memory passes. A byte less is refused, with the excess and the borrower."""
    plan, more = made(disk_bytes=room.pop("disk_bytes", 1), **room), arena._replace(slots=1, slot_bytes=1)
    check_room(plan, [arena])
    with pytest.raises(
        OutOfMemory, match=rf"{arena.lender} has .*, 1 B too much: .* of device 0; offload less there"
    ):
        check_room(plan, [arena, more])


def test_a_device_with_a_stage_counts_what_it_lends_with_all_else() -> None:
    """A device with a stage counts its loans with all else, outside this check."""
    check_room(made(), [Arena(Member.device(1), 0, 1, 1 << 50)])
