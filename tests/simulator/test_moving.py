"""Saved tensors offloaded and reloaded: to the host, to peers, in shares."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipefit.errors import UsageError
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import Host, Link, Member, parse_place
from pipefit.schema.layer_costs import Origin, SavedTensor
from pipefit.schema.profile import ModelProfile
from pipefit.schema.program import parse_program
from pipefit.schema.trace import Category, Stream, Trace
from pipefit.simulator import Simulation, simulate
from support.pipelines import (
    chain_profile,
    equal_profile,
    lent,
    make_cluster,
    make_layer,
    make_plan,
    offload_all,
)

# One stage of two layers: tensor 0 of each has 16 bytes, tensor 1 is its input of 8.
AWAY = "0LOAD0 0F0[0:1] 0OFFLOAD0[0.0]@{place} 0F0[1:2] 0WAIT_OFFLOAD0[0.0]@{place} "
BACK = "0RELOAD0[0.0]@{place} 0B0[1:2] 0WAIT_RELOAD0[0.0]@{place} 0B0[0:1] 0STEP"


def run(text: str, cluster: Cluster | None = None, **layer: object) -> Trace:
    """Return the trace of a program of one stage of two layers on device 0."""
    cluster = cluster or make_cluster(1)
    plan = make_plan(equal_profile(2, **layer), [2], microbatches=1, cluster=cluster)
    lines = [f"device 0: {text}", *(f"device {number}:" for number in range(1, len(cluster.devices)))]
    return simulate(plan, program=parse_program("\n".join(lines), placement=((0,),), microbatches=1), steps=1)


def levels(trace: Trace, category: Category, device: int = 0) -> dict[str, int]:
    """Return the bytes of a category in every sample of a device, by action."""
    return {sample.action: sample.by_category.get(category, 0) for sample in trace.devices[device].memory}


def test_the_join_of_an_offload_frees_and_the_start_of_a_reload_allocates() -> None:
    """A tensor counts until WAIT_OFFLOAD returns and again from RELOAD on."""
    held = levels(run((AWAY + BACK).format(place="host")), Category.ACTIVATIONS)
    both = 2 * (16 + 8) + 4  # the loss saves 4
    assert held["0WAIT_OFFLOAD0[0.0]@host"] == both
    assert held["0RELOAD0[0.0]@host"] == both  # it has come back within the action
    assert held["0B0[1:2]"] == both
    assert "0WAIT_RELOAD0[0.0]@host" not in held


def test_a_tensor_that_is_away_lowers_the_peak() -> None:
    """The second layer's backward peaks lower by the offloaded bytes."""
    here = run("0LOAD0 0F0[0:1] 0F0[1:2] 0B0[1:2] 0B0[0:1] 0STEP").devices[0]
    late = AWAY + "0B0[1:2] 0RELOAD0[0.0]@host 0WAIT_RELOAD0[0.0]@host 0B0[0:1] 0STEP"
    gone = run(late.format(place="host")).devices[0]
    totals = [{s.action: s.total_bytes for s in device.memory} for device in (here, gone)]
    assert totals[0]["0B0[1:2]"] - totals[1]["0B0[1:2]"] == 16
    assert totals[0]["0B0[0:1]"] == totals[1]["0B0[0:1]"]


def test_copies_run_beside_computing_and_the_join_waits_for_them() -> None:
    """A copy of 16 bytes at 4 a second outlasts a forward of a second, so the join waits for the rest."""
    trace = run((AWAY + BACK).format(place="host"), make_cluster(1, bytes_per_second=4.0))
    times = {e.action: (e.start_seconds, e.end_seconds) for e in trace.devices[0].events}
    assert times["0OFFLOAD0[0.0]@host"] == (1.0, 5.0)
    assert times["0F0[1:2]"] == (1.0, 2.0)
    assert times["0RELOAD0[0.0]@host"] == (5.0, 9.0)
    assert times["0B0[1:2]"] == (5.0, 7.0)
    assert times["0B0[0:1]"] == (9.0, 11.0)
    assert {e.action for e in trace.devices[0].events if e.stream is Stream.COPY} == {
        "0OFFLOAD0[0.0]@host", "0RELOAD0[0.0]@host"
    }  # fmt: skip


