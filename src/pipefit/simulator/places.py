"""Where an offloaded tensor goes: `host`, `host1`, `device3`, or striped, `device3*2+device4*1`."""

from __future__ import annotations

import re

from pipefit.cluster import Cluster
from pipefit.errors import UsageError

_PART = re.compile(r"(host|device)(\d*)(?:\*(\d+))?")


def parts(place: str | None, nbytes: int, *, device: int, cluster: Cluster) -> tuple[tuple[str, int], ...]:
    """The members of the cluster that take `nbytes` from `device`, and the bytes of each, in proportion to the shares.

    Raises:
        UsageError: not a place, not in this cluster, or the device itself.
    """
    shares = [_share(word, place, device, cluster) for word in (place or "").split("+")]
    whole = sum(share for _, share in shares)
    divided, taken, before = [], 0, 0
    for member, share in shares:
        taken += share
        upto = nbytes * taken // whole
        divided.append((member, upto - before))
        before = upto
    return tuple(divided)


def _share(word: str, place: str | None, device: int, cluster: Cluster) -> tuple[str, int]:
    match = _PART.fullmatch(word)
    if not match or (match[1] == "device" and not match[2]):
        raise UsageError(f"{place!r} is not a place: write @host, @device3 or, in shares, @device3*2+device4*1")
    number = int(match[2]) if match[2] else cluster.devices[device].host
    member, share = f"{match[1]}{number}", int(match[3] or 1)
    if number >= len(cluster.devices if match[1] == "device" else cluster.hosts):
        raise UsageError(f"place {place!r}: cluster {cluster.name!r} has no {member}")
    if member == f"device{device}" or share < 1:
        raise UsageError(
            f"device {device} cannot move a tensor to {place!r}: name other members, with shares of one or more"
        )
    return member, share
