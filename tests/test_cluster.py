"""Clusters: routes, wires, the emulated form, and refusals."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from pipefit import text
from pipefit.errors import UsageError
from pipefit.schema.cluster import Cluster, parse_emulated
from pipefit.schema.devices import Device, DeviceKind, Host, Link, Member, MemberKind, Overheads
from pipefit.schema.json_io import load_cluster
from pipefit.units import MIB
from support.pipelines import KIND, make_cluster


def link(
    *members: str, speed: float = 1e9, latency: float = 0.0, lanes: int = 1, wire: str | None = None
) -> Link:
    """Return a link of a gigabyte per second, unless given."""
    return Link.between(*members, bytes_per_second=speed, latency_seconds=latency, lanes=lanes, wire=wire)


def test_a_direct_link_carries_its_lanes_together() -> None:
    """A route over a link is as fast as its lanes together, after its latency."""
    route = make_cluster(2, link("device0", "device1", speed=25e9, latency=1e-6, lanes=2)).route(
        Member.device(0), Member.device(1)
    )
    assert route.bytes_per_second == 50e9
    assert route.seconds(50_000_000_000) == pytest.approx(1.000001)


def test_the_fastest_of_several_links_is_taken() -> None:
    """Between two members joined twice, bytes use the wider link."""
    cluster = make_cluster(
        2, link("device0", "device1", speed=10e9), link("device0", "device1", speed=4e9, lanes=3)
    )
    assert cluster.route(Member.device(0), Member.device(1)).bytes_per_second == 12e9


def test_copies_reach_a_part_of_a_links_rate() -> None:
    """A route has the given part of the link's rate; bytes use the link that is faster by this measure."""
    ends = "device0", "device1"
    wide = Link.between(*ends, bytes_per_second=10e9, lanes=2, efficiency=0.25)
    cluster = make_cluster(2, wide, link(*ends, speed=4e9))
    assert cluster.route(Member.device(0), Member.device(1)).bytes_per_second == 5e9
    assert cluster.route(Member.device(0), Member.device(1)).seconds(5_000_000_000) == 1.0
    slower = make_cluster(2, wide, link(*ends, speed=6e9))
    assert slower.route(Member.device(0), Member.device(1)).bytes_per_second == 6e9


def test_devices_without_a_link_talk_by_way_of_their_hosts() -> None:
    """A route over several links is as slow as the slowest, adds up their latencies and occupies all their
    wires.
    """
    devices = tuple(Device(kind=KIND, memory_bytes=1, host=number) for number in range(2))
    links = (
        link("device0", "host0", speed=16e9, latency=1e-6, wire="a"),
        link("host0", "host1", speed=2e9, latency=5e-6, wire="net"),
        link("device1", "host1", speed=8e9, latency=2e-6, wire="b"),
    )
    hosts = (Host(memory_bytes=1), Host(memory_bytes=1))
    cluster = Cluster(name="two", backend="emulated", devices=devices, hosts=hosts, links=links)
    route = cluster.route(Member.device(0), Member.device(1))
    assert route.bytes_per_second == 2e9
    assert route.latency_seconds == pytest.approx(8e-6)
    assert route.wires == ("a:up", "net:up", "b:down")


def test_a_link_is_full_duplex() -> None:
    """The two directions between two members share no wire, with or without a switch."""
    for cluster in (make_cluster(2, link("device0", "device1")), make_cluster(2)):
        there, back = (
            cluster.route(Member.device(0), Member.device(1)),
            cluster.route(Member.device(1), Member.device(0)),
        )
        assert not set(there.wires) & set(back.wires)


def test_a_shared_wire_is_the_same_for_both_links() -> None:
    """Two devices on one uplink occupy the same wire on the way to the host."""
    cluster = make_cluster(
        2, link("device0", "host0", wire="uplink"), link("device1", "host0", wire="uplink")
    )
    assert (
        cluster.route(Member.device(0), Member.host(0)).wires
        == cluster.route(Member.device(1), Member.host(0)).wires
    )


def test_a_switch_gives_every_member_its_own_ports() -> None:
    """Pairs on a switch contend only if they share an end."""
    cluster = make_cluster(4)
    first, other = (
        cluster.route(Member.device(0), Member.device(1)).wires,
        cluster.route(Member.device(2), Member.device(3)).wires,
    )
    assert not set(first) & set(other)
    assert set(first) & set(cluster.route(Member.device(2), Member.device(1)).wires)


def test_members_that_nothing_joins_are_named() -> None:
    """The message for a missing link names the missing step of the route."""
    cluster = make_cluster(3, link("device0", "device1"), link("device0", "host0"))
    with pytest.raises(UsageError, match="host0 and device2 are not connected"):
        cluster.route(Member.device(0), Member.device(2))