def test_copies_of_one_direction_queue_and_those_of_two_do_not() -> None:
    """Offloads of a device run one after another even over different wires; an offload and a reload run at
    once.
    """
    links = (
        Link.between("device0", "host0", bytes_per_second=4.0),
        Link.between("device0", "device1", bytes_per_second=4.0),
    )
    text = (
        "0LOAD0 0F0 0OFFLOAD0[0.0]@host 0OFFLOAD0[1.0]@device1 0WAIT_OFFLOAD0[0.0]@host 0RELOAD0[0.0]@host "
        "0WAIT_OFFLOAD0[1.0]@device1 0WAIT_RELOAD0[0.0]@host"
    )
    trace = run(text, make_cluster(2, *links))
    times = {e.action: (e.start_seconds, e.end_seconds) for e in trace.devices[0].events}
    assert times["0OFFLOAD0[0.0]@host"] == (2.0, 6.0)
    assert times["0OFFLOAD0[1.0]@device1"] == (6.0, 10.0)
    assert times["0RELOAD0[0.0]@host"] == (6.0, 10.0)


def test_a_copy_never_starts_before_it_is_issued() -> None:
    """A second offload, issued long after the first one is done, starts at its issue."""
    text = (
        "0LOAD0 0F0[0:1] 0OFFLOAD0[0.0]@host 0F0[1:2] 0OFFLOAD0[1.0]@host 0WAIT_OFFLOAD0[0.0]@host "
        "0WAIT_OFFLOAD0[1.0]@host"
    )
    trace = run(text, make_cluster(1, bytes_per_second=32.0))
    assert [e.start_seconds for e in trace.devices[0].events if e.stream is Stream.COPY] == [1.0, 2.0]


def test_a_copy_waits_for_one_that_runs_elsewhere() -> None:
    """An offload over a free wire still waits for the one before it, even if the device was blocked in
    between.
    """
    links = (
        Link.between("device0", "host0", bytes_per_second=2.0),
        Link.between("device0", "device1", bytes_per_second=16.0),
        Link.between("device0", "device2", bytes_per_second=8.0),
    )
    text = (
        "0LOAD0 0F0 0OFFLOAD0[0.0]@device1 0OFFLOAD0[1.0]@host 0WAIT_OFFLOAD0[0.0]@device1 0RELOAD0[0.0]@device1 "
        "0WAIT_RELOAD0[0.0]@device1 0OFFLOAD0[0.1]@device2 0WAIT_OFFLOAD0[0.1]@device2 0WAIT_OFFLOAD0[1.0]@host"
    )
    trace = run(text, make_cluster(3, *links))
    times = {e.action: (e.start_seconds, e.end_seconds) for e in trace.devices[0].events}
    assert times["0OFFLOAD0[0.0]@device1"] == (2.0, 3.0)
    assert times["0OFFLOAD0[1.0]@host"] == (3.0, 11.0)
    assert times["0RELOAD0[0.0]@device1"] == (3.0, 4.0)
    assert times["0OFFLOAD0[0.1]@device2"] == (11.0, 12.0)


@pytest.mark.parametrize(
    ("shared", "copies"), [(True, [(2.0, 6.0), (6.0, 10.0)]), (False, [(2.0, 6.0), (3.0, 7.0)])]
)
def test_two_devices_behind_one_uplink_take_turns(shared: bool, copies: list[tuple[float, float]]) -> None:
    """Offloads of two devices over one wire run one after the other; over a wire each, they overlap."""
    uplinks = (
        Link.between(f"device{n}", "host0", bytes_per_second=4.0, wire="up" if shared else None)
        for n in range(2)
    )
    cluster = make_cluster(2, *uplinks, Link.between("device0", "device1", bytes_per_second=1e30))
    text = """
    device 0: 0LOAD0 0F0 0SEND_F0 0OFFLOAD0[0.0]@host 0WAIT_SEND_F0 0WAIT_OFFLOAD0[0.0]@host
    device 1: 1RECV_F0 1WAIT_RECV_F0 1LOAD0 1F0[2:3] 1OFFLOAD0[2.0]@host 1F0[3:4] 1WAIT_OFFLOAD0[2.0]@host
    """
    plan = make_plan(equal_profile(4), [2, 2], microbatches=1, cluster=cluster)
    trace = simulate(
        plan,
        program=parse_program(
            text,
            placement=((0,), (1,)),
            microbatches=1,
        ),
        steps=1,
    )
    events = [e for device in trace.devices for e in device.events if e.stream is Stream.COPY]
    assert [(e.start_seconds, e.end_seconds) for e in events] == copies


