"""The TOML format of a cluster: sizes with units, devices in groups, links by pattern.

name = "two-boxes"
backend = "cuda"

[kinds.v100]
flops = { float32 = 15.7e12, float16 = 125e12 }
memory_bandwidth = "900GB/s"
flops_reached = { float16 = 0.5 }        # for estimates of unmeasured times: optional, all three
bandwidth_reached = 0.8
operation_seconds = 5e-6
context = "512MiB"                       # non-tensor memory of a process: optional, all three
communicator = "100MB"
cublas_workspace = ":4096:2:16:8"        # a size, or as in CUBLAS_WORKSPACE_CONFIG: pairs of KiB and number

[[devices]]                              # devices 0 to 7, in the order of the groups
count = 8
kind = "v100"
memory = "32GB"
host = 0
reserve = "5%"                           # kept free for non-tensor memory: optional, or a size

[[hosts]]
memory = "512GB"
memory_bandwidth = "150GB/s"             # optional, as are disk = "4TB" and disk_folder = "/scratch"

[[links]]                                # three ways to name the members of links:
pairs = ["0-1:1", "0-3:2"]               # a link for each pair of devices, with its number of lanes
bytes_per_second = "25GB/s"              # of one lane, one way

[[links]]
members = ["device*"]                    # one switch with all devices; device0-3 is a range
bytes_per_second = "300GB/s"

[[links]]
each = "device0-1"                       # a link from each of these
to = "host0"                             # to this one; also for a link from host0 to disk0
bytes_per_second = "16GB/s"
efficiency = 0.8                         # the share that copies reach; default 1
duplex = 0.7                             # the share of that while both directions are busy; default 1
wire = "pcie0"                           # all of these links share a wire
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal, Protocol, TypeVar

from pipefit.errors import FileError, UsageError
from pipefit.schema.devices import (
    MOST_DEVICES,
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
from pipefit.texts import printable, shortened
from pipefit.units import KIB, WHOLE, parse_bytes, parse_part, parse_rate

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
    bandwidth_reached: float = 0.8
    operation_seconds: float = 5e-6
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterText:
    """The whole file."""

    name: str
    backend: Backend
    kinds: dict[str, KindText]
    devices: tuple[DevicesText, ...]
    hosts: tuple[HostText, ...]
    links: tuple[LinksText, ...] = field(default=())


Made_co = TypeVar("Made_co", covariant=True)


class Maker(Protocol[Made_co]):
    """A function that makes a cluster from its parts, and checks that they fit together."""

    def __call__(
        self,
        *,
        name: str,
        backend: Backend,
        devices: tuple[Device, ...],
        hosts: tuple[Host, ...],
        links: tuple[Link, ...],
    ) -> Made_co: ...


def parse_cluster(text: str, source: str, make: Maker[Made_co]) -> Made_co:
    """Parse a cluster in TOML, constructed by `make`; `source` names the text in errors.

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
        return _cluster(written, make)
    except UsageError as error:
        raise FileError(f"{source} is not valid: {error}") from None


def _cluster(written: ClusterText, make: Maker[Made_co]) -> Made_co:
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
    return make(
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
            bandwidth_reached=kind.bandwidth_reached,
            operation_seconds=kind.operation_seconds,
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
