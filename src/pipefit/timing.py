"""Seconds of layers and collectives: measured if the profile has seconds, otherwise estimated.

An operation is estimated by the roofline: the longer of two times, computing at a share of the device's peak
FLOP/s and moving bytes at a share of its memory bandwidth, since kernels reach neither figure (Williams et
al., 2009), plus a constant for its launch and for filling the device. So small operations reach less than
large ones. Convolutions have arithmetic of their own: tensor cores multiply float32 images in TF32, which
torch allows for convolutions by default, and convert images that are not channels last; elsewhere kernels of
3 x 3 use Winograd's transform. Depthwise kernels use no tensor cores. A GPU computes products in tiles, so
they reach their share only if the tiles fill its multiprocessors. The shares and the constant belong to the
kind (`schema.devices.DeviceKind`) and can be set. `benchmarks/bench_time.py` compares estimates with
published training throughput; for measured seconds, use `pipefit profile --device cpu|cuda`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain, pairwise
from math import fsum, inf
from typing import NamedTuple

from pipefit.errors import UsageError
from pipefit.schema.cluster import Cluster, opposite
from pipefit.schema.devices import DeviceKind, Host, Member
from pipefit.schema.layer_costs import Alike, Collective, Family, LayerCost, Work
from pipefit.schema.profile import Measurement
from pipefit.schema.training import Training

# ---- Collectives on the links of a cluster
#
# An all-reduce over n members uses a ring (Patarasuk and Yuan, 2009): in n - 1 rounds every member adds up
# one part of the bytes, and in n - 1 more the finished parts travel on. Every member sends 2 (n - 1) / n of
# the bytes to the next one, the least possible; and a part passes 2 (n - 1) hops. Gloo uses only the ring
# when torch calls it (`gloo::allreduce` without an algorithm), and so does NCCL within a host.
#
# Over several hosts NCCL also has two trees, and each tree adds up a half (Sanders, Speck and Traff, 2009):
# in every host a chain to its first member, and between hosts a binary tree. Sums go up to the root and down
# again. Inner members of one tree are leaves of the other, so no host sends more than twice the bytes. A part
# passes twice the hops of the longest path to the root: between hosts, the logarithm of their number. NCCL
# takes the algorithm that it estimates to be faster (`ncclTopoTuneModel`); so does this module.
#
# A host with a network port for each device has as many rings and trees over several hosts, which leave it by
# another device each and carry equal parts of the bytes: NCCL searches channels that use all ports. Gloo has
# one.
#
# A reduce-scatter to owners is the first half of a ring, an all-gather from owners the other half, with parts
# as large as the owners' shares. NCCL takes that long; gloo sends the sums to their owners in a second round.
#
# All hops run at once, each with another piece of the bytes. So a collective takes the latencies that a piece
# meets one after the other, plus the time of the busiest wire for its bytes.
#
# NCCL sends in one of three protocols: with a flag in every 8 bytes (LL), which is the first to arrive and
# reaches a part of the rates; with one in every 128 bytes (LL128), only over NVLink; or in blocks (Simple).
# It takes the fastest by its own figures (`ncclTunerConstantsDefaults` of NCCL 2.30), which are those below:
# a constant for each collective, the seconds of a hop, and the share of the rates. Links within a host then
# count with their rates alone; a message between hosts takes at least the latency of its route. NCCL adds a
# network's latency instead, and corrects rates of some sizes by tables, which are left out here.


class Sending(NamedTuple):
    """How an algorithm sends: seconds of its start and of hops, and the share of link rates that it reaches.

    Hops are over a link between devices, through a host, and between hosts; None means the latencies of
    links. Shares are those on one host and on several; so are the `limits`, in bytes a second of all rings
    together.
    """

    start: float
    hops: tuple[float, float, float] | None
    reaches: tuple[float, float]
    limits: tuple[float, float] = (inf, inf)


class Protocol(NamedTuple):
    """How rings and trees send; over several hosts each hop of a ring takes at least `posting` seconds."""

    ring: Sending
    tree: Sending
    posting: float = 0.0

    def around(self, chains: Sequence[Sequence[int]]) -> Sending:
        """Return how a ring sends around the members of these hosts."""
        if self.ring.hops is None or len(chains) < 2:
            return self.ring
        direct, through_host, between = (max(hop, self.posting) for hop in self.ring.hops)
        if self.tree.hops is not None and max(map(len, chains)) == 1:
            between = self.tree.hops[-1]  # no hops within hosts hide its latency
        return self.ring._replace(hops=(direct, through_host, between))


_TREE_REACHES = 0.92  # share of link rates, by NCCL's estimate
PLAIN = Protocol(Sending(0.0, None, (1.0, 1.0)), Sending(0.0, None, (_TREE_REACHES, _TREE_REACHES)))
_LL_LIMITS = 87.7e9, 20e9  # those of an A100, and of three hosts and more
LL = Protocol(
    Sending(6.6e-6, (0.6e-6, 1.0e-6, 2.7e-6), (0.5, 0.5), _LL_LIMITS),
    Sending(6.8e-6, (0.6e-6, 1.0e-6, 5.0e-6), (0.24, 0.24), _LL_LIMITS),
    posting=1e-6,
)
LL128 = Protocol(
    Sending(14e-6, (1.9e-6, inf, 4.0e-6), (0.92, 0.92)),
    Sending(14e-6, (1.25e-6, inf, 8.5e-6), (0.72, 0.86)),
    posting=1e-6,
)
SIMPLE = Protocol(
    Sending(8.4e-6, (3.4e-6, 5.7e-6, 14e-6), (1.0, 1.0)),
    Sending(8.4e-6, (4.0e-6, 4.0e-6, 14e-6), (_TREE_REACHES, _TREE_REACHES)),
    posting=3e-6,
)
NCCL = SIMPLE, LL128, LL
NVLS_SECONDS = (
    25e-6  # of an all-reduce in a switch, besides its bytes, which every member sends and receives once
)


class Hop(NamedTuple):
    """The bytes that one member sends to another in a collective."""

    source: int
    target: int
    nbytes: float


class LinkCollective(NamedTuple):
    """A collective over the links of a cluster.

    It has its hops, the latency of dependent messages, the seconds that each wire needs for the bytes of its
    hops, and the share of its rate that each wire keeps while its opposite direction is busy.
    """

    hops: tuple[Hop, ...]
    delay_seconds: float
    wire_seconds: dict[str, float]
    slowed: dict[str, float]

    @property
    def seconds(self) -> float:
        """Seconds on otherwise idle wires."""
        return self.seconds_of(1.0)

    def seconds_of(self, part: float) -> float:
        """Return the seconds with the share `part` of the bytes.

        Each direction of a wire is slowed until the direction that ends first has ended.
        """
        own, result = self.wire_seconds, self.delay_seconds
        for wire, slowed in self.slowed.items():
            other = opposite(wire) if slowed < 1.0 else None
            both = part * min(own[wire], own[other]) if other in own else 0.0
            result = max(result, self.delay_seconds + part * own[wire] + both * (1 / slowed - 1))
        return result

    def delay_on(self, wire: str) -> float:
        """Return the delay as seconds of use of a wire.

        It holds no wire. A wire is slowed while its other direction is in use, so the delay is shortened by
        this share.
        """
        return self.delay_seconds * (self.slowed[wire] if opposite(wire) in self.wire_seconds else 1.0)


def protocols_of(cluster: Cluster) -> tuple[Protocol, ...]:
    """Return the protocols in which a cluster's library for collectives may send."""
    return NCCL if cluster.backend == "cuda" else (PLAIN,)