# -------------------------------------------------------------------- peers


@pytest.mark.parametrize(
    ("place", "wire", "copies"),
    [
        ("device1*2+device2*1", None, [(1.0, 4.0), (4.0, 7.0)]),
        ("device2*1+device1*2", None, [(1.0, 4.0), (4.0, 7.0)]),
        ("device1*2+device2*1", "one", [(1.0, 6.0), (6.0, 11.0)]),
    ],
)
def test_a_striped_tensor_goes_in_shares_and_is_done_with_the_last(
    place: str, wire: str | None, copies: list[tuple[float, float]]
) -> None:
    """18 bytes in shares of two to one take two seconds for 12 and three for 6: at once, or in turn over one
    wire.
    """
    links = (
        Link.between("device0", "device1", bytes_per_second=6.0, wire=wire),
        Link.between("device0", "device2", bytes_per_second=2.0, wire=wire),
    )
    trace = run((AWAY + BACK).format(place=place), make_cluster(3, *links), kept_bytes=18)
    found = [(e.start_seconds, e.end_seconds) for e in trace.devices[0].events if e.stream is Stream.COPY]
    assert found == copies
    assert [max(levels(trace, Category.LENT, device).values()) for device in (1, 2)] == [12, 6]


def test_a_peer_lends_from_the_start_whatever_the_speed() -> None:
    """A device that only lends shows its arena in one sample, over links of any speed."""
    for speed in (0.5, 4.0, 1e30):
        trace = run((AWAY + BACK).format(place="device1"), make_cluster(2, bytes_per_second=speed))
        samples = trace.devices[1].memory
        assert [(s.action, s.step, s.seconds, s.by_category) for s in samples] == [
            ("lends", 0, 0.0, {Category.LENT: 16})
        ]
        assert trace.peak_bytes[1] == 16


@pytest.mark.parametrize("speed", [50.0, 500.0, 1e30])
def test_lent_bytes_count_at_the_peak_of_the_lender(speed: float) -> None:
    """Under GPipe stage 0 offloads the saved tensors of all microbatches: the lender's level is higher by
    those from first sample to last, and its peak does not depend on link speed.
    """
    plan = make_plan(
        equal_profile(4, kept_bytes=100), [2, 2], microbatches=3, schedule="gpipe",
        cluster=make_cluster(2, bytes_per_second=speed),
    )  # fmt: skip
    alone = Simulation(plan, steps=2)
    lending = Simulation(plan, program=offload_all(plan, place="device1", stages=[0]), steps=2)
    lent = 3 * 2 * 100
    assert lending.peak_bytes[1] == alone.peak_bytes[1] + lent
    assert lending.peak_bytes[0] < alone.peak_bytes[0]
    trace = lending.trace()
    assert trace.peak_bytes == lending.peak_bytes
    assert set(levels(trace, Category.LENT, 1).values()) == {lent}
    without = [s.total_bytes for s in alone.trace().devices[1].memory]
    assert [s.total_bytes - lent for s in trace.devices[1].memory] == without


ARENAS = [
    ("0LOAD0 0F0 {out0} {out1}", [(1, 0, 2, 16)]),  # both at once
    ("0LOAD0 0F0 {out0} {back0} {out1} {back1}", [(1, 0, 1, 16)]),  # the slot is taken again
    (
        "0LOAD0 0F0 {out0} 0RELOAD0[0.0]@device1 {out1} 0WAIT_RELOAD0[0.0]@device1",
        [(1, 0, 2, 16)],
    ),  # not yet free
    ("0LOAD0 0F0 {out0} {input1}", [(1, 0, 1, 8), (1, 0, 1, 16)]),  # a slot of each size
]