@pytest.mark.parametrize(
    ("text", "budgets"),
    [
        ("emulated:4x256MiB", (256 * MIB,) * 4),
        ("emulated:2x256MiB+1x128MiB", (256 * MIB, 256 * MIB, 128 * MIB)),
        ("emulated:1x1000B", (1000,)),
    ],
)
def test_the_emulated_form_parses_and_names_itself(text: str, budgets: tuple[int, ...]) -> None:
    """`emulated:...` gives these budgets, in order, and a cluster whose name parses back to it."""
    cluster = parse_emulated(text)
    assert cluster.budgets == budgets
    assert parse_emulated(cluster.name) == cluster


@pytest.mark.parametrize(
    "text",
    [
        "emulated:",
        "emulated:4",
        "emulated:0x1GiB",
        "emulated:x1GiB",
        "emulated:4x",
        "emulated:4x0B",
        "emulated:9999x1B",
        "emulated:\N{SUPERSCRIPT TWO}x1GiB",
        f"emulated:{'9' * 5000}x1GiB",
        f"emulated:2x{'9' * 400}GB",
    ],
)
def test_what_is_no_emulated_cluster_is_refused(text: str) -> None:
    """Missing devices, missing memory, too many devices and unreadable texts are refused."""
    with pytest.raises(UsageError):
        parse_emulated(text)


def test_impossible_clusters_are_refused() -> None:
    """Devices on missing hosts, links to missing members and impossible figures are refused by name."""
    with pytest.raises(UsageError, match="names host 1"):
        Cluster(
            name="c",
            backend="cpu",
            devices=(Device(kind=KIND, memory_bytes=1, host=1),),
            hosts=(Host(memory_bytes=1),),
        )
    with pytest.raises(UsageError, match="device7"):
        make_cluster(2, link("device0", "device7"))
    with pytest.raises(UsageError, match="two or more different members"):
        link("device0", "device0")
    for impossible in (0.0, inf, nan):
        with pytest.raises(UsageError, match=r"must be positive.* finite"):
            link("device0", "device1", speed=impossible)
        with pytest.raises(UsageError, match=r"must be positive.* finite"):
            Cluster.preset("4x-titan-rtx").machines(2, impossible)
        with pytest.raises(UsageError, match="memory_bandwidth must be positive and finite"):
            Host(memory_bytes=1, memory_bandwidth=impossible)
        for figures in ({"flops": {"float32": impossible}}, {"memory_bandwidth": impossible}):
            with pytest.raises(UsageError, match="positive and finite"):
                DeviceKind(**{"name": "k", "flops": {"float32": 1.0}, "memory_bandwidth": 1.0, **figures})
    with pytest.raises(UsageError, match="latency non-negative, and all finite"):
        link("device0", "device1", latency=inf)
    for duplex in (0.4, 1.5):
        with pytest.raises(UsageError, match="duplex is the fraction of its rate that each direction keeps"):
            Link.between("device0", "device1", bytes_per_second=1.0, duplex=duplex)
    for efficiency in (0.0, 1.5):
        with pytest.raises(UsageError, match="above 0 and at most 1"):
            Link.between("device0", "device1", bytes_per_second=1.0, efficiency=efficiency)
    with pytest.raises(UsageError, match="at least one device"):
        Cluster(name="c", backend="cpu", devices=(), hosts=())
    with pytest.raises(UsageError, match="memory_bandwidth"):
        DeviceKind(name="k", flops={}, memory_bandwidth=1.0)
    figures = {"name": "k", "flops": {"float32": 1.0}, "memory_bandwidth": 1.0}
    for wrong in ({"bandwidth_reached": 1.1}, {"flops_reached": {"float32": 0.0}}):
        with pytest.raises(UsageError, match="fractions of the peak figures"):
            DeviceKind(**figures, **wrong)
    with pytest.raises(UsageError, match="operation_seconds must be at least 0"):
        DeviceKind(**figures, operation_seconds=-1.0)
    with pytest.raises(UsageError, match="multiprocessors must be from 1 to 65536, not 0"):
        DeviceKind(**figures, multiprocessors=0)
    with pytest.raises(UsageError, match="zero or more bytes"):
        Overheads(context_bytes=-1)


def test_a_dtype_without_a_figure_runs_at_the_float32_rate() -> None:
    """`peak_flops` falls back to float32, then to the slowest listed."""
    assert (
        DeviceKind(name="k", flops={"float32": 2.0, "float16": 8.0}, memory_bandwidth=1.0).peak_flops(
            "bfloat16"
        )
        == 2.0
    )
    assert (
        DeviceKind(name="k", flops={"bfloat16": 3.0, "float16": 8.0}, memory_bandwidth=1.0).peak_flops(
            "float32"
        )
        == 3.0
    )


