"""Collectives as transfers between their members: who sends how many bytes to whom.

A sum over n members goes around a ring (Patarasuk and Yuan, 2009): in n - 1 rounds every member adds up one part of the
bytes, and in n - 1 more the finished parts go around. Every member sends 2 (n - 1) / n of the bytes to the next one, in
2 (n - 1) messages, all at the same time. That is the least that any arrangement sends, so it is what NCCL and gloo use
for gradients; for a few bytes on many devices a tree takes fewer messages, which is not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