@pytest.mark.parametrize(("text", "expected"), ARENAS)
def test_an_arena_has_as_many_slots_as_are_ever_in_use(text: str, expected: list[tuple[int, ...]]) -> None:
    """A slot is taken at the start of an OFFLOAD and free again at the RELOAD's join; sizes do not mix."""
    moves = {
        "out0": "0OFFLOAD0[0.0]@device1 0WAIT_OFFLOAD0[0.0]@device1",
        "out1": "0OFFLOAD0[1.0]@device1 0WAIT_OFFLOAD0[1.0]@device1",
        "input1": "0OFFLOAD0[1.1]@device1 0WAIT_OFFLOAD0[1.1]@device1",
        "back0": "0RELOAD0[0.0]@device1 0WAIT_RELOAD0[0.0]@device1",
        "back1": "0RELOAD0[1.0]@device1 0WAIT_RELOAD0[1.0]@device1",
    }
    plan = make_plan(equal_profile(2), [2], microbatches=1, cluster=make_cluster(2))
    program = parse_program(f"device 0: {text.format(**moves)}\ndevice 1:", placement=((0,),), microbatches=1)
    simulation = Simulation(plan, program=program, steps=1)
    assert lent(simulation) == expected
    assert simulation.peak_bytes[1] == sum(slots * nbytes for _, _, slots, nbytes in expected)


@pytest.mark.parametrize("moves", ["{away}", "{away} 0RELOAD0[0.2]@host"])
def test_a_second_forward_needs_its_inputs(moves: str) -> None:
    """A value that the first layer saves and the recomputed second one reads must be back before the second
    R.
    """
    first = make_layer()
    first = replace(
        first, saved=(*first.saved, SavedTensor(index=2, nbytes=8, dtype="uint8", origin=Origin(kind="own")))
    )
    plan = make_plan(chain_profile([first, make_layer(saves_input=False)]), [2], microbatches=1)
    moves = moves.format(away="0OFFLOAD0[0.2]@host 0WAIT_OFFLOAD0[0.2]@host")
    rest = "" if "RELOAD" in moves else "0RELOAD0[0.2]@host "
    text = f"0LOAD0 0F0[0:1] 0N0[1:2] {moves} 0R0[1:2] {rest}0WAIT_RELOAD0[0.2]@host 0B0 0STEP"
    program = parse_program(f"device 0: {text}", placement=((0,),), microbatches=1)
    with pytest.raises(
        UsageError, match=r"0R0\[1:2\] starts from a tensor that is (away|on its way back) \(@host\): RELO"
    ):
        simulate(plan, program=program)


def test_every_borrower_has_an_arena_of_its_own() -> None:
    """Two devices that borrow from a third at different times reserve both arenas: no device's speed decides
    the order.
    """
    profile, cluster = equal_profile(3), make_cluster(3)
    plan = make_plan(profile, [1, 1, 1], microbatches=1, cluster=cluster)
    simulation = Simulation(plan, program=offload_all(plan, place="device2*3+device0*1", stages=[1]))
    assert lent(simulation) == [(0, 1, 1, 4), (2, 1, 1, 12)]
    simulation = Simulation(plan, program=offload_all(plan, place="device2", stages=[0, 1]))
    assert lent(simulation) == [(2, 0, 1, 16), (2, 1, 1, 16)]


# Memory of a worker between two others on a lender: context, five communicators and two workspaces
V100_PROCESS = (512 << 20) + 5 * 100_000_000 + 2 * 8_519_680


