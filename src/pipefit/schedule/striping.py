"""Striping: a tensor that goes to several peers at once, in blocks that all end together.

    striped(cluster, 0)                      on a DGX-1: device1*1+device2*1+device3*2+device4*2
    striped(cluster, 0, peers=[3, 4])        device3*1+device4*1

Each block is in proportion to the bandwidth of the link to its peer: equal blocks on equal links, and blocks in
proportion to lanes where links differ in lanes. Where every peer has wires of its own, and all links the same latency,
no other blocks for the same peers end earlier. Peers in one switch share the device's own port: equal blocks are then
as fast as a single one, and spread what is lent. (MPress, D2D swap.)
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from math import gcd, lcm

from pipefit.cluster import Cluster
from pipefit.errors import UsageError
from pipefit.places import Member, Place, Share

_FINEST = 100  # rates are to each other as whole numbers whose quotient has at most this denominator


def neighbours(cluster: Cluster, device: int) -> tuple[int, ...]:
    """The devices that a link joins directly with this one."""
    here = Member.device(device)
    joined = {member for link in cluster.links if here in link.members for member in link.members} - {here}
    return tuple(number for number in range(len(cluster.devices)) if Member.device(number) in joined)


def striped(cluster: Cluster, device: int, peers: Iterable[int] | None = None) -> Place:
    """The place that a device moves a tensor to over the links to all of these peers at once.

    Args:
        peers: devices that have a link to `device`; all of them unless given.

    Raises:
        UsageError: no peers, one without a direct link, or a device that does not exist.
    """
    cluster.check(Member.device(device), "striping")
    near = neighbours(cluster, device)
    chosen = near if peers is None else tuple(dict.fromkeys(peers))
    far = [peer for peer in chosen if peer not in near]
    if far or not chosen:
        reached = ", ".join(map(str, near)) or "no other device"
        raise UsageError(
            f"device {device} of cluster {cluster.name!r} cannot stripe tensors over {far or 'no peers'}: links join "
            f"it directly with {reached}; name some of those, or a host"
        )
    rates = [cluster.route(Member.device(device), Member.device(peer)).bytes_per_second for peer in chosen]
    return Place(Share(Member.device(peer), parts) for peer, parts in zip(chosen, _whole(rates), strict=True))


def _whole(rates: list[float]) -> list[int]:
    """The smallest whole numbers that are to each other as these rates."""
    quotients = [Fraction(rate / min(rates)).limit_denominator(_FINEST) for rate in rates]
    scale = lcm(*(quotient.denominator for quotient in quotients))
    numbers = [int(quotient * scale) for quotient in quotients]
    return [number // gcd(*numbers) for number in numbers]
