"""Arenas: memory that devices with room to spare reserve for tensors of other devices, for a whole run.

A borrower takes a slot of the arena when an OFFLOAD starts, and returns it when the RELOAD is joined. So the number of
slots that it uses at once depends on its program alone. The lender reserves that many slots of each size before the
first step, and its peak does not depend on the speed of any device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from pipefit.actions import COPIES, Action, Kind
from pipefit.places import MemberKind, Place


class Arena(NamedTuple):
    """Memory of device `lender` for device `borrower`: `slots` pieces of `slot_bytes` each."""

    lender: int
    borrower: int
    slots: int
    slot_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes


def arenas(devices: Sequence[Sequence[Action]], moved_bytes: Callable[[Action], int]) -> tuple[Arena, ...]:
    """The arenas that every device lends to each other one.

    Args:
        devices: the actions of every device; only OFFLOADs and RELOADs matter.
        moved_bytes: how many bytes an OFFLOAD or RELOAD moves.
    """
    found: list[Arena] = []
    slots_of = cache(_slots)
    for borrower, actions in enumerate(devices):
        in_use, most = Counter[tuple[int, int]](), Counter[tuple[int, int]]()  # by lender and slot size
        for action in actions:
            if action.kind not in COPIES or action.place is None or action.wait != (action.kind is Kind.RELOAD):
                continue
            for slot in slots_of(action.place, moved_bytes(action)):
                in_use[slot] += 1 if action.kind is Kind.OFFLOAD else -1
                most[slot] = max(most[slot], in_use[slot])
        found += [Arena(lender, borrower, slots, nbytes) for (lender, nbytes), slots in sorted(most.items()) if nbytes]
    return tuple(found)


def _slots(place: Place, nbytes: int) -> list[tuple[int, int]]:
    """The slots, as lender and size, that the start of an OFFLOAD takes and a joined RELOAD gives back."""
    shares = place.split(nbytes)
    return [(member.number or 0, nbytes) for member, nbytes in shares if member.kind is MemberKind.DEVICE]