@pytest.mark.parametrize(
    ("preset", "place", "bytes_per_second", "latency_seconds", "capacity_bytes"),
    [
        ("gh200", "host", 450e9 * 0.71, 1e-5, 480 * 10**9),  # NVLink-C2C, and the rate that copies reach
        ("dgx1-v100", "host", 15.75e9 * 0.66, 1e-5, 768 * 10**9),
        ("dgx1-v100", "device3", 2 * 25e9 * 0.9, 1e-5, (32510 << 20) - V100_PROCESS),
        ("dgx2-a100", "disk", 7.88e9 * 0.5, 1.1e-4, 6 * 10**12),  # over the host's link
    ],
)
def test_a_place_is_room_a_rate_and_a_latency(
    preset: str, place: str, bytes_per_second: float, latency_seconds: float, capacity_bytes: int
) -> None:
    """A coherent host, a host over PCIe, a peer and a disk differ only in three figures, and a simulated
    offload takes the time they give.
    """
    cluster, (member,) = Cluster.preset(preset), parse_place(place).members
    tier = cluster.tier(0, member)
    assert tier.capacity_bytes == capacity_bytes
    assert tier[1:] == (pytest.approx(bytes_per_second), pytest.approx(latency_seconds))
    plan = make_plan(equal_profile(2, kept_bytes=1 << 30), [2], microbatches=1, cluster=cluster)
    lines = [f"device 0: {(AWAY + BACK).format(place=place)}", *("device 1:" for _ in cluster.devices[1:])]
    program = parse_program("\n".join(lines), placement=((0,),), microbatches=1)
    copies = [
        e for e in simulate(plan, program=program, steps=1).devices[0].events if e.stream is Stream.COPY
    ]
    assert [e.end_seconds - e.start_seconds for e in copies] == [
        pytest.approx(latency_seconds + (1 << 30) / bytes_per_second)
    ] * 2


@pytest.mark.parametrize(
    ("place", "lanes"),
    [
        ("device3", 2),
        ("device1*1+device2*1", 2),
        ("device3*1+device4*1", 4),
        ("device1*1+device3*2+device4*2", 5),
        ("device1*1+device2*1+device3*2+device4*2", 6),
    ],
)
def test_a_striped_tensor_takes_the_time_of_all_lanes_together(place: str, lanes: int) -> None:
    """On a DGX-1, n bytes leave over k lanes in a link's latency plus n / (k x 22.5 GB/s)."""
    dgx1, nbytes = Cluster.preset("dgx1-v100"), 60 << 20
    plan = make_plan(equal_profile(2, kept_bytes=nbytes), [2], microbatches=1, cluster=dgx1)
    text = (AWAY + BACK).format(place=place)
    lines = [f"device 0: {text}", *("device 1:" for _ in dgx1.devices[1:])]
    program = parse_program("\n".join(lines), placement=((0,),), microbatches=1)
    copies = [
        e for e in simulate(plan, program=program, steps=1).devices[0].events if e.stream is Stream.COPY
    ]
    expected = pytest.approx(
        1e-5 + nbytes / (lanes * 22.5e9), rel=1e-4
    )  # blocks are whole multiples of 512 bytes
    assert [e.end_seconds - e.start_seconds for e in copies] == [expected] * 2


def test_hosts_lend_nothing() -> None:
    """Tensors at a host, or on its disk, count on no device."""
    links = tuple(Link.between("device0", there, bytes_per_second=1.0) for there in ("disk0", "host0"))
    hosts = (Host(memory_bytes=1 << 40, disk_bytes=1 << 40),)
    cluster = replace(make_cluster(1), hosts=hosts, links=links)
    trace = run((AWAY + BACK).format(place="host0*1+disk*1"), cluster)
    assert all(Category.LENT not in sample.by_category for sample in trace.devices[0].memory)


