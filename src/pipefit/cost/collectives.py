"""Collectives as transfers between their members: who sends how many bytes to whom.

A sum over n members goes around a ring (Patarasuk and Yuan, 2009): in n - 1 rounds every member adds up one part of the
bytes, and in n - 1 more the finished parts go around. Every member sends 2 (n - 1) / n of the bytes to the next one, in
2 (n - 1) messages, all at the same time. That is the least that any arrangement sends, so it is what NCCL and gloo use
for gradients; for a few bytes on many devices a tree takes fewer messages, which is not modelled.

Sums that only their owners get are the first half of this, and what owners bring to all is the other half, with parts
as large as the owners' shares. NCCL takes that long; gloo sends the sums to their owners in a second round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pipefit.cluster import Cluster
from pipefit.places import Member
from pipefit.work import Collective


class Ring(NamedTuple):
    """The ring of a tensor-parallel group, whose ranks wait for each other in the middle of a layer.

    `seconds_per_byte` are those of a byte that every rank sends to the next, all at once, and `latency_seconds` what a
    round takes besides. Other transfers on the same wires are not waited for.
    """

    members: int
    seconds_per_byte: float
    latency_seconds: float

    @staticmethod
    def of(cluster: Cluster, devices: Sequence[int]) -> Ring:
        """The ring of these devices, in their order."""
        ring = zip(devices, (*devices[1:], devices[0]), strict=True)
        routes = [cluster.route(Member.device(one), Member.device(other)) for one, other in ring if one != other]
        busy: dict[str, float] = {}  # by wire, the seconds until all hops have sent a byte: some share a wire
        for route in routes:
            begin = max((busy.get(wire, 0.0) for wire in route.wires), default=0.0)
            busy |= dict.fromkeys(route.wires, begin + 1 / route.bytes_per_second)
        latency = max((route.latency_seconds for route in routes), default=0.0)
        return Ring(len(devices), max(busy.values(), default=0.0), latency)

    def seconds(self, collectives: Iterable[Collective]) -> float:
        """Seconds of collectives one after the other: a sum goes around twice; once, if every rank gets its part of
        it, and so does a gather.
        """
        return sum(self._seconds(2 if one.kind == "all_reduce" else 1, one.nbytes) for one in collectives)

    def _seconds(self, times: int, nbytes: int) -> float:
        sent = times * (self.members - 1) * nbytes / self.members
        return sent * self.seconds_per_byte + times * (self.members - 1) * self.latency_seconds


class Hop(NamedTuple):
    """What one member sends to another in a collective, in so many messages one after the other."""

    source: int
    target: int
    nbytes: int
    messages: int


def ring_sum(members: Sequence[int], nbytes: int) -> tuple[Hop, ...]:
    """The hops of a sum of `nbytes` over devices; none between members on one device."""
    count = len(members)
    if count < 2:
        return ()
    share, rounds = 2 * (count - 1) * nbytes // count, 2 * (count - 1)
    ring = zip(members, (*members[1:], members[0]), strict=True)
    return tuple(Hop(source, target, share, rounds) for source, target in ring if source != target)


def ring_to_owners(members: Sequence[int], shares: Sequence[int]) -> tuple[Hop, ...]:
    """The hops of sums of which every member gets its own share, of so many bytes: that goes to it from the member
    behind, around the ring.
    """
    kept = dict(zip(members, shares, strict=True))
    return _around(members, sum(shares), lambda source, target: kept[source])


def ring_from_owners(members: Sequence[int], shares: Sequence[int]) -> tuple[Hop, ...]:
    """The hops that bring every member's share to all others: it goes around the ring to the member before its own."""
    kept = dict(zip(members, shares, strict=True))
    return _around(members, sum(shares), lambda source, target: kept[target])


def _around(members: Sequence[int], nbytes: int, left_out: Callable[[int, int], int]) -> tuple[Hop, ...]:
    """Every hop of the ring with all bytes but those that it leaves out."""
    ring = zip(members, (*members[1:], members[0]), strict=True) if len(members) > 1 else ()
    return tuple(Hop(one, other, nbytes - left_out(one, other), len(members) - 1) for one, other in ring)
