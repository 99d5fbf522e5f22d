"""Device kinds, devices, hosts, links and places: the parts of a cluster.

A link joins two or more members; any two of them exchange `lanes * bytes_per_second` each way. Copies reach
the share `efficiency` of this rate, and the share `duplex` of that while both directions are busy. Two
members share one wire for each direction; more members meet in a switch, in which each has a separate port.
Links with the same `wire` contend for it, such as two GPUs on one PCIe uplink.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from math import inf
from typing import Any, Literal, NamedTuple

from pipefit.errors import UsageError
from pipefit.schema.validation import LONGEST_SECONDS, check_dtype, check_types
from pipefit.texts import shortened
from pipefit.units import KIB, MIB, WHOLE, format_bytes

# ---- Members and places: locations of bytes, with a text form
#
#     device3                  one device
#     host                     the host of the device that moves data; host1 is host number 1
#     device3*2+device4*1      striped over two peers: two parts of three on device 3, one on device 4
#     device5                  in a message: its other end

ALIGNMENT = (
    512  # bytes; CUDA's allocator aligns every block to it, and copies between aligned blocks are fastest
)


class MemberKind(StrEnum):
    """The kind of a cluster member."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Member(NamedTuple):
    """A device, host or disk of a cluster, by its number.

    A host or disk without a number belongs to the device that moves data. A disk has the number of its host.
    """

    kind: MemberKind
    number: int | None

    def __str__(self) -> str:
        return self.kind.value if self.number is None else f"{self.kind.value}{self.number}"

    def at(self, host: int) -> Member:
        """Return this member with its number, for a device in host number `host`."""
        return self if self.number is not None else Member(self.kind, host)

    @staticmethod
    def device(number: int) -> Member:
        """Return device `number` of the cluster."""
        return Member(MemberKind.DEVICE, number)

    @staticmethod
    def host(number: int | None = None) -> Member:
        """Return host `number`; without a number, the host of the device that moves data."""
        return Member(MemberKind.HOST, number)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Return the pydantic schema: in files, a member is its text form."""
        return _as_text(parse_member)


class Share(NamedTuple):
    """A member, and its number of parts of the whole."""

    member: Member
    parts: int


class Place(tuple[Share, ...]):
    """Members of a cluster with whole-number shares of the bytes."""

    __slots__ = ()

    def __str__(self) -> str:
        return _text(self)

    def __repr__(self) -> str:
        return f"Place({self})"

    @property
    def members(self) -> tuple[Member, ...]:
        """The members that have a share."""
        return tuple(member for member, _ in self)

    def split(self, nbytes: int) -> tuple[tuple[Member, int], ...]:
        """Divide `nbytes` in proportion to the shares, into whole bytes that add up.

        Every block begins at a multiple of `ALIGNMENT`, unless the smallest share is smaller than that.
        """
        whole, smallest = sum(parts for _, parts in self), min(parts for _, parts in self)
        unit = ALIGNMENT if nbytes * smallest >= ALIGNMENT * whole else 1
        result, taken, before = [], 0, 0
        for member, parts in self:
            taken += parts
            end = nbytes if taken == whole else (nbytes * taken // whole + unit // 2) // unit * unit
            result.append((member, end - before))
            before = end
        return tuple(result)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Return the pydantic schema: in files, a place is its text form."""
        return _as_text(parse_place)


@lru_cache(maxsize=1 << 12)
def _text(place: Place) -> str:
    """Format a place; cached, because the many copies of a program use few places."""
    return "+".join(str(m) if len(place) == 1 and parts == 1 else f"{m}*{parts}" for m, parts in place)


_MEMBER = re.compile(rf"(device|host|disk)({WHOLE})?")
_SHARE = re.compile(rf"([a-z]+[0-9]*)(?:\*({WHOLE}))?")


def parse_member(text: str) -> Member:
    """Parse the text form of a member, such as `device3`.

    Raises:
        UsageError: not a member, or a device without a number.
    """
    match = _MEMBER.fullmatch(text)
    if not match or (match[1] == "device" and not match[2]):
        raise UsageError(
            f"{shortened(repr(text))} is not a member of a cluster: write device3, host0 or disk0"
        )
    return Member(MemberKind(match[1]), int(match[2]) if match[2] else None)