@given(st.integers(0, 10**6), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_shares_add_up_to_the_tensor(nbytes: int, shares: list[int]) -> None:
    """Shares add up to the tensor. Below 512 bytes shares are exact to a byte, above to 512 bytes and so
    aligned.
    """
    place = "+".join(f"device{number + 1}*{share}" for number, share in enumerate(shares))
    found = parse_place(place).split(nbytes)
    assert [member for member, _ in found] == [Member.device(number + 1) for number in range(len(shares))]
    assert sum(part for _, part in found) == nbytes
    unit = 512 if nbytes * min(shares) >= 512 * sum(shares) else 1
    assert all(start % unit == 0 for start in accumulate((part for _, part in found[:-1]), initial=0))
    assert all(
        abs(part - nbytes * share / sum(shares)) <= unit
        for (_, part), share in zip(found, shares, strict=True)
    )
    assert unit == 1 or min(part for _, part in found) >= 256  # the last one ends with the tensor


# -------------------------------------------------------------------- all at once


@settings(max_examples=30)
@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.sampled_from(["gpipe", "torchgpipe", "1f1b"])
)
def test_offloading_lowers_what_is_held_and_leaves_nothing_behind(
    stages: int, layers: int, microbatches: int, schedule: str
) -> None:
    """With every layer's tensor offloaded, stages hold those of at most the two layers at work; steps repeat
    exactly.
    """
    plan = make_plan(
        equal_profile(stages * layers), [layers] * stages, microbatches=microbatches, schedule=schedule
    )
    trace = simulate(plan, program=offload_all(plan), steps=3)
    whole = simulate(plan, steps=3)
    for stage, (away, here) in enumerate(zip(trace.devices, whole.devices, strict=True)):
        in_flight = min(microbatches, stages - stage) if schedule == "1f1b" else microbatches
        most = [max(s.by_category.get(Category.ACTIVATIONS, 0) for s in d.memory) for d in (away, here)]
        assert most[1] - most[0] == 16 * (in_flight * layers - min(2, layers))
        assert [s.bytes for s in away.memory if s.step == 1] == [s.bytes for s in away.memory if s.step == 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "0LOAD0 0OFFLOAD0[0.0]@host 0WAIT_OFFLOAD0[0.0]@host",
            "belongs between forward and backward of layer 0",
        ),
        (
            "0LOAD0 0F0[0:1] 0F0[1:2] 0B0[1:2] 0OFFLOAD0[1.0]@host 0WAIT_OFFLOAD0[1.0]@host",
            "belongs between forward and backward of layer 1",
        ),
        (AWAY + "0B0", r"0B0 needs a saved tensor of layer 0 that is away \(@host\)"),
        (AWAY + "0RELOAD0[0.0]@host 0B0 0WAIT_RELOAD0[0.0]@host", "layer 0 that is on its way back"),
        ("0LOAD0 0F0 0OFFLOAD0[0.0]@host 0B0 0WAIT_OFFLOAD0[0.0]@host", "layer 0 that is on its way out"),
        (AWAY + "0OFFLOAD0[0.0]@host 0WAIT_OFFLOAD0[0.0]@host", "offloads a storage that is away already"),
        (
            AWAY + "0RELOAD0[0.0]@device1 0WAIT_RELOAD0[0.0]@device1",
            r"reloads a storage that is away \(@host\)",
        ),
        (
            "0LOAD0 0F0 0RELOAD0[0.0]@host 0WAIT_RELOAD0[0.0]@host",
            r"reloads a storage that is on the device",
        ),
        (
            "0LOAD0 0F0 0OFFLOAD0[0.9]@host 0WAIT_OFFLOAD0[0.9]@host",
            "names a tensor that stage 0 does not keep",
        ),
        (
            "0LOAD0 0F0 0OFFLOAD0[0.parameters]@host 0WAIT_OFFLOAD0[0.parameters]@host",
            "only saved tensors can be offloaded",
        ),
        (
            "0LOAD0 0F0 0OFFLOAD0[0.0]@disk0 0WAIT_OFFLOAD0[0.0]@disk0",
            "names disk0, but the cluster has 0 disks",
        ),
        ("0LOAD0 0F0 0OFFLOAD0[0.0]@device 0WAIT_OFFLOAD0[0.0]@device", "'device' is not a member"),
        ("0LOAD0 0F0 0OFFLOAD0[0.0]@attic 0WAIT_OFFLOAD0[0.0]@attic", "'attic' is not a place"),
        ("0LOAD0 0F0 0OFFLOAD0[0.0] 0WAIT_OFFLOAD0[0.0]", "lacks a place: write @host"),
        ("0LOAD0 0F0 0OFFLOAD0@host 0WAIT_OFFLOAD0@host", "does not offload anything known"),
        (
            "0LOAD0 0F0 0OFFLOAD0#0@host 0WAIT_OFFLOAD0#0@host",
            "does not offload anything known: name a tensor, or one of 0",
        ),
        (
            "0LOAD0 0F0 0OFFLOAD0[0.0]@device0 0WAIT_OFFLOAD0[0.0]@device0",
            "device 0 cannot offload to 'device0': name other members",
        ),
        (
            "0LOAD0 0F0 0OFFLOAD0[0.0]@device7 0WAIT_OFFLOAD0[0.0]@device7",
            "names device7, but the cluster has 2 devices",
        ),
        (
            "0LOAD0 0F0 0OFFLOAD0[0.0]@host2 0WAIT_OFFLOAD0[0.0]@host2",
            "names host2, but the cluster has 1 hosts",
        ),
    ],
)
def test_moves_that_cannot_be_are_refused(text: str, message: str) -> None:
    """A tensor must exist to be moved, return from its place, and be back before it is needed."""
    with pytest.raises(UsageError, match=message):
        run(text.format(place="host"), make_cluster(2))


