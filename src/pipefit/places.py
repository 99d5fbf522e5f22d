"""Where bytes can be: a device, a host or a disk of the cluster, alone or several of them with shares.

    device3                  one device
    host                     the host of the device that moves something; host1 is host number 1
    device3*2+device4*1      striped over two peers: two parts of three on device 3, one on device 4
    device5                  of a message, its other end

The text forms are what people write and read; inside pipefit a place is a tuple of members with whole-number shares.
What a place offers to a device - room, a rate and a latency - is the cluster's to say (`pipefit.cluster.Tier`).
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

from pipefit.errors import UsageError
from pipefit.texts import shortened
from pipefit.units import WHOLE

ALIGNMENT = 512  # bytes; CUDA's allocator begins every block at a multiple of it, and copies between such run fastest


class MemberKind(StrEnum):
    """What a member of a cluster is."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Member(NamedTuple):
    """A device, host or disk of a cluster, by its number there.

    A host or disk without a number is that of the device that moves something. A disk has the number of its host.
    """

    kind: MemberKind
    number: int | None

    def __str__(self) -> str:
        return self.kind.value if self.number is None else f"{self.kind.value}{self.number}"

    def at(self, host: int) -> Member:
        """This member with its number, for a device that sits in `host`."""
        return self if self.number is not None else Member(self.kind, host)

    @staticmethod
    def device(number: int) -> Member:
        """Device `number` of the cluster."""
        return Member(MemberKind.DEVICE, number)

    @staticmethod
    def host(number: int | None = None) -> Member:
        """Host `number`; without one, the host of the device that moves something."""
        return Member(MemberKind.HOST, number)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """In files a member is its text."""
        return _as_text(parse_member)


class Share(NamedTuple):
    """A member and how many parts of the whole it takes."""

    member: Member
    parts: int


class Place(tuple[Share, ...]):
    """Members of a cluster and the share of the bytes that each takes."""

    __slots__ = ()

    def __str__(self) -> str:
        return _text(self)

    def __repr__(self) -> str:
        return f"Place({self})"

    @property
    def members(self) -> tuple[Member, ...]:
        """The members that take a share."""
        return tuple(member for member, _ in self)

    def split(self, nbytes: int) -> tuple[tuple[Member, int], ...]:
        """`nbytes` in proportion to the shares, in blocks of whole bytes that add up.

        Every block begins at a multiple of `ALIGNMENT`, unless the smallest share is less than that.
        """
        whole, smallest = sum(parts for _, parts in self), min(parts for _, parts in self)
        unit = ALIGNMENT if nbytes * smallest >= ALIGNMENT * whole else 1
        found, taken, before = [], 0, 0
        for member, parts in self:
            taken += parts
            end = nbytes if taken == whole else (nbytes * taken // whole + unit // 2) // unit * unit
            found.append((member, end - before))
            before = end
        return tuple(found)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """In files a place is its text."""
        return _as_text(parse_place)


@lru_cache(maxsize=1 << 12)
def _text(place: Place) -> str:
    """The text form; kept, because a program's many copies have few places."""
    return "+".join(str(m) if len(place) == 1 and parts == 1 else f"{m}*{parts}" for m, parts in place)


_MEMBER = re.compile(rf"(device|host|disk)({WHOLE})?")
_SHARE = re.compile(rf"([a-z]+[0-9]*)(?:\*({WHOLE}))?")


def parse_member(text: str) -> Member:
    """The member that `str(member)` wrote, such as `device3`.

    Raises:
        UsageError: not a member, or a device without a number.
    """
    match = _MEMBER.fullmatch(text)
    if not match or (match[1] == "device" and not match[2]):
        raise UsageError(f"{shortened(repr(text))} is no member of a cluster: write device3, host0 or disk0")
    return Member(MemberKind(match[1]), int(match[2]) if match[2] else None)


@lru_cache(maxsize=1 << 12)
def parse_place(text: str) -> Place:
    """The place that `str(place)` wrote.

    Raises:
        UsageError: not a place: an unknown member, a share of nothing, a member named twice.
    """
    shares = []
    for word in text.split("+"):
        match = _SHARE.fullmatch(word)
        if not match or not _MEMBER.fullmatch(match[1]):
            raise UsageError(
                f"{shortened(repr(text))} is not a place: write host, device3 or, in shares, device3*2+device4*1"
            )
        shares.append(Share(parse_member(match[1]), int(match[2] or 1)))
    place = Place(shares)
    if min(parts for _, parts in place) < 1:
        raise UsageError(f"place {text!r}: every share is one part or more")
    if len(set(place.members)) != len(place):
        raise UsageError(f"place {text!r} names a member twice: add its shares up")
    for kind in (MemberKind.HOST, MemberKind.DISK):
        numbers = [member.number for member in place.members if member.kind is kind]
        if None in numbers and len(numbers) > 1:
            raise UsageError(
                f"place {text!r} names a {kind.value} with its number and one without, which may be the same: "
                "give both a number"
            )
    return place


def _as_text(parse: Any) -> Any:
    """Pydantic's schema of a type that is written to files as its text."""
    from pydantic_core import core_schema  # only where a file is read or written

    text = core_schema.chain_schema([core_schema.str_schema(), core_schema.no_info_plain_validator_function(parse)])
    return core_schema.json_or_python_schema(
        json_schema=text,
        python_schema=core_schema.no_info_plain_validator_function(
            lambda item: parse(item) if isinstance(item, str) else item
        ),
        serialization=core_schema.plain_serializer_function_ser_schema(str),
    )