@lru_cache(maxsize=1 << 12)
def parse_place(text: str) -> Place:
    """Parse the text form of a place.

    Raises:
        UsageError: not a place: an unknown member, an empty share, or a member named twice.
    """
    shares = []
    for word in text.split("+"):
        match = _SHARE.fullmatch(word)
        if not match or not _MEMBER.fullmatch(match[1]):
            raise UsageError(
                f"{shortened(repr(text))} is not a place: write host, device3 or, in shares, "
                "device3*2+device4*1"
            )
        shares.append(Share(parse_member(match[1]), int(match[2] or 1)))
    place = Place(shares)
    if min(parts for _, parts in place) < 1:
        raise UsageError(f"place {text!r}: every share must be one part or more")
    if len(set(place.members)) != len(place):
        raise UsageError(f"place {text!r} names a member twice: add up its shares")
    for kind in (MemberKind.HOST, MemberKind.DISK):
        numbers = [member.number for member in place.members if member.kind is kind]
        if None in numbers and len(numbers) > 1:
            raise UsageError(
                f"place {text!r} names a {kind.value} with a number and one without, which may be the same "
                f"{kind.value}: number both"
            )
    return place


def _as_text(parse: Any) -> Any:
    """Return the pydantic schema of a type that files store as its text form."""
    from pydantic_core import core_schema  # only where a file is read or written

    text = core_schema.chain_schema(
        [core_schema.str_schema(), core_schema.no_info_plain_validator_function(parse)]
    )
    return core_schema.json_or_python_schema(
        json_schema=text,
        python_schema=core_schema.no_info_plain_validator_function(
            lambda item: parse(item) if isinstance(item, str) else item
        ),
        serialization=core_schema.plain_serializer_function_ser_schema(str),
    )


# ----------------------------------------------------------------------------------------------------

Backend = Literal["emulated", "cpu", "cuda"]

USUAL_ATTENTION_REACHED = 0.45  # default share of their rate that fused attention reaches
TF32 = "tf32"  # in figures of a device, beside names of dtypes
USUAL_FLOPS_REACHED = 0.6  # default share of the peak that large products reach
_NEIGHBOURS = 5  # communicators of a worker between two others: two with each, and one of all workers
_THREADS = 2  # threads that multiply matrices: one runs forwards, autograd has another for backwards
_SLOWEST, _FASTEST = 1e-9, 1e60  # per second; rates in this range keep all sums and ratios of times finite
MOST_MULTIPROCESSORS = 1 << 16  # of a device; more is a mistake
MOST_DEVICES = 4096  # of a cluster described by counts; a larger count is a mistake