def saves_output(*, next_saves: bool = False) -> ModelProfile:
    """Build two layers that save their outputs as tensor 0; the second may save its input too,
    as tensor 1.
    """
    output = SavedTensor(index=0, nbytes=8, dtype="uint8", origin=Origin(kind="own"))
    received = SavedTensor(index=1, nbytes=8, dtype="uint8", origin=Origin(kind="input"))
    layers = [
        replace(make_layer(), saved=(output, received) if n and next_saves else (output,)) for n in range(2)
    ]
    return chain_profile(layers)


def test_what_the_next_layer_reads_cannot_be_freed() -> None:
    """An offload of a layer's output may be joined when the next layer's forward is over, not before."""
    plan = make_plan(saves_output(), [2], microbatches=1)
    early = "0LOAD0 0F0[0:1] 0OFFLOAD0[0.0]@host 0WAIT_OFFLOAD0[0.0]@host 0F0[1:2]"
    with pytest.raises(UsageError, match="frees a tensor that the forward of layer 1 still reads"):
        simulate(
            plan, program=parse_program(f"device 0: {early}", placement=((0,),), microbatches=1), steps=1
        )
    late = "0LOAD0 0F0[0:1] 0OFFLOAD0[0.0]@host 0F0[1:2] 0WAIT_OFFLOAD0[0.0]@host"
    simulate(plan, program=parse_program(f"device 0: {late}", placement=((0,),), microbatches=1), steps=1)


def test_what_is_being_sent_cannot_be_freed() -> None:
    """An offload of a stage's output may be joined when its send is joined, not before."""
    plan = make_plan(saves_output(), [1, 1], microbatches=1)
    receiver = "device 1: 1RECV_F0 1WAIT_RECV_F0"
    text = "device 0: 0LOAD0 0F0 0SEND_F0 0OFFLOAD0[0.0]@host {} {}\n" + receiver
    joins = "0WAIT_OFFLOAD0[0.0]@host", "0WAIT_SEND_F0"
    with pytest.raises(UsageError, match="still being sent: 0WAIT_SEND_F0 must come before it"):
        simulate(
            plan,
            program=parse_program(
                text.format(*joins),
                placement=((0,), (1,)),
                microbatches=1,
            ),
            steps=1,
        )
    simulate(
        plan,
        program=parse_program(
            text.format(*reversed(joins)),
            placement=((0,), (1,)),
            microbatches=1,
        ),
        steps=1,
    )


def test_a_storage_that_two_layers_save_moves_once_and_is_needed_by_both() -> None:
    """Layer 0's output, saved by both layers, moves under either name, and must be back for layer 1's
    backward.
    """
    plan = make_plan(saves_output(next_saves=True), [2], microbatches=1)
    away = "0LOAD0 0F0[0:1] 0F0[1:2] 0OFFLOAD0[1.1]@host 0WAIT_OFFLOAD0[1.1]@host"
    for text, message in (
        (f"{away} 0OFFLOAD0[0.0]@host 0WAIT_OFFLOAD0[0.0]@host", "offloads a storage that is away already"),
        (f"{away} 0B0[1:2]", "needs a saved tensor of layer 0 and 1 that is away"),
    ):
        with pytest.raises(UsageError, match=message):
            simulate(
                plan, program=parse_program(f"device 0: {text}", placement=((0,),), microbatches=1), steps=1
            )
    back = f"{away} 0RELOAD0[0.0]@host 0WAIT_RELOAD0[0.0]@host 0B0 0STEP"
    trace = simulate(
        plan, program=parse_program(f"device 0: {back}", placement=((0,),), microbatches=1), steps=2
    )
    assert Category.ACTIVATIONS not in trace.devices[0].memory[-1].by_category
