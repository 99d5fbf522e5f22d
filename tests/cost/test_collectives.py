"""Bytes and time of collectives, against rings and trees followed message by message."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import chain, pairwise, product
from typing import NamedTuple

import pytest

from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import Link, Member
from pipefit.schema.json_io import load_cluster
from pipefit.schema.layer_costs import Collective
from pipefit.simulator import Simulation
from pipefit.timing import (
    PLAIN,
    SIMPLE,
    Group,
    Hop,
    LinkCollective,
    brought_by_owners,
    sum_for_all,
    sum_for_owners,
    ways_of_sum,
)
from support.pipelines import make_cluster
from support.replica_profiles import gridded

REACHED = 0.92  # share of a ring's rate that NCCL's trees reach
HEAD = """name = "made"
backend = "{backend}"
kinds.fast = {{ flops = {{ float32 = 1e13 }}, memory_bandwidth = "1TB/s" }}
"""
DEVICES = '[[devices]]\ncount = {count}\nkind = "fast"\nmemory = "1GiB"\nhost = {host}\n'
HOST = '[[hosts]]\nmemory = "64GiB"\n'
LINK = '[[links]]\nmembers = ["{members}"]\nbytes_per_second = "{rate}MB/s"\nlatency_seconds = {latency}\n'


def hosts(
    *counts: int, near: float = 1e-6, far: float = 1e-5, rates: tuple[int, int] = (100, 10), on: str
) -> Cluster:
    """Build hosts of `each` devices: a fast switch inside, and a slow one between all."""
    text, first = HEAD.format(backend=on) + HOST * len(counts), 0
    text += "".join(DEVICES.format(count=count, host=host) for host, count in enumerate(counts))
    for count in counts:
        if count > 1:
            text += LINK.format(members=f"device{first}-{first + count - 1}", rate=rates[0], latency=near)
        first += count
    return Cluster.parse(text + LINK.format(members="device*", rate=rates[1], latency=far))


# ---------------------------------------------------------------- messages, one by one


class Message(NamedTuple):
    """A message of some bytes from one member to another, sent after other messages, by their numbers, have
    arrived.
    """

    source: int
    target: int
    nbytes: float
    after: tuple[int, ...]


def followed(cluster: Cluster, messages: Sequence[Message], reached: float = 1.0) -> float:
    """Return the arrival of the last message: each takes the wires of its route in order, as packets do in a
    switch, first come first served on each wire, and then travels for the latency.
    """
    missing, ready, behind = (
        [len(one.after) for one in messages],
        [0.0] * len(messages),
        defaultdict[int, list[int]](list),
    )
    for number, one in enumerate(messages):
        for before in one.after:
            behind[before].append(number)
    free, events = (
        defaultdict[str, float](float),
        [(0.0, number, 0) for number, left in enumerate(missing) if not left],
    )
    while events:
        now, number, passed = heappop(events)
        one = messages[number]
        route = cluster.route(Member.device(one.source), Member.device(one.target))
        if passed < len(route.wires):
            wire = route.wires[passed]
            free[wire] = max(now, free[wire]) + one.nbytes / (route.bytes_per_second * reached)
            heappush(events, (free[wire], number, passed + 1))
            continue
        ready[number] = now + route.latency_seconds
        for later in behind[number]:
            missing[later] -= 1
            if not missing[later]:
                heappush(events, (max(ready[before] for before in messages[later].after), later, 0))
    assert not any(missing)
    return max(ready)


def around(members: Sequence[int], nbytes: int, turns: int, pieces: int) -> list[Message]:
    """Build a ring's messages: a part of each member in `pieces` pieces goes to all others, and around again
    for a sum.
    """
    found, count = list[Message](), len(members)
    for part, _ in product(range(count), range(pieces)):
        for step in range(turns * (count - 1)):
            source, target = members[(part + step) % count], members[(part + step + 1) % count]
            after = (len(found) - 1,) if step else ()
            found.append(Message(source, target, nbytes / count / pieces, after))
    return found


def binary(count: int) -> dict[int, int]:
    """Return the parent of every place but the first in an in-order tree: the middle of a part above the
    middles of its halves; past the end of the places only the left half.
    """
    above = dict[int, int]()

    def part(low: int, size: int, over: int) -> None:
        middle = low + size // 2
        if size > 1 and middle < count:
            above[middle] = over
            part(low, size // 2, middle)
            part(middle, size // 2, middle)
        elif size > 1:
            part(low, size // 2, over)

    part(0, 1 << count.bit_length(), 0)
    return above


def turned(counts: Sequence[int], first: int) -> list[list[int]]:
    """Return the devices of every host, numbered host by host, from number `first` of the host on."""
    begins = [sum(counts[:host]) for host in range(len(counts))]
    return [
        [begin + (first + n) % count for n in range(count)]
        for begin, count in zip(begins, counts, strict=True)
    ]


def trees(counts: Sequence[int], first: int = 0) -> Iterator[dict[int, int]]:
    """Build two trees of devices numbered host by host: the parent of each, except the root.

    Hosts are joined by their devices of number `first`.
    """
    chains, number = turned(counts, first), len(counts)
    firsts = [own[0] for own in chains]
    inside = {one: before for own in chains for before, one in pairwise(own)}
    for host_at in (
        lambda place: place,
        lambda place: (place + 1) % number if number % 2 else number - 1 - place,
    ):
        yield inside | {firsts[host_at(one)]: firsts[host_at(over)] for one, over in binary(number).items()}


def up_and_down(every: Sequence[dict[int, int]], nbytes: float, pieces: int) -> list[Message]:
    """Build sums of `pieces` pieces of a half up each tree, and down again. Every hop has room for one piece,
    as NCCL's have for some: it begins after the one before has arrived.
    """
    found, before = list[Message](), dict[tuple[int, int, int], int]()
    for _, (tree, above) in product(range(pieces), enumerate(every)):
        below = defaultdict[int, list[int]](list)
        for one, over in above.items():
            below[over].append(one)

        def send(source: int, target: int, after: Sequence[int], tree: int = tree) -> int:
            room = before.get((tree, source, target))
            before[tree, source, target] = len(found)
            found.append(
                Message(source, target, nbytes / 2 / pieces, (*after, *(() if room is None else (room,))))
            )
            return before[tree, source, target]

        def rise(one: int, below: dict[int, list[int]] = below) -> list[int]:
            return [send(child, one, rise(child)) for child in below[one]]

        def fall(one: int, after: Sequence[int], below: dict[int, list[int]] = below) -> None:
            for child in below[one]:
                fall(child, [send(one, child, after)])

        root = next(iter({*above.values()} - {*above}))
        fall(root, rise(root))
    return found


# ---------------------------------------------------------------- rings


@pytest.mark.parametrize("members", [[0, 1], [3, 1, 2], [0, 1, 2, 3, 4]])
def test_a_ring_sends_what_its_rounds_send(members: list[int]) -> None:
    """Every member has one part for each member, and passes one on in every round until all have all sums."""
    count, part = len(members), 60
    held = [[{(member, number)} for number in range(count)] for member in members]  # addends of each part
    sent = [0] * count
    for turn in range(2 * (count - 1)):
        moving = [(n, (n - turn) % count) for n in range(count)]
        given = [set(held[n][number]) for n, number in moving]
        for (n, number), addends in zip(moving, given, strict=True):
            held[(n + 1) % count][number] |= addends
            sent[n] += part
    assert all(addends == {(m, k) for m in members} for own in held for k, addends in enumerate(own))
    following = [*members[1:], members[0]]
    assert sum_for_all(make_cluster(5), members, count * part).hops == tuple(
        map(Hop._make, zip(members, following, sent, strict=True))
    )


def test_a_sum_of_one_is_none() -> None:
    """A group of one sends nothing, for any collective."""
    cluster = hosts(3, 2, on="cuda")
    one = [Collective("all_reduce", 100), Collective("all_gather", 100)]
    assert (
        sum_for_all(cluster, [4], 100) == sum_for_owners(cluster, [4], [9]) == LinkCollective((), 0.0, {}, {})
    )
    assert Group.of(cluster, [4]).seconds(one) == 0.0


def test_a_step_ends_with_the_sum_of_its_gradients() -> None:
    """With layers and messages of zero time the step is the ring, with the delay of each round."""
    rate, delay = 64.0, 0.5
    plan = gridded(3, samples=6, bytes_per_second=rate, latency_seconds=delay, seconds=0.0)
    gradients = sum(cost.gradient_bytes for cost in plan.measured(0).costs)
    share = 2 * 2 * gradients // 3
    assert gradients
    assert Simulation(plan, steps=1).step_seconds == (pytest.approx(share / rate + 4 * delay),)


@pytest.mark.parametrize("counts", [(4,), (2, 2), (3, 1, 2), (1, 1, 1)])
@pytest.mark.parametrize("turns", [1, 2])
def test_a_ring_takes_what_its_messages_take(counts: tuple[int, ...], turns: int) -> None:
    """Rings take their messages' time within a host and over several, for sums and halves: delays exactly to
    the bit, many pieces nearly.
    """
    cluster, members, nbytes = hosts(*counts, on="cpu"), range(sum(counts)), 1_200_000 * sum(counts)
    each = [nbytes // len(members)] * len(members)
    for half in (sum_for_owners, brought_by_owners):
        found = sum_for_all(cluster, members, nbytes) if turns == 2 else half(cluster, members, each)
        assert followed(cluster, around(members, 0, turns, 1)) == pytest.approx(found.delay_seconds)
        assert followed(cluster, around(members, nbytes, turns, 50)) == pytest.approx(found.seconds, rel=0.04)


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of NCCL's collectives travel as messages do, with the latencies of links."""
    monkeypatch.setattr("pipefit.timing.protocols_of", lambda _: (PLAIN,))


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("counts", [(2, 2), (3, 2, 2), (4, 4)])
@pytest.mark.parametrize("turns", [1, 2])
def test_rings_use_every_port_of_a_host(counts: tuple[int, ...], turns: int) -> None:
    """With a network port for each device, NCCL has a ring for each, of an equal part of the bytes: all rings
    together take their messages' time.
    """
    cluster, members, nbytes = hosts(*counts, on="cuda"), range(sum(counts)), 1_200_000 * sum(counts)
    each = [nbytes // len(members)] * len(members)
    rings = [[*chain.from_iterable(turned(counts, first))] for first in range(min(counts))]
    messages: list[Message] = []
    for ring in rings:
        start = len(messages)
        messages += [
            one._replace(after=tuple(start + before for before in one.after))
            for one in around(ring, nbytes // len(rings), turns, 50)
        ]
    for half in (sum_for_owners, brought_by_owners):
        found = ways_of_sum(cluster, members, nbytes)[0] if turns == 2 else half(cluster, members, each)
        assert followed(cluster, around(members, 0, turns, 1)) == pytest.approx(found.delay_seconds)
        assert followed(cluster, messages) == pytest.approx(found.seconds, rel=0.05)


# ---------------------------------------------------------------- trees


FIRST = {1: 2, 3: 2, 5: 6, 7: 6, 9: 10, 11: 10, 2: 4, 6: 4, 10: 12, 4: 8, 12: 8, 8: 0}


@pytest.mark.parametrize(
    ("count", "first", "second"),
    [
        (14, FIRST | {13: 12}, {13 - one: 13 - above for one, above in (FIRST | {13: 12}).items()}),
        (13, FIRST, {(one + 1) % 13: (above + 1) % 13 for one, above in FIRST.items()}),
    ],
)
def test_trees_are_those_of_nccl(count: int, first: dict[int, int], second: dict[int, int]) -> None:
    """Trees follow NCCL's source: for 14 hosts the second is the mirror image, for 13 it is
    shifted by one.
    """
    assert [*trees([1] * count)] == [first, second]
    found = ways_of_sum(hosts(*[1] * count, on="cuda"), range(count), 2, (PLAIN,))[1]
    drawn = Counter(pair for tree in (first, second) for one in tree.items() for pair in (one, one[::-1]))
    assert Counter((hop.source, hop.target) for hop in found.hops) == drawn


COUNTS = [(1, 1), (4, 4), (2, 1, 3), (2, 2, 2, 2), (1,) * 5, (2,) * 7, (1,) * 16]


@pytest.mark.parametrize("counts", COUNTS)
def test_trees_take_what_their_messages_take(counts: tuple[int, ...]) -> None:
    """Trees take their messages' time: delays exactly to the bit, many pieces nearly; no host sends or
    receives more than twice the bytes.
    """
    cluster, members, nbytes = hosts(*counts, on="cuda"), range(sum(counts)), 3_000_000
    ring, found = ways_of_sum(cluster, members, nbytes, (PLAIN,))
    channels = min(counts)
    every = [tree for first in range(channels) for tree in trees(counts, first)]
    assert followed(cluster, up_and_down(every, 0, 1)) == pytest.approx(found.delay_seconds)
    assert followed(cluster, up_and_down(every, nbytes / channels, 100), REACHED) == pytest.approx(
        found.seconds, rel=0.05
    )
    host = [number for number, count in enumerate(counts) for _ in range(count)]
    for ends in zip(*((host[hop.source], host[hop.target]) for hop in found.hops), strict=True):
        sent = defaultdict[int, float](float)
        for end, hop in zip(ends, found.hops, strict=True):
            sent[end] += hop.nbytes * (host[hop.source] != host[hop.target])
        assert max(sent.values()) <= 2 * nbytes
    assert (ring == sum_for_all(hosts(*counts, on="cpu"), members, nbytes)) == (channels == 1)


@pytest.mark.parametrize("each", [1, 4, 8])
def test_delays_grow_as_nccl_reckons(each: int) -> None:
    """On a power of two of hosts, delays of trees grow with the logarithm of hosts, those of
    rings linearly.
    """
    near, far = 1e-6, 1e-5
    for power in range(1, 7):
        cluster = hosts(*[each] * (1 << power), on="cuda")
        ring, tree = ways_of_sum(cluster, range(each << power), 8, (PLAIN,))
        assert tree.delay_seconds == pytest.approx(2 * ((each - 1) * near + power * far))
        between = 2 * ((1 << power) - 1)
        reckoned = between * far + (2 * ((each << power) - 1) - between) * near
        assert reckoned < ring.delay_seconds * (1 + 1e-9) < reckoned + 2.001 * (far - near)


# ---------------------------------------------------------------- which of them


@pytest.mark.usefixtures("plainly")
@pytest.mark.parametrize("on", ["emulated", "cpu", "cuda"])
def test_nccl_takes_trees_over_hosts_where_they_are_faster(on: str) -> None:
    """Few bytes over many hosts use trees, many use a ring; gloo and a single host have rings only."""
    several, members = hosts(*[4] * 8, on=on), range(32)
    few, many = sum_for_all(several, members, 1000), sum_for_all(several, members, 1 << 40)
    ways = ways_of_sum(several, members, 1000)
    assert len(ways) == 1 + (on == "cuda")
    assert few == min(ways, key=lambda way: way.seconds) == ways[-1]
    assert many == ways_of_sum(several, members, 1 << 40)[0]
    assert len(ways_of_sum(several, members[:4], 1000)) == 1
    assert len(ways_of_sum(several, members[3:5], 1000)) == len(ways)


def test_between_two_hosts_trees_carry_less() -> None:
    """A host sends all bytes once in trees, nearly twice in a ring: two hosts use trees for many bytes too,
    as NCCL does.
    """
    cluster = hosts(8, 8, rates=(1000, 10), on="cuda")
    ring, trees = ways_of_sum(cluster, range(16), 1 << 30, (SIMPLE,))
    assert sum_for_all(cluster, range(16), 1 << 30) == trees
    assert ring.seconds / trees.seconds == pytest.approx(2 * 15 / 16 * REACHED, rel=1e-3)


def test_hosts_that_nothing_joins_are_no_tree() -> None:
    """In a row of four hosts the outer ones only reach their neighbours, so there are no trees."""
    text = (
        HEAD.format(backend="cuda")
        + HOST * 4
        + "".join(DEVICES.format(count=1, host=host) for host in range(4))
    )
    pairs = [*pairwise(range(4)), (3, 0)]
    text += "".join(LINK.format(members=f'device{a}", "device{b}', rate=1, latency=0) for a, b in pairs)
    assert len(ways_of_sum(Cluster.parse(text), range(4), 8, (SIMPLE,))) == 1


@pytest.mark.parametrize("members", [2, 3])
def test_a_ring_goes_both_ways_over_every_link(members: int) -> None:
    """Each member sends and receives all the time, so links with slower opposite directions slow the whole
    ring, also in the simulator. Latencies hold no link, so they are not slowed.
    """
    alone = gridded(members, samples=6, bytes_per_second=64.0, latency_seconds=0.5, seconds=0.0)
    uplinks = [
        Link.between(f"device{n}", "host0", bytes_per_second=64.0, latency_seconds=0.25, duplex=0.5)
        for n in range(members)
    ]
    hindered = replace(alone, cluster=replace(alone.cluster, links=tuple(uplinks)))
    nbytes = sum(cost.gradient_bytes for cost in alone.measured(0).costs)
    sent = 2 * (members - 1) * nbytes // members
    ring = sum_for_all(hindered.cluster, range(members), nbytes)
    assert ring.seconds == pytest.approx(2 * sent / 64 + 2 * (members - 1) * 0.5)
    assert Simulation(hindered, steps=1).step_seconds == (pytest.approx(ring.seconds),)
    much, group = members << 20, Group.of(hindered.cluster, range(members))
    expected = sum_for_all(hindered.cluster, range(members), much).seconds
    assert group.seconds([Collective("all_reduce", much)]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("counts", [(4, 4), (2, 1, 3), (2,) * 8])
def test_a_group_takes_what_its_exchanges_take(counts: tuple[int, ...]) -> None:
    """A group takes its exchanges' time, for few and many bytes: all-reduce, reduce-scatter
    and all-gather.
    """
    cluster, members = hosts(*counts, on="cuda"), range(sum(counts))
    group, taken = Group.of(cluster, members), set[int]()
    for nbytes in (len(members) * 10**power for power in range(1, 11)):
        each = [nbytes // len(members)] * len(members)
        whole = sum_for_all(cluster, members, nbytes)
        taken.add(ways_of_sum(cluster, members, nbytes).index(whole))
        assert group.seconds([Collective("all_reduce", nbytes)]) == pytest.approx(whole.seconds, rel=1e-6)
        for kind, half in (("reduce_scatter", sum_for_owners), ("all_gather", brought_by_owners)):
            found = group.seconds([Collective(kind, nbytes)])  # type: ignore[arg-type]
            assert found == pytest.approx(half(cluster, members, each).seconds, rel=1e-6)
    assert len(taken) >= 2


# ---------------------------------------------------------------- NCCL's protocols

# Seconds of a hop of rings and trees over NVLink, PCIe and a network, in LL, LL128 and Simple, and of the start of a
# collective, in microseconds: `ncclTunerConstantsDefaults` of NCCL 2.29
HOPS = {
    "ring": {"nvlink": (0.6, 1.9, 3.4), "pcie": (1.0, None, 5.7), "network": (2.7, 4.0, 14.0)},
    "tree": {"nvlink": (0.6, 1.25, 4.0), "pcie": (1.0, None, 4.0), "network": (5.0, 8.5, 14.0)},
}
STARTS = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4)}


@pytest.mark.parametrize("near", ["nvlink", "pcie"])
@pytest.mark.parametrize(("several", "each"), [(1, 2), (1, 8), (2, 4), (4, 1), (4, 8)])
def test_collectives_have_the_delays_of_nccl(near: str, several: int, each: int) -> None:
    """Every protocol and algorithm has the delay of NCCL's formula: a ring's steps within hosts and between them, or
    twice a tree's way to the root. The last part of a ring passes all hops between hosts twice, though NCCL counts
    fewer; and a network counts with its latency if that is longer, though NCCL adds it.
    """
    far = 1e-6 if near == "nvlink" else 1e-5
    cluster = hosts(*[each] * several, far=far, rates=(100_000, 10_000), on="cuda")
    if near == "pcie":
        box = load_cluster(f"{each}x-rtx-3090")
        cluster = box if several == 1 else box.machines(several, 1e10)
    members, network = range(several * each), 1e6 * far
    expected = list[float]()
    for protocol in range(3):
        ring, tree = (HOPS[one][near][protocol] for one in ("ring", "tree"))
        inner = each > 1
        over = [max(HOPS[one]["network"][protocol], network) for one in ("ring" if inner else "tree", "tree")]
        if several > 1 and ring is not None:
            ring = max(ring, (1.0, 1.0, 3.0)[protocol])
        if (inner and ring is None) or (several > 1 and inner and tree is None):
            continue
        between = 2 * several if several > 1 and inner else 2 * (several - 1)  # NCCL counts the latter
        steps = 2 * (several * each - 1) - between
        expected.append(STARTS["ring"][protocol] + steps * (ring or 0) + between * over[0])
        if several > 1:
            way = (each - 1) * (tree or 0) + (several.bit_length() - 1) * over[1]
            expected.append(STARTS["tree"][protocol] + 2 * way)
    found = sorted(1e6 * way.delay_seconds for way in ways_of_sum(cluster, members, 8))
    assert found == pytest.approx(sorted(expected), rel=0.05)


def test_protocols_trade_latency_for_rate() -> None:
    """With more bytes, NCCL sends first in LL, then in LL128 over NVLink, and in blocks at last."""
    for cluster, protocols in ((Cluster.preset("dgx-a100"), 3), (load_cluster("8x-rtx-3090"), 2)):
        ways = [
            ways_of_sum(cluster, range(8), 1 << power).index(sum_for_all(cluster, range(8), 1 << power))
            for power in range(3, 32)
        ]
        assert ways == sorted(ways, reverse=True)
        assert len(set(ways)) == protocols


def bus_rate(cluster: Cluster, nbytes: int) -> float:
    """Return an all-reduce's rate over eight devices as nccl-tests prints it: a ring's bytes a second on each link."""
    return 2 * 7 / 8 * nbytes / sum_for_all(cluster, range(8), nbytes).seconds


def test_switches_that_reduce_are_as_fast_as_published() -> None:
    """Eight H100 reach a bus rate of about 480 GB/s with NVLink SHARP, 370 without; eight A100 some 230. Pairs and
    several machines use rings and trees (NVIDIA/nccl-tests#212).
    """
    sharp, nbytes = Cluster.preset("hgx-h100"), 8 << 30
    plain = replace(sharp, links=tuple(replace(link, reduces=0.0) for link in sharp.links))
    assert bus_rate(sharp, nbytes) == pytest.approx(480e9, rel=0.03)
    assert bus_rate(plain, nbytes) == pytest.approx(370e9, rel=0.03)
    assert bus_rate(Cluster.preset("dgx-a100"), nbytes) == pytest.approx(240e9, rel=0.1)
    pair = ways_of_sum(sharp, [0, 1], nbytes)
    assert min(pair, key=lambda way: way.seconds) is pair[0]
    both = sharp.machines(2, 5e10)
    assert len(ways_of_sum(both, range(16), 8)) == len(ways_of_sum(plain.machines(2, 5e10), range(16), 8))
    few = [sum_for_all(sharp, range(8), 1 << power).seconds for power in (10, 15, 20)]
    assert [1e6 * seconds for seconds in few] == [
        pytest.approx(15, abs=2),
        pytest.approx(16, abs=2),
        pytest.approx(28, abs=2),
    ]