def ways_of_sum(
    cluster: Cluster, members: Sequence[int], nbytes: int, protocols: Sequence[Protocol] | None = None
) -> list[LinkCollective]:
    """Return the ways of an all-reduce: the ring, and trees if several hosts take part, in every protocol.

    A switch that reduces is another way.
    """
    count, protocols = len(members), protocols or protocols_of(cluster)
    hops = _around(cluster, members, lambda _, __: 2 * (count - 1) * nbytes // count)
    result = _rings(cluster, members, hops, 2, protocols)
    if cluster.backend == "cuda" and count > 1 and (share := cluster.reduced_by_switch(members)):
        exchange = _exchange(cluster, _around(cluster, members, lambda _, __: nbytes))
        result.append(_sent(exchange, NVLS_SECONDS, share))
    channels = _channels(cluster, members)
    if cluster.backend == "cuda" and len(channels[0]) > 1:
        with suppress(UsageError):  # no link joins some of the hosts
            result += _double_trees(cluster, channels, nbytes, protocols)
    return result


def sum_for_all(cluster: Cluster, members: Sequence[int], nbytes: int) -> LinkCollective:
    """Return the fastest all-reduce of `nbytes` over devices."""
    return min(ways_of_sum(cluster, members, nbytes), key=lambda way: way.seconds)


def sum_for_owners(cluster: Cluster, members: Sequence[int], shares: Sequence[int]) -> LinkCollective:
    """Return a reduce-scatter over the ring, in which every member gets its share; `shares` are in bytes."""
    whole, share = sum(shares), dict(zip(members, shares, strict=True))
    hops = _around(cluster, members, lambda source, _: whole - share[source])
    return min(_rings(cluster, members, hops, 1, protocols_of(cluster)), key=lambda way: way.seconds)


def brought_by_owners(cluster: Cluster, members: Sequence[int], shares: Sequence[int]) -> LinkCollective:
    """Return an all-gather over the ring, in which every member sends its share to all others."""
    whole, share = sum(shares), dict(zip(members, shares, strict=True))
    hops = _around(cluster, members, lambda _, target: whole - share[target])
    return min(_rings(cluster, members, hops, 1, protocols_of(cluster)), key=lambda way: way.seconds)


class Line(NamedTuple):
    """Seconds of exchanges as a linear function of their bytes."""

    delay_seconds: float
    seconds_per_byte: float

    @staticmethod
    def of(exchange: LinkCollective, nbytes: int) -> Line:
        """Return the line through an exchange of `nbytes`."""
        delay = exchange.seconds_of(0.0)
        return Line(delay, (exchange.seconds - delay) / nbytes)

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of `nbytes`."""
        return self.delay_seconds + nbytes * self.seconds_per_byte


class Group(NamedTuple):
    """Costs of collectives of some devices on otherwise idle wires.

    `sums` are those of an all-reduce in each way, `halves` those of a reduce-scatter or all-gather.

    Groups on equal links are equal.
    """

    members: int
    sums: tuple[Line, ...]
    halves: tuple[Line, ...]

    @staticmethod
    def of(cluster: Cluster, devices: Sequence[int]) -> Group:
        """Return the group of these devices, in their order."""
        count, nbytes = len(devices), len(devices) << 30
        hops = _around(cluster, devices, lambda _, __: (count - 1) << 30)
        halves = _rings(cluster, devices, hops, 1, protocols_of(cluster))
        ways = ways_of_sum(cluster, devices, nbytes)
        sums, of_halves = (tuple(Line.of(way, nbytes) for way in every) for every in (ways, halves))
        return Group(count, sums, of_halves)

    def seconds(self, collectives: Iterable[Collective]) -> float:
        """Return the seconds of consecutive collectives."""
        return sum(map(self._seconds, collectives))

    def _seconds(self, collective: Collective) -> float:
        ways = self.sums if collective.kind == "all_reduce" else self.halves
        return min(way.seconds(collective.nbytes) for way in ways)


def _exchange(cluster: Cluster, hops: Iterable[Hop]) -> LinkCollective:
    """Return an exchange without delay whose hops reach the rates of their links."""
    hops, of_wires, slowed = tuple(hops), defaultdict[str, list[float]](list), dict[str, float]()
    for source, target, nbytes in hops:
        route = cluster.route(Member.device(source), Member.device(target))
        for wire, left in zip(route.wires, route.slowed, strict=True):
            of_wires[wire].append(nbytes / route.bytes_per_second)
            slowed[wire] = min(left, slowed.get(wire, 1.0))
    return LinkCollective(hops, 0.0, {wire: fsum(every) for wire, every in of_wires.items()}, slowed)


def _sent(exchange: LinkCollective, delay_seconds: float, reaches: float) -> LinkCollective:
    """Return the exchange with a delay and a share of the rates of its links."""
    wires = {wire: seconds / reaches for wire, seconds in exchange.wire_seconds.items()}
    return exchange._replace(delay_seconds=delay_seconds, wire_seconds=wires)


def _share(
    cluster: Cluster, exchange: LinkCollective, channels: int, sending: Sending, *, is_far: bool
) -> float:
    """Return the share of the rates of its links that an exchange reaches over all `channels` together."""
    reaches, limit = sending.reaches[is_far], sending.limits[is_far]
    if limit == inf:
        return reaches
    routes = (cluster.route(Member.device(hop.source), Member.device(hop.target)) for hop in exchange.hops)
    return min(reaches, limit / (channels * min(route.bytes_per_second for route in routes)))


def _latency(cluster: Cluster, source: int, target: int, sending: Sending) -> float:
    """Return the delay of a part on a hop, without the seconds of its bytes."""
    if source == target:
        return 0.0
    route = cluster.route(Member.device(source), Member.device(target))
    if sending.hops is None:
        return route.latency_seconds
    direct, through_host, between = sending.hops
    if cluster.devices[source].host != cluster.devices[target].host:
        return max(between, route.latency_seconds)
    return direct if route.direct else through_host


def _around(cluster: Cluster, members: Sequence[int], sent: Callable[[int, int], int]) -> Iterator[Hop]:
    """Yield the hops of rings in which every member sends its bytes to the next one; none to itself."""
    channels = _channels(cluster, members)
    for chains in channels:
        ring = list(chain.from_iterable(chains)) if len(channels) > 1 else members
        for source, target in zip(ring, (*ring[1:], ring[0]), strict=True):
            if source != target:
                yield Hop(source, target, sent(source, target) / len(channels))


def _channels(cluster: Cluster, members: Sequence[int]) -> list[list[list[int]]]:
    """Return the orders of members in every host, one for each ring or pair of trees.

    Each order of a host begins with another member, and so leaves and enters the host by others.
    """
    chains = _chains(cluster, members)
    count = min(map(len, chains)) if cluster.backend == "cuda" and len(chains) > 1 else 1
    return [[[*chain[first:], *chain[:first]] for chain in chains] for first in range(count)]


def _rings(
    cluster: Cluster, members: Sequence[int], hops: Iterable[Hop], turns: int, protocols: Sequence[Protocol]
) -> list[LinkCollective]:
    """Return the exchange of these hops around rings in every protocol that the links allow."""
    exchange, chains = _exchange(cluster, hops), _chains(cluster, members)
    if len(members) == 1:
        return [exchange]
    channels, is_far, result = len(_channels(cluster, members)), len(chains) > 1, list[LinkCollective]()
    for ring in (one.around(chains) for one in protocols):
        delay = ring.start + _ring_delay(cluster, members, turns, ring)
        if delay < inf:
            share = _share(cluster, exchange, channels, ring, is_far=is_far)
            result.append(_sent(exchange, delay, share))
    return result


def _ring_delay(cluster: Cluster, members: Sequence[int], turns: int, sending: Sending) -> float:
    """Return the latency of the last part to arrive in a ring.

    Each part goes around the ring `turns` times, each time up to the member before its start.
    """
    following = (*members[1:], members[0])
    hops = [_latency(cluster, *hop, sending) for hop in zip(members, following, strict=True)]
    if max(hops) == inf:
        return inf
    in_a_row = zip(*(hops[number:] + hops[:number] for number in range(turns)), strict=True)
    return turns * sum(hops) - min(map(sum, in_a_row))


def _chains(cluster: Cluster, members: Sequence[int]) -> list[list[int]]:
    """Return the members on every host, in the order of the first ones."""
    result = defaultdict[int, list[int]](list)
    for device in dict.fromkeys(members):
        result[cluster.devices[device].host].append(device)
    return list(result.values())


def _double_trees(
    cluster: Cluster,
    channels: Sequence[Sequence[Sequence[int]]],
    nbytes: int,
    protocols: Sequence[Protocol],
) -> Iterator[LinkCollective]:
    """Yield an all-reduce up and down two trees over several hosts, in every channel and protocol."""
    hops, ways = list[Hop](), list[list[tuple[int, int]]]()
    for chains in channels:
        for parents, part in zip(_trees(chains), (nbytes - nbytes // 2, nbytes // 2), strict=True):
            each = part / len(channels)
            for child, parent in parents.items():
                hops += Hop(child, parent, each), Hop(parent, child, each)
            ways += [[*_way_up(parents, last)] for *_, last in chains]
    exchange = _exchange(cluster, hops)
    for tree in (protocol.tree for protocol in protocols):
        delay = tree.start + max(2 * sum(_latency(cluster, *hop, tree) for hop in way) for way in ways)
        if delay < inf:
            share = _share(cluster, exchange, len(channels), tree, is_far=True)
            yield _sent(exchange, delay, share)


def _way_up(tree: Mapping[int, int], member: int) -> Iterator[tuple[int, int]]:
    """Yield the hops from a member to the root."""
    while (above := tree.get(member)) is not None:
        yield member, above
        member = above


def _trees(chains: Sequence[Sequence[int]]) -> Iterator[dict[int, int]]:
    """Yield two trees over the members of several hosts, as the parent of each member.

    In the second tree hosts are in the opposite order, or, if their number is odd, shifted by one, so that
    inner hosts of one tree are leaves of the other.
    """
    inside = {member: before for chain in chains for before, member in pairwise(chain)}
    first = [chain[0] for chain in chains]
    for order in (first, [*first[1:], first[0]] if len(first) % 2 else first[::-1]):
        yield inside | {order[place]: order[_above(place, len(order))] for place in range(1, len(order))}


def _above(place: int, count: int) -> int:
    """Return the parent of a place in a binary tree of `count` ordered places.

    Its leaves are every second place, and its root is 0.
    """
    lowest = place & -place
    above = place - lowest | lowest << 1
    return above if above < count else place - lowest


# ---- Layers

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float64": 8}  # bytes of an element; 4 of all others
CONVOLUTIONS = ("convolution", "winograd", "layout")
DEPTHWISE_REACHED = 0.05  # of the float32 rate, by kernels that load an element for every product
WINOGRAD_SAVES = 2.25  # products of a direct convolution over those for tiles of 2 x 2 (Lavin and Gray, 2016)
# Tiles of a result that kernels of cuBLAS compute, the fastest first
TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64))
LOAD_PENALTY = 27  # chosen, so that a tile of 64 x 64 reaches two thirds of the rate of one of 256 x 128
LEAST_TERMS = 512  # chosen: of a part of a sum that is divided among several tiles
HOST_BANDWIDTH_REACHED = 0.8  # of a host's memory bandwidth, by an optimizer on all cores


class PassSeconds(NamedTuple):
    """Seconds of a layer's passes: forward and backward of a microbatch, and the update of a step."""

    forward: float
    backward: float
    update: float


def seconds(work: Work, kind: DeviceKind, dtype: str = "float32") -> float:
    """Return the seconds of `work` on a device of `kind`; operations of unknown dtype use `dtype`."""
    if work.seconds is not None:
        return work.seconds
    operations, products = _operations(work), kind.memory_bandwidth * kind.bandwidth_reached
    forms = {each[3:5] for each in operations}
    rates = {form: _rate(kind, form[0] or dtype, form[1]) for form in forms}
    tensor_cores = {
        form: kind.on_tensor_cores(_arithmetic(kind, form[0] or dtype, form[1])) for form in forms
    }
    elements = {own: kind.bandwidth(ITEMSIZE.get(own or dtype, 4)) for own, _ in rates}
    return sum(
        number * (kind.operation_seconds + max(computing, moved / (products if flops else elements[own])))
        for number, flops, moved, own, family, product in operations
        if (rate := rates[own, family])
        for part in [_part_in_tiles(product, kind.multiprocessors, tensor_cores[own, family])]
        for computing in [flops / rate / part]
    )


@cache
def _part_in_tiles(product: tuple[int, ...], multiprocessors: int | None, on_tensor_cores: bool) -> float:
    """Return the part of a GPU's rate that a matrix product reaches with the best tiles, at most 1.

    A kernel computes the result in tiles, each on one multiprocessor, so the last round of tiles may leave
    many idle, and tiles reach beyond the edges of the result; those of a thin result are as thin. Smaller
    tiles fit better but load more elements for every product, for which tensor cores wait. A kernel may also
    divide long sums among several tiles (NVIDIA, Matrix Multiplication Background User's Guide).
    """
    if not product or multiprocessors is None:
        return 1.0
    matrices, rows, columns, terms = product
    best = 0.0
    for high, wide in ((min(high, rows), min(wide, columns)) for high, wide in TILES):
        tiles = matrices * -(-rows // high) * -(-columns // wide)
        loads = 1 / high + 1 / wide - 1 / TILES[0][0] - 1 / TILES[0][1] if on_tensor_cores else 0.0
        for parts in (1, 2, 4, 8, 16, 32):
            if parts > 1 and terms // parts < LEAST_TERMS:
                break
            rounds = -(-tiles * parts // multiprocessors)
            computed = rounds * multiprocessors * high * wide / parts
            best = max(best, matrices * rows * columns / computed / (1 + LOAD_PENALTY * loads))
    return best


def _rate(kind: DeviceKind, dtype: str, family: Family) -> float:
    """Return the FLOP/s that large operations of a family reach; 0 for conversions that a device omits."""
    if family == "depthwise":  # bound by loads, and on no tensor cores
        return 2 * (kind.elements_per_second or kind.peak_flops("float32") * DEPTHWISE_REACHED / 2)
    own = _arithmetic(kind, dtype, family)
    rate = kind.peak_flops(own) * kind.part_of_flops(own)
    if family == "attention":
        return rate * kind.attention_reached
    if family in ("", "convolution") or kind.on_tensor_cores(own):
        return rate
    return rate * WINOGRAD_SAVES if family == "winograd" else 0.0


def _arithmetic(kind: DeviceKind, dtype: str, family: Family) -> str:
    """Return the arithmetic of operations of a family on a device."""
    return kind.convolves_in(dtype) if family in CONVOLUTIONS else dtype


def _operations(work: Work) -> tuple[Alike, ...]:
    """Return the operations of the work; a single one if only the sums are known."""
    whole = (Alike(1, work.flops, work.moved_bytes),) if work.flops or work.moved_bytes else ()
    return work.operations or whole


def layer_seconds(
    measurement: Measurement, kind: DeviceKind, training: Training, group: Group | None = None
) -> tuple[PassSeconds, ...]:
    """Return the seconds of every layer, and of the loss after the last one.

    Those of a tensor-parallel rank include its collectives in `group`. A backward that was not measured also
    adds its gradients to those of earlier microbatches; each has an equal part of these seconds, though the
    first adds nothing.
    """
    alike = [_seconds(cost, kind, training, group) for cost in measurement.kinds]
    return (
        *(alike[number] for number in measurement.layers),
        _seconds(measurement.loss, kind, training, group),
    )


def _seconds(cost: LayerCost, kind: DeviceKind, training: Training, group: Group | None) -> PassSeconds:
    works = cost.forward, cost.backward, cost.update
    together = (0.0 if group is None else group.seconds(work.collectives) for work in works)
    forward, backward, update = (
        seconds(work, kind, training.dtype) + more for work, more in zip(works, together, strict=True)
    )
    sums = (
        Alike(1, 0, 3 * parameter.nbytes, parameter.dtype)
        for parameter in cost.parameters
        if parameter.trainable
    )
    if cost.backward.seconds is None and training.accumulated_share:
        backward += training.accumulated_share * seconds(Work.of(sums), kind)
    return PassSeconds(forward, backward, update)


def copy_seconds(nbytes: int, kind: DeviceKind) -> float:
    """Return the seconds of a copy of `nbytes` within a device of `kind`, which reads and writes them."""
    return seconds(Work(flops=0, moved_bytes=2 * nbytes), kind)


def host_update_seconds(cost: LayerCost, host: Host) -> float:
    """Return the seconds of a layer's update on the CPU of `host`, in one pass bound by memory bandwidth.

    It reads parameters, gradients and state, and writes all but the gradients: 28 bytes a parameter for AdamW
    in float32.

    Raises:
        UsageError: the host's memory bandwidth is unknown.
    """
    if host.memory_bandwidth is None:
        raise UsageError(
            "the time of an update on a host depends on its memory bandwidth: give the host a "
            "memory_bandwidth"
        )
    moved = 2 * (cost.trained_bytes + cost.state_bytes) + cost.gradient_bytes
    return moved / (host.memory_bandwidth * HOST_BANDWIDTH_REACHED)