def _check_rates(what: str, *rates: float) -> None:
    """Check that times computed with these rates, per second, stay finite.

    Raises:
        UsageError: a rate is too low or too high; names `what`.
    """
    for rate in rates:
        if not _SLOWEST <= rate <= _FASTEST:
            raise UsageError(
                f"{what} has an effective rate of {rate:g} per second, outside the supported {_SLOWEST:g} "
                f"to {_FASTEST:g}: write the figure of the data sheet"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Non-tensor memory of a GPU process, in bytes (docs/memory.md has the sources).

    `context_bytes` is the CUDA context with its loaded kernels, `communicator_bytes` one NCCL communicator,
    and `cublas_workspace_bytes` cuBLAS's workspace for each computing thread, inside the caching allocator.

    Raises:
        UsageError: a negative figure.
    """

    context_bytes: int = 512 * MIB
    communicator_bytes: int = 100_000_000
    cublas_workspace_bytes: int = 2 * 4096 * KIB + 8 * 16 * KIB

    def __post_init__(self) -> None:
        check_types(self)
        if min(self.context_bytes, self.communicator_bytes, self.cublas_workspace_bytes) < 0:
            raise UsageError("context, communicator and cublas_workspace must be zero or more bytes")

    def of_process(self, *, alone: bool) -> int:
        """Return a worker's non-tensor bytes, `alone` or between two others, without fragmentation."""
        communicators = 0 if alone else _NEIGHBOURS * self.communicator_bytes
        return self.context_bytes + communicators + _THREADS * self.cublas_workspace_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceKind:
    """Peak figures of a kind of device, and the shares that kernels reach (`timing`).

    `flops` maps a dtype name (`float32`, `bfloat16`) to peak FLOP/s; `tf32` is the rate of float32 products
    on tensor cores, which torch uses for convolutions by default. `memory_bandwidth` is in bytes per
    second. `flops_reached` is the share of the peak that large products reach, by dtype, and
    `attention_reached` the share of that rate that fused attention reaches. `bandwidth_reached` is the
    share that large elementwise kernels reach, unless they are bound by `elements_per_second`: kernels load
    few elements at a time, so on a device with high bandwidth small dtypes reach less of it. None means no
    such bound. `operation_seconds` is the fixed cost of every operation. A GPU computes products in tiles,
    one on each of its `multiprocessors`; None means that products are not divided. `overheads` is the
    non-tensor memory of a process, for GPUs.

    Raises:
        UsageError: a figure that is not positive, no FLOP/s figure, an unknown dtype, a share above 1, or a
            negative time.
    """

    name: str
    flops: dict[str, float]
    memory_bandwidth: float
    flops_reached: dict[str, float] = field(default_factory=dict)
    attention_reached: float = USUAL_ATTENTION_REACHED
    bandwidth_reached: float = 0.8
    elements_per_second: float | None = None
    operation_seconds: float = 5e-6
    multiprocessors: int | None = None
    overheads: Overheads = Overheads()

    def __post_init__(self) -> None:
        check_types(self)
        for dtype in {*self.flops, *self.flops_reached} - {TF32}:
            check_dtype(dtype)
        if not self.flops or not all(
            0 < rate < inf for rate in (self.memory_bandwidth, *self.flops.values())
        ):
            raise UsageError(
                f"device kind {self.name!r} needs a memory_bandwidth and at least one FLOP/s figure, all "
                "positive and finite"
            )
        parts = self.attention_reached, self.bandwidth_reached, *self.flops_reached.values()
        if not all(0 < part <= 1 for part in parts):
            raise UsageError(
                f"device kind {self.name!r}: attention_reached, bandwidth_reached and flops_reached are "
                "fractions of the peak figures, above 0 and at most 1"
            )
        if not 0 <= self.operation_seconds < 1:
            raise UsageError(
                f"device kind {self.name!r}: operation_seconds must be at least 0 and less than 1, not "
                f"{self.operation_seconds:g}"
            )
        if self.multiprocessors is not None and not 1 <= self.multiprocessors <= MOST_MULTIPROCESSORS:
            raise UsageError(
                f"device kind {self.name!r}: multiprocessors must be from 1 to {MOST_MULTIPROCESSORS}, not "
                f"{self.multiprocessors}"
            )
        _check_rates(f"memory of device kind {self.name!r}", self.bandwidth(1), self.bandwidth(8))
        parts = (USUAL_FLOPS_REACHED, *self.flops_reached.values())
        reached = (rate * part * self.attention_reached for rate in self.flops.values() for part in parts)
        _check_rates(f"arithmetic of device kind {self.name!r}", *reached)

    @property
    def key(self) -> tuple[object, ...]:
        """All figures as a hashable key."""
        by_dtype = tuple(sorted(self.flops.items())), tuple(sorted(self.flops_reached.items()))
        shares = self.attention_reached, self.bandwidth_reached, self.elements_per_second
        return (
            self.name,
            *by_dtype,
            self.memory_bandwidth,
            *shares,
            self.operation_seconds,
            self.multiprocessors,
        )

    def peak_flops(self, dtype: str) -> float:
        """Return the FLOP/s at `dtype`.

        A dtype without a figure has the float32 rate, or else the slowest listed.
        """
        return self.flops.get(dtype) or self.flops.get("float32") or min(self.flops.values())

    def part_of_flops(self, dtype: str) -> float:
        """Return the share of the peak that large products reach at `dtype`.

        A dtype without a figure reaches `USUAL_FLOPS_REACHED`.
        """
        return self.flops_reached.get(dtype, USUAL_FLOPS_REACHED)

    def bandwidth(self, itemsize: int) -> float:
        """Return bytes per second that large elementwise kernels reach with elements of `itemsize` bytes."""
        reached = self.memory_bandwidth * self.bandwidth_reached
        return min(reached, (self.elements_per_second or inf) * itemsize)

    def convolves_in(self, dtype: str) -> str:
        """Return the arithmetic of convolutions of `dtype`: `tf32` for float32, if the device has it."""
        return TF32 if dtype == "float32" and TF32 in self.flops else dtype

    def on_tensor_cores(self, arithmetic: str) -> bool:
        """Return whether products run on tensor cores: in TF32, or much faster than in float32."""
        return arithmetic == TF32 or self.peak_flops(arithmetic) > 1.5 * self.peak_flops("float32")

    def estimates(self, dtype: str) -> str:
        """Describe the rates that estimate unmeasured times, as a phrase."""
        return (
            f"{100 * self.part_of_flops(dtype):.0f} % of {self.peak_flops(dtype) / 1e12:g} TFLOP/s, "
            f"{100 * self.bandwidth_reached:.0f} % of {self.memory_bandwidth / 1e9:g} GB/s, "
            f"{self.operation_seconds * 1e6:g} us an operation"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device: its kind, its memory in bytes, and its host.

    `reserve_bytes` of its memory are reserved for non-tensor memory of its process; None means the default of
    its kind (`Cluster.reserves`).

    Raises:
        UsageError: no memory, or a reserve that leaves none.
    """

    kind: DeviceKind
    memory_bytes: int
    host: int = 0
    reserve_bytes: int | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.memory_bytes < 1:
            raise UsageError(f"a device needs at least one byte of memory, not {self.memory_bytes}")
        if self.reserve_bytes is not None and not 0 <= self.reserve_bytes < self.memory_bytes:
            raise UsageError(
                f"a reserve must be at least zero and less than the {format_bytes(self.memory_bytes)} of "
                f"its device, not {format_bytes(self.reserve_bytes)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine: memory for offloaded tensors, and optionally a disk, both in bytes.

    `memory_bandwidth` is the peak of its memory in bytes per second, used to estimate updates on the CPU;
    None if unknown. `disk_folder` is the folder for tensors on the disk during training; None means the
    system's temporary folder.

    Raises:
        UsageError: no memory, a negative disk, or a bandwidth that is not positive.
    """

    memory_bytes: int
    disk_bytes: int = 0
    memory_bandwidth: float | None = None
    disk_folder: str | None = None

    def __post_init__(self) -> None:
        check_types(self)
        if self.memory_bytes < 1 or self.disk_bytes < 0:
            raise UsageError(
                f"a host needs positive memory_bytes and non-negative disk_bytes, not {self.memory_bytes} "
                f"and {self.disk_bytes}"
            )
        if self.memory_bandwidth is not None and not 0 < self.memory_bandwidth < inf:
            raise UsageError(
                f"a host's memory_bandwidth must be positive and finite, not {self.memory_bandwidth:g}: "
                "omit it if unknown"
            )
        if self.memory_bandwidth is not None:
            _check_rates("memory of a host", self.memory_bandwidth)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A connection between members of a cluster.

    `bytes_per_second` is one lane's rate in one direction, from the data sheet. Copies reach the share
    `efficiency` of it, and the share `duplex` of that while the opposite direction is busy: 1 if the
    directions are independent, 0.5 if they alternate. Links with the same `wire` share it. A switch that
    reduces data itself (NVLink SHARP) reaches the share `reduces` of its rate in an all-reduce; 0 if it does
    not.

    Raises:
        UsageError: fewer than two members, one without a number, or an impossible figure.
    """

    members: tuple[Member, ...]
    bytes_per_second: float
    latency_seconds: float = 0.0
    lanes: int = 1
    wire: str | None = None
    efficiency: float = 1.0
    duplex: float = 1.0
    reduces: float = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        if len(set(self.members)) < 2 or any(member.number is None for member in self.members):
            raise UsageError(
                "a link connects two or more different members, each with its number, such as device0 and "
                f"host0, not {', '.join(map(str, self.members)) or 'none'}"
            )
        if not 0 < self.bytes_per_second < inf or not 0 <= self.latency_seconds < inf or self.lanes < 1:
            raise UsageError(
                f"{self._named}: bytes_per_second and lanes must be positive, latency non-negative, and all "
                f"finite, not {self.bytes_per_second:g}, {self.lanes} and {self.latency_seconds:g}"
            )
        if not 0 < self.efficiency <= 1:
            raise UsageError(
                f"{self._named}: efficiency is the fraction of bytes_per_second that copies reach, above 0 "
                f"and at most 1, not {self.efficiency:g}"
            )
        if not 0.5 <= self.duplex <= 1:
            raise UsageError(
                f"{self._named}: duplex is the fraction of its rate that each direction keeps when both are "
                f"busy, from 0.5 (half duplex) to 1 (full duplex), not {self.duplex:g}"
            )
        if not 0 <= self.reduces <= 1:
            raise UsageError(
                f"{self._named}: reduces is the fraction of its rate that a switch reaches which reduces "
                f"data, at most 1, or 0 for none, not {self.reduces:g}"
            )
        _check_rates(self._named, self.copy_rate)
        if self.latency_seconds >= LONGEST_SECONDS:
            raise UsageError(
                f"{self._named}: latency_seconds must be less than {LONGEST_SECONDS:g}, not "
                f"{self.latency_seconds:g}"
            )

    @property
    def _named(self) -> str:
        """The link by its members, shortened."""
        return f"link {shortened('-'.join(map(str, self.members)))}"

    @property
    def copy_rate(self) -> float:
        """Bytes per second, one way, that copies reach over all lanes together."""
        return self.bytes_per_second * self.lanes * self.efficiency

    @classmethod
    def between(
        cls,
        *members: str,
        bytes_per_second: float,
        latency_seconds: float = 0.0,
        lanes: int = 1,
        wire: str | None = None,
        efficiency: float = 1.0,
        duplex: float = 1.0,
        reduces: float = 0.0,
    ) -> Link:
        """Return a link between members given as texts.

        Example: `Link.between("device0", "host0", bytes_per_second=1e10)`.

        Raises:
            UsageError: a text is not a member, or as in the constructor.
        """
        return cls(
            members=tuple(map(parse_member, members)),
            bytes_per_second=bytes_per_second,
            latency_seconds=latency_seconds,
            lanes=lanes,
            wire=wire,
            efficiency=efficiency,
            duplex=duplex,
            reduces=reduces,
        )