def test_a_disk_has_the_number_of_its_host() -> None:
    """If only the second of two hosts has a disk, that disk is number 1, and disk 0 does not exist."""
    hosts = (Host(memory_bytes=1), Host(memory_bytes=1, disk_bytes=1))
    cluster = Cluster(name="c", backend="cpu", devices=(Device(kind=KIND, memory_bytes=1),), hosts=hosts)
    cluster.check(Member(MemberKind.DISK, 1), "a place")
    for missing in (0, 2):
        with pytest.raises(
            UsageError,
            match=f"a place of cluster 'c' names disk{missing}, but the cluster has 1 disks, of hosts .1.",
        ):
            cluster.check(Member(MemberKind.DISK, missing), "a place")


def test_a_tier_is_that_of_the_devices_own_host() -> None:
    """A host or disk without a number is the device's own; a number selects one, reached through that
    host.
    """
    hosts = tuple(Host(memory_bytes=n, disk_bytes=10 * n) for n in (1, 2))
    devices = tuple(Device(kind=KIND, memory_bytes=5, host=n) for n in (0, 1))
    links = (
        link("device0", "host0", speed=4.0),
        link("device1", "host1", speed=8.0),
        link("host0", "host1", speed=2.0),
        link("host1", "disk1", speed=3.0),
    )
    cluster = Cluster(name="c", backend="cpu", devices=devices, hosts=hosts, links=links)
    host, disk = Member.host(), Member(MemberKind.DISK, None)
    assert [cluster.tier(n, host)[:2] for n in (0, 1)] == [(1, 4.0), (2, 8.0)]
    assert cluster.tier(1, disk)[:2] == (20, 3.0)
    assert cluster.tier(0, Member.host(1))[:2] == (2, 2.0)
    assert cluster.tier(0, Member.device(1))[:2] == (5, 2.0)
    with pytest.raises(UsageError, match="host0 and disk0 are not connected"):
        cluster.tier(0, disk)


@pytest.mark.parametrize("name", ["emulated:4x256MiB", "4x-titan-rtx", "dgx1-v100"])
def test_copies_of_a_device_are_connected_as_it_is(name: str) -> None:
    """A copy has the device's own routes to its host and to the other devices, and a route to each other copy."""
    cluster = load_cluster(name)
    more, first = cluster.with_copies(0, 2), len(cluster.devices)
    others = [Member.host(cluster.devices[0].host), *map(Member.device, range(1, first))]
    for number in (first, first + 1):
        for other in others:
            copied, own = (more.route(Member.device(one), other) for one in (number, 0))
            assert (copied.bytes_per_second, copied.latency_seconds) == (
                own.bytes_per_second,
                own.latency_seconds,
            )
    more.route(Member.device(first), Member.device(first + 1))


def test_devices_of_one_host_use_pcie_next_to_a_slow_network() -> None:
    """In a box of cards on a network, two cards exchange data over PCIe, which the matrix of rates marks; cards of
    different boxes, and boxes on a faster network, use the network.
    """
    box = load_cluster("2x-rtx-3090")
    slow, fast = box.machines(2, 1e9), box.machines(2, 1e11)
    inside, between = (Member.device(0), Member.device(1)), (Member.device(0), Member.device(2))
    assert slow.route(*inside) == box.route(*inside) and not slow.route(*inside).direct
    assert slow.route(*between).bytes_per_second == 1e9 and slow.route(*between).direct
    assert fast.route(*inside).bytes_per_second == 1e11
    assert "26.14*" in text(slow)


def test_a_link_to_another_host_needs_no_path_through_the_first() -> None:
    """A device that is linked to another host alone reaches it over this link, in both directions. Two devices of
    different hosts use their link, though both also have one to the first host.
    """
    links = (Link.between("device0", "host1", bytes_per_second=8.0),)
    there = replace(make_cluster(1), hosts=(Host(memory_bytes=1),) * 2, links=links)
    ends = Member.device(0), Member.host(1)
    assert there.route(*ends).bytes_per_second == there.route(*ends[::-1]).bytes_per_second == 8.0
    one, other = make_cluster(2).devices
    links = (
        Link.between("device0", "device1", bytes_per_second=2.0),
        *(Link.between(f"device{number}", "host0", bytes_per_second=8.0) for number in range(2)),
    )
    apart = replace(there, devices=(one, replace(other, host=1)), links=links)
    assert apart.route(Member.device(0), Member.device(1)).bytes_per_second == 2.0


def test_a_switch_reduces_at_a_share_of_its_rate() -> None:
    """The share is from 0 to 1, and printed."""
    assert "the switch reduces data (NVLink SHARP), at 74% of it:" in text(load_cluster("hgx-h100"))
    for share in (-0.1, 1.1):
        with pytest.raises(UsageError, match="reduces is the fraction of its rate"):
            Link.between("device0", "device1", bytes_per_second=1.0, reduces=share)
