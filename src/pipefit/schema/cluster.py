"""Clusters: devices, their hosts, and the links between them (`schema.devices`).

A `Cluster` is plain data. Users write it as TOML, name a preset (`dgx1-v100`), or write `emulated:4x256MiB`
for CPU workers whose memory is capped.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from itertools import chain, pairwise
from math import isfinite
from typing import Any, Literal, NamedTuple

from pipefit.errors import FileError, UsageError
from pipefit.schema.devices import (
    MOST_DEVICES,
    USUAL_ATTENTION_REACHED,
    Backend,
    Device,
    DeviceKind,
    Host,
    Link,
    Member,
    MemberKind,
    Overheads,
    parse_member,
)
from pipefit.schema.json_text import checked
from pipefit.schema.presets import cards_asked, preset_text
from pipefit.schema.validation import check_types, instance, whole
from pipefit.texts import counted, printable, shortened
from pipefit.units import KIB, WHOLE, format_bytes, parse_bytes, parse_part, parse_rate


class Route(NamedTuple):
    """A path for bytes between two members: its rate, latency and wires.

    A wire is one direction of a link, or one direction of a member's port in a switch; it carries one
    transfer at a time. `slowed` is, for each wire, the share of the rate that remains while the opposite
    direction is busy (`opposite`). A route of two devices is `direct` unless it passes their hosts.
    """

    bytes_per_second: float
    latency_seconds: float
    wires: tuple[str, ...]
    slowed: tuple[float, ...]
    direct: bool = True

    def seconds(self, nbytes: int) -> float:
        """Return the seconds to transfer `nbytes` over idle wires."""
        return self.latency_seconds + nbytes / self.bytes_per_second

    @property
    def both_ways_per_second(self) -> float:
        """Bytes per second, each way, while both directions of all wires are busy."""
        return self.bytes_per_second * min(self.slowed, default=1.0)


class Tier(NamedTuple):
    """A target for offloading, as a device sees it: capacity, rate and latency.

    Peers, hosts, disks and hosts with a coherent link (NVLink-C2C) differ only in these figures.
    """

    capacity_bytes: int
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Devices, hosts and links. Device and host numbers are positions in the tuples.

    Budgets and routes are cached, because planners query them for thousands of devices.

    Raises:
        UsageError: no devices, or a device or link names a host or member that does not exist.
    """

    name: str
    backend: Backend
    devices: tuple[Device, ...]
    hosts: tuple[Host, ...]
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        if not self.devices:
            raise UsageError(f"cluster {self.name!r} must have at least one device")
        for number, device in enumerate(self.devices):
            if not 0 <= device.host < len(self.hosts):
                raise UsageError(
                    f"device {number} of cluster {self.name!r} names host {device.host}, but the cluster "
                    f"has {counted(len(self.hosts), 'host')}"
                )
        for member in dict.fromkeys(chain.from_iterable(link.members for link in self.links)):
            self.check(member, "a link")

    @staticmethod
    @cache
    def preset(name: str) -> Cluster:
        """Return the preset cluster `name`: a machine (`dgx1-v100`), or cards in a box (`4x-rtx-3090`).

        Raises:
            UsageError: no preset has this name, or a box cannot have this many cards.
        """
        cluster = Cluster.parse(preset_text(instance("name", name, str)), f"preset {name}")
        cards = cards_asked(name)
        return cluster if cards == 1 else cluster._with_cards(cards)

    @staticmethod
    def parse(text: str, source: str = "the text") -> Cluster:
        """Parse a cluster in TOML, whose format is below; `source` names the text in errors.

        Raises:
            FileError: the text is not TOML, or not a cluster; says what is wrong and at which place.
        """
        return _parse_toml(text, source)

    @staticmethod
    def emulated(*groups: tuple[int, int]) -> Cluster:
        """Return CPU workers with capped memory, from pairs of count and bytes.

        Example: `Cluster.emulated((2, 256 * MIB))`.
        """
        for group in groups:
            if not isinstance(group, tuple) or len(group) != 2:
                raise UsageError(
                    f"emulated devices are pairs (count, bytes), such as (2, 1 << 28), not {group!r}"
                )
            whole("the number of emulated devices", group[0], 1, MOST_DEVICES)
        devices = tuple(
            Device(kind=_EMULATED, memory_bytes=nbytes) for count, nbytes in groups for _ in range(count)
        )
        members = (*map(Member.device, range(len(devices))), Member.host(0))
        name = "emulated:" + "+".join(f"{count}x{_short(nbytes)}" for count, nbytes in groups)
        shared_memory = Link(members=members, bytes_per_second=4e9, latency_seconds=1e-4)
        host = Host(
            memory_bytes=max(64 << 30, sum(device.memory_bytes for device in devices)), memory_bandwidth=1e10
        )
        return Cluster(name=name, backend="emulated", devices=devices, hosts=(host,), links=(shared_memory,))

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields without cached values."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def target(self) -> Literal["cpu", "cuda"]:
        """The kernels that run on the devices; emulated devices compute on the CPU."""
        return "cuda" if self.backend == "cuda" else "cpu"

    @cached_property
    def budgets(self) -> tuple[int, ...]:
        """The bytes that tensors may use on every device: its memory less its reserve, at least 1."""
        return tuple(map(self._budget, self.devices))

    @cached_property
    def reserves(self) -> tuple[int, ...]:
        """The bytes of every device that are reserved for non-tensor memory of its process.

        Without an explicit reserve, a GPU reserves the overhead of a worker of its kind between two others
        (`Overheads.of_process`); other devices reserve nothing.
        """
        return tuple(map(self._reserve, self.devices))

    @property
    def is_uniform(self) -> bool:
        """True if all devices have the same kind and memory."""
        return len({(device.kind.key, device.memory_bytes) for device in self.devices}) == 1

    def largest(self, count: int) -> tuple[int, ...]:
        """Return the numbers of the `count` devices with the largest budgets, in rising order.

        Of devices with equal budgets, the first are taken.
        """
        return tuple(
            sorted(sorted(range(len(self.devices)), key=lambda number: -self.budgets[number])[:count])
        )

    def _budget(self, device: Device) -> int:
        return max(1, device.memory_bytes - self._reserve(device))

    def _reserve(self, device: Device) -> int:
        if device.reserve_bytes is not None:
            return device.reserve_bytes
        return device.kind.overheads.of_process(alone=len(self.devices) == 1) if self.backend == "cuda" else 0

    def reserving(self, reserves: Sequence[int]) -> Cluster:
        """Return the cluster with these reserves, in bytes, on its devices.

        Raises:
            UsageError: a reserve leaves no memory of a device.
        """
        pairs = zip(self.devices, reserves, strict=True)
        return replace(
            self, devices=tuple(replace(device, reserve_bytes=reserve) for device, reserve in pairs)
        )

    def _with_cards(self, count: int) -> Cluster:
        """Return a box with `count` copies of the one device, each with copies of its links."""
        whole("the number of cards in one box", count, 1, _MOST_CARDS)
        return replace(self.with_copies(0, count - 1), name=self.name.replace("1", str(count), 1))

    def with_copies(self, number: int, count: int) -> Cluster:
        """Return the cluster with `count` copies of a device, on the same host.

        They join the links of more than two members that the device has, and get copies of its other links.
        """
        device, first = Member.device(number), len(self.devices)
        copies = tuple(map(Member.device, range(first, first + count)))

        def joined(link: Link) -> Iterator[Link]:
            is_shared = device in link.members and len(link.members) > 2
            yield replace(link, members=(*link.members, *copies)) if is_shared else link
            for copy in copies if device in link.members and not is_shared else ():
                ends = (copy if member == device else member for member in link.members)
                yield replace(link, members=tuple(ends))

        links = tuple(chain.from_iterable(map(joined, self.links)))
        return replace(self, devices=self.devices + (self.devices[number],) * count, links=links)

    def machines(self, count: int, bytes_per_second: float) -> Cluster:
        """Return a cluster of `count` such machines, joined by a network.

        Every device sends and receives `bytes_per_second` over the network.

        Hosts and devices are numbered machine by machine. The network is a switch of all devices; devices of
        one machine use it only if it is faster than their other links and PCIe.

        Raises:
            UsageError: fewer than one machine, too many devices, or a rate that is not positive.
        """
        whole("the number of machines", count, 1, max(1, MOST_DEVICES // len(self.devices)))
        members = tuple(Member.device(number) for number in range(count * len(self.devices)))
        network = Link(members=members, bytes_per_second=bytes_per_second, latency_seconds=_NETWORK_SECONDS)
        return Cluster(
            name=f"{count}x{self.name}@{_short(round(bytes_per_second))}/s",
            backend=self.backend,
            devices=tuple(
                replace(device, host=device.host + n * len(self.hosts))
                for n in range(count)
                for device in self.devices
            ),
            hosts=self.hosts * count,
            links=(*(self._moved(link, n) for n in range(count) for link in self.links), network),
        )

    def _moved(self, link: Link, machine: int) -> Link:
        """Return a link renumbered for machine number `machine`."""
        sizes = {MemberKind.DEVICE: len(self.devices)}

        def there(member: Member) -> Member:
            assert member.number is not None  # links name each of their members
            return Member(member.kind, member.number + machine * sizes.get(member.kind, len(self.hosts)))

        wire = f"{link.wire} of machine {machine}" if link.wire else None
        return replace(link, members=tuple(map(there, link.members)), wire=wire)

    def check(self, member: Member, who: str) -> None:
        """Check that the cluster has `member`; `who` names the user of the member in errors.

        Raises:
            UsageError: the cluster does not have it; says how many members of that kind it has.
        """
        numbers = self._numbers[member.kind]
        if member.number is not None and member.number not in numbers:
            there = f"{len(numbers)} {member.kind.value}s"
            if member.kind is MemberKind.DISK and numbers:
                there += f", of hosts {list(numbers)}"
            raise UsageError(f"{who} of cluster {self.name!r} names {member}, but the cluster has {there}")

    @cached_property
    def _numbers(self) -> dict[MemberKind, Sequence[int]]:
        """The numbers of all members, by kind; a disk has the number of its host."""
        hosts = range(len(self.hosts))
        return {
            MemberKind.DEVICE: range(len(self.devices)),
            MemberKind.HOST: hosts,
            MemberKind.DISK: [number for number in hosts if self.hosts[number].disk_bytes],
        }

    def route(self, source: Member, target: Member) -> Route:
        """Return two members' fastest link, or the path through hosts if it is faster or the only one.

        Raises:
            UsageError: nothing joins the members.
        """
        if (source, target) not in self._routes:
            self._routes[source, target] = self._route(source, target)
        return self._routes[source, target]

    @cached_property
    def _routes(self) -> dict[tuple[Member, Member], Route]:
        """Cached routes."""
        return {}

    @cached_property
    def _links_of(self) -> dict[Member, dict[int, Link]]:
        """The links of every member, by their numbers."""
        result = dict[Member, dict[int, Link]]()
        for number, link in enumerate(self.links):
            for member in link.members:
                result.setdefault(member, {})[number] = link
        return result

    def reduced_by_switch(self, devices: Iterable[int]) -> float:
        """Return the share of its rate that a reducing switch of all these devices reaches; 0 if none."""
        asked = set(map(Member.device, devices))
        return max(
            (link.reduces for link in self.links if link.reduces and asked <= set(link.members)), default=0.0
        )

    def _route(self, source: Member, target: Member) -> Route:
        """Return the fastest link between two members, or the path through their hosts if there is none.

        Devices of one host also take the path through it if that is faster, such as PCIe next to a slow
        network.
        """
        own, others = (self._links_of.get(member, {}) for member in (source, target))
        links = [(number, link) for number, link in own.items() if number in others]
        path = list(dict.fromkeys([source, self._near(source), self._near(target), target]))
        routes = list[Route]()
        if links:
            number, link = max(links, key=lambda item: item[1].copy_rate)
            wires = _wires(number, link, source, target)
            routes.append(Route(link.copy_rate, link.latency_seconds, wires, (link.duplex,) * len(wires)))
        elif len(path) < 3:
            raise UsageError(
                f"{source} and {target} are not connected: add a link between them, or links from each "
                "device to its host"
            )
        if not links or self._host_serves(source, target):
            routes.append(self._along(path))
        return max(routes, key=lambda route: route.bytes_per_second)

    def _host_serves(self, one: Member, other: Member) -> bool:
        """Return whether two members are devices of one host with links to it."""
        if not one.kind is other.kind is MemberKind.DEVICE or self._near(one) != self._near(other):
            return False
        host = self._links_of.get(self._near(one), {})
        return all(not host.keys().isdisjoint(self._links_of.get(device, {})) for device in (one, other))

    def _along(self, path: Sequence[Member]) -> Route:
        """Return the route of the hops along a path."""
        hops = [self.route(a, b) for a, b in pairwise(path)]
        both_ways = dict[str, float]()  # bytes per second while both directions of a wire are busy
        for hop in hops:
            both_ways |= {
                wire: hop.bytes_per_second * left for wire, left in zip(hop.wires, hop.slowed, strict=True)
            }
        itself = {
            wire for wire in both_ways if opposite(wire) in both_ways
        }  # the route uses both directions of a link
        rate = min([*(hop.bytes_per_second for hop in hops), *(both_ways[wire] for wire in itself)])
        slowed = (1.0 if wire in itself else min(1.0, own / rate) for wire, own in both_ways.items())
        latency = sum(hop.latency_seconds for hop in hops)
        return Route(rate, latency, tuple(both_ways), tuple(slowed), direct=False)

    def _near(self, member: Member) -> Member:
        """Return the host of a device; for other members, the host with the same number."""
        assert member.number is not None
        number = self.devices[member.number].host if member.kind is MemberKind.DEVICE else member.number
        return Member.host(number)

    def seconds(self, transfers: Iterable[tuple[Member, Member, int]]) -> float:
        """Return the seconds until transfers (source, target, bytes) on idle wires have all ended.

        All transfers are ready at once, and take shared wires in the given order.
        """
        free: dict[str, float] = {}
        for source, target, nbytes in transfers:
            route = self.route(source, target)
            begin = max((free.get(wire, 0.0) for wire in route.wires), default=0.0)
            free |= dict.fromkeys(route.wires, begin + route.seconds(nbytes))
        return max(free.values(), default=0.0)

    def capacity(self, member: Member) -> int:
        """Return the bytes that tensors may use on a device, or the bytes of a host or disk.

        Raises:
            UsageError: the cluster does not have the member.
        """
        self.check(member, "a place")
        assert member.number is not None
        if member.kind is MemberKind.DEVICE:
            return self._budget(self.devices[member.number])
        host = self.hosts[member.number]
        return host.memory_bytes if member.kind is MemberKind.HOST else host.disk_bytes

    def tier(self, device: int, member: Member) -> Tier:
        """Return `member` as an offload target of a device.

        A host or disk without a number is the device's host or disk.

        Raises:
            UsageError: the cluster does not have the member, or no link joins the two.
        """
        there = member if member.number is not None else Member(member.kind, self.devices[device].host)
        route = self.route(Member.device(device), there)
        return Tier(self.capacity(there), route.bytes_per_second, route.latency_seconds)

    def __repr__(self) -> str:
        """Return one line, without hundreds of links."""
        return f"<Cluster: {self}>"

    def __str__(self) -> str:
        sizes = Counter((device.kind.name, device.memory_bytes) for device in self.devices)
        return f"{self.name}: " + ", ".join(
            f"{n} x {kind} {format_bytes(size)}" for (kind, size), n in sizes.items()
        )


_COUNT = re.compile(WHOLE)
_MOST_CARDS = 16  # in one box; more cards need several machines
_NETWORK_SECONDS = 1e-5  # latency of a message between machines


def parse_emulated(text: str) -> Cluster:
    """Parse `emulated:4x256MiB` or `emulated:2x256MiB+2x128MiB`.

    Raises:
        UsageError: the text has another form, no devices, or no memory.
    """
    groups = []
    for part in text.removeprefix("emulated:").split("+"):
        count, times, size = part.partition("x")
        if not times or not _COUNT.fullmatch(count.strip()):
            raise UsageError(
                f"{shortened(repr(text))} is not an emulated cluster: write count x memory, such as "
                "emulated:4x256MiB or emulated:2x256MiB+2x128MiB"
            )
        groups.append((int(count), parse_bytes(size)))
    if sum(count for count, _ in groups) > MOST_DEVICES:
        raise UsageError(
            f"{shortened(repr(text))} has more than {MOST_DEVICES} devices, the largest supported number"
        )
    return Cluster.emulated(*groups)


_EMULATED = DeviceKind(
    name="emulated-cpu", flops={"float32": 5e10}, memory_bandwidth=1e10
)  # about one laptop core


def _short(nbytes: int) -> str:
    """Format a size as short as is exact: `256MiB`, `50GB`, `1000B`."""
    units = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "GB": 10**9, "MB": 10**6, "B": 1}
    return min((f"{nbytes // unit}{name}" for name, unit in units.items() if nbytes % unit == 0), key=len)


def opposite(wire: str) -> str | None:
    """Return the wire of the opposite direction, which shares the link's rate as `Link.duplex` says.

    Returns None without an opposite wire, as for a host's memory.
    """
    name, _, way = wire.rpartition(":")
    return f"{name}:{_OPPOSITE[way]}" if way in _OPPOSITE else None


_OPPOSITE = {"up": "down", "down": "up", "out": "in", "in": "out"}


def _wires(number: int, link: Link, source: Member, target: Member) -> tuple[str, ...]:
    """Return the wires that a transfer occupies in its direction."""
    name = link.wire or f"link{number}"
    if len(link.members) == 2:
        upward = link.members.index(source) == 0
        return (f"{name}:{'up' if upward else 'down'}",)
    return (f"{name}:{source}:out", f"{name}:{target}:in")


# ---- The TOML format of a cluster: sizes with units, devices in groups, links by pattern
#
# name = "two-boxes"
# backend = "cuda"
#
# [kinds.v100]
# flops = { float32 = 15.7e12, float16 = 125e12 }
# memory_bandwidth = "900GB/s"
# flops_reached = { float16 = 0.5 }        # for estimates of unmeasured times: optional, all six
# attention_reached = 0.45
# bandwidth_reached = 0.8
# elements_per_second = 6e11
# operation_seconds = 5e-6
# multiprocessors = 80
# context = "512MiB"                       # non-tensor memory of a process: optional, all three
# communicator = "100MB"
# cublas_workspace = ":4096:2:16:8"        # a size, or as in CUBLAS_WORKSPACE_CONFIG: pairs of KiB and number
#
# [[devices]]                              # devices 0 to 7, in the order of the groups
# count = 8
# kind = "v100"
# memory = "32GB"
# host = 0
# reserve = "5%"                           # kept free for non-tensor memory: optional, or a size
#
# [[hosts]]
# memory = "512GB"
# memory_bandwidth = "150GB/s"             # optional, as are disk = "4TB" and disk_folder = "/scratch"
#
# [[links]]                                # three ways to name the members of links:
# pairs = ["0-1:1", "0-3:2"]               # a link for each pair of devices, with its number of lanes
# bytes_per_second = "25GB/s"              # of one lane, one way
#
# [[links]]
# members = ["device*"]                    # one switch with all devices; device0-3 is a range
# bytes_per_second = "300GB/s"
#
# [[links]]
# each = "device0-1"                       # a link from each of these
# to = "host0"                             # to this one; also for a link from host0 to disk0
# bytes_per_second = "16GB/s"
# efficiency = 0.8                         # the share that copies reach; default 1
# duplex = 0.7                             # the share of that while both directions are busy; default 1
# wire = "pcie0"                           # all of these links share a wire
# reduces = 0.74                           # the share that an all-reduce in the switch reaches (NVLink SHARP)


_PATTERN = re.compile(rf"(device|host)(?:(\*)|({WHOLE})(?:-({WHOLE}))?)")
_PAIR = re.compile(rf"({WHOLE})-({WHOLE})(?::({WHOLE}))?")
_WORKSPACE = re.compile(rf"(?::{WHOLE}:{WHOLE})+")
_MOST_ENDS = 1 << 16  # over all links; equals one link for each pair of 256 devices
_MOST_DOTS = 256  # in one line; the parser's time is quadratic in the parts of a dotted key


@dataclass(frozen=True, slots=True, kw_only=True)
class KindText:
    """`[kinds.NAME]`."""

    flops: dict[str, float]
    memory_bandwidth: str | float
    flops_reached: dict[str, float] = field(default_factory=dict)
    attention_reached: float = USUAL_ATTENTION_REACHED
    bandwidth_reached: float = 0.8
    elements_per_second: float | None = None
    operation_seconds: float = 5e-6
    multiprocessors: int | None = None
    context: str | int | None = None
    communicator: str | int | None = None
    cublas_workspace: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesText:
    """`[[devices]]`: `count` equal devices."""

    kind: str
    memory: str | int
    count: int = 1
    host: int = 0
    reserve: str | int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostText:
    """`[[hosts]]`."""

    memory: str | int
    disk: str | int = 0
    disk_folder: str | None = None
    memory_bandwidth: str | float | None = None
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LinksText:
    """`[[links]]`: one of `members`, `pairs`, or `each` with `to`."""

    bytes_per_second: str | float
    members: tuple[str, ...] = ()
    pairs: tuple[str, ...] = ()
    each: str | None = None
    to: str | None = None
    lanes: int = 1
    latency_seconds: float = 0.0
    wire: str | None = None
    efficiency: float = 1.0
    duplex: float = 1.0
    reduces: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterText:
    """The whole file."""

    name: str
    backend: Backend
    kinds: dict[str, KindText]
    devices: tuple[DevicesText, ...]
    hosts: tuple[HostText, ...]
    links: tuple[LinksText, ...] = field(default=())


def _parse_toml(text: str, source: str) -> Cluster:
    """Parse a cluster in TOML; `source` names the text in errors.

    Raises:
        FileError: not TOML, or not a cluster; says what is wrong and where.
    """
    for number, line in enumerate(text.splitlines(), start=1):
        if line.count(".") > _MOST_DOTS:
            raise FileError(f"{source} is not valid: line {number} has more than {_MOST_DOTS} dots")
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise FileError(f"{source} is not TOML: {error or 'nested too deeply'}") from None
    written = checked(ClusterText, data, source)
    try:
        return _cluster(written)
    except UsageError as error:
        raise FileError(f"{source} is not valid: {error}") from None


def _cluster(written: ClusterText) -> Cluster:
    """Convert a whole file.

    Totals are checked while links are made, because a short text may describe many links.
    """
    kinds = {name: _kind(name, kind) for name, kind in written.kinds.items()}
    _check_total("hosts", sum(_count(host.count, "hosts") for host in written.hosts), MOST_DEVICES)
    hosts = tuple(_host(number, host) for number, host in enumerate(written.hosts) for _ in range(host.count))
    _check_total("devices", sum(_count(group.count, "devices") for group in written.devices), MOST_DEVICES)
    devices = list[Device]()
    for number, group in enumerate(written.devices):
        with _at(f"devices[{number}]"):
            devices += [_device(group, kinds)] * group.count
    known = {"device": len(devices), "host": len(hosts)}
    links, ends = list[Link](), 0
    for number, text in enumerate(written.links):
        with _at(f"links[{number}]"):
            for link in _links(text, known):
                links.append(link)
                ends += len(link.members)
                _check_total("ends of links", ends, _MOST_ENDS)
    return Cluster(
        name=written.name, backend=written.backend, devices=tuple(devices), hosts=hosts, links=tuple(links)
    )


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Prefix errors of the block with their place in the file."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None


def _kind(name: str, kind: KindText) -> DeviceKind:
    flops = dict[str, float]()
    for dtype, figure in kind.flops.items():
        with _at(f"kinds.{printable(name)}.flops.{printable(dtype)}"):
            flops[dtype] = _rate(figure)
    with _at(f"kinds.{printable(name)}.memory_bandwidth"):
        memory_bandwidth = _rate(kind.memory_bandwidth)
    with _at(f"kinds.{printable(name)}"):
        return DeviceKind(
            name=name,
            flops=flops,
            memory_bandwidth=memory_bandwidth,
            flops_reached=kind.flops_reached,
            attention_reached=kind.attention_reached,
            bandwidth_reached=kind.bandwidth_reached,
            elements_per_second=kind.elements_per_second,
            operation_seconds=kind.operation_seconds,
            multiprocessors=kind.multiprocessors,
            overheads=_overheads(kind),
        )


def _host(number: int, host: HostText) -> Host:
    with _at(f"hosts[{number}]"):
        return Host(
            memory_bytes=_size(host.memory),
            disk_bytes=_size(host.disk, least=0) if host.disk else 0,
            disk_folder=host.disk_folder,
            memory_bandwidth=None if host.memory_bandwidth is None else _rate(host.memory_bandwidth),
        )


def _device(group: DevicesText, kinds: dict[str, DeviceKind]) -> Device:
    if group.kind not in kinds:
        known = ", ".join(kinds) or "none"
        raise UsageError(
            f"device kind {group.kind!r} is unknown: add a table [kinds.{group.kind}], or use one of {known}"
        )
    memory, reserve = _size(group.memory), group.reserve
    return Device(
        kind=kinds[group.kind],
        memory_bytes=memory,
        host=group.host,
        reserve_bytes=parse_part(reserve, memory) if isinstance(reserve, str) else reserve,
    )


def _links(text: LinksText, known: dict[str, int]) -> Iterator[Link]:
    """Yield the links of a `[[links]]` table."""
    ways = [bool(text.members), bool(text.pairs), text.each is not None or text.to is not None]
    if sum(ways) != 1 or (text.each is None) != (text.to is None):
        raise UsageError("a link needs exactly one of: members, pairs, or both each and to")
    rate = _rate(text.bytes_per_second)
    for members, lanes in _joined(text, known):
        yield Link(
            members=members,
            bytes_per_second=rate,
            latency_seconds=text.latency_seconds,
            lanes=lanes,
            wire=text.wire,
            efficiency=text.efficiency,
            duplex=text.duplex,
            reduces=text.reduces,
        )


def _joined(text: LinksText, known: dict[str, int]) -> Iterator[tuple[tuple[Member, ...], int]]:
    """Yield the members of each link, and its number of lanes."""
    for pair in text.pairs:
        match = _PAIR.fullmatch(pair)
        if not match:
            raise UsageError(
                f"{shortened(repr(pair))} is not a pair of devices: write 0-3, or 0-3:2 for two lanes"
            )
        yield (Member.device(int(match[1])), Member.device(int(match[2]))), int(match[3] or text.lanes)
    if text.members:
        yield tuple(member for pattern in text.members for member in _members(pattern, known)), text.lanes
    if text.each is not None and text.to is not None:
        for member in _members(text.each, known):
            yield (member, parse_member(text.to)), text.lanes


def _members(pattern: str, known: dict[str, int]) -> Sequence[Member]:
    """Expand a pattern: `device*` is every device, `device2-5` four devices, `host0` itself."""
    match = _PATTERN.fullmatch(pattern)
    if not match:
        raise UsageError(
            f"{shortened(repr(pattern))} does not name members of a link: write device0, device0-3, device* "
            "or host0"
        )
    what, every, first, last = match.groups()
    if every:
        return [Member(MemberKind(what), number) for number in range(known[what])]
    if int(last or first) >= known[what]:
        raise UsageError(f"a link names {pattern}, but the cluster has {known[what]} {what}s")
    return [Member(MemberKind(what), number) for number in range(int(first), int(last or first) + 1)]


def _overheads(kind: KindText) -> Overheads:
    """Return the overheads of a process on this kind of device; unset ones have their defaults."""
    written = {
        "context_bytes": kind.context if kind.context is None else _size(kind.context, least=0),
        "communicator_bytes": kind.communicator
        if kind.communicator is None
        else _size(kind.communicator, least=0),
        "cublas_workspace_bytes": None
        if kind.cublas_workspace is None
        else _workspace(kind.cublas_workspace),
    }
    return Overheads(**{name: nbytes for name, nbytes in written.items() if nbytes is not None})


def _workspace(written: str | int) -> int:
    """Return the bytes of a size, or of a text such as `:4096:2:16:8`.

    The example means two workspaces of 4096 KiB and eight of 16 KiB.
    """
    if isinstance(written, int) or not written.startswith(":"):
        return _size(written, least=0)
    if not _WORKSPACE.fullmatch(written):
        raise UsageError(
            f"{shortened(repr(written))} is not a cuBLAS workspace: write a size such as 32MiB, or pairs of "
            "KiB and count, such as :4096:2:16:8"
        )
    numbers = written.removeprefix(":").split(":")
    return sum(int(size) * KIB * int(count) for size, count in zip(numbers[::2], numbers[1::2], strict=True))


def _size(written: str | int, *, least: Literal[0, 1] = 1) -> int:
    return parse_bytes(written, least=least) if isinstance(written, str) else written


def _rate(written: str | float) -> float:
    """Return a rate per second from a number, or from a size with or without `/s`."""
    rate = float(parse_rate(written)) if isinstance(written, str) else written
    if not isfinite(rate):
        raise UsageError(f"{rate} is not a rate: write a finite number")
    return rate


def _check_total(what: str, count: int, most: int) -> None:
    if count > most:
        raise UsageError(f"it has {count} or more {what}, but a cluster can have at most {most}")


def _count(count: int, what: str) -> int:
    if not 1 <= count <= MOST_DEVICES:
        raise UsageError(f"a group of {what} needs a count from 1 to {MOST_DEVICES}, not {count}")
    return count
