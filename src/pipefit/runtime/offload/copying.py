"""Copying bytes between storages and slots: at once, beside computing, or not at all in a dry run.

A `Copier` starts a copy and returns a handle to join, as a transport does with messages. Threads copy with the C
library, which needs no operation of torch: no meter sees them, and Python runs on meanwhile. How bytes get into a slot
and out of it is the slot's own: in memory they are copied, on a disk written and read (`pipefit.runtime.offload.disk`).

Links of emulated devices are paced: a copy ends no earlier than its link would take after its start. Outward copies of
a device come one after the other, and so do inward ones, as in the simulator; what copies of several devices would take
from each other on a common wire is not made up. Updates on a host keep their time in the same way (`Pace`).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from threading import Event
from typing import Any, NamedTuple, Protocol

import torch

from pipefit.schema.devices import Member


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """`nbytes` of memory from `address` on; `owner` keeps it. Slots of a dry run have neither."""

    nbytes: int
    address: int = 0
    owner: object = None

    def carry(self, parts: Sequence[Part], *, outward: bool) -> None:
        """Copy parts of this slot, which lie in it one after the other, from their storages or back to them."""
        for storage, offset, _, within, nbytes, _ in parts:
            here, there = storage.data_ptr() + offset, self.address + within
            ctypes.memmove(*((there, here) if outward else (here, there)), nbytes)


def in_a_row(nbytes: int, count: int, address: int, owner: object) -> list[Slot]:
    """So many slots of `nbytes` one after the other in memory of `owner`, from `address` on."""
    return [Slot(nbytes, address + number * nbytes, owner) for number in range(count)]


class Part(NamedTuple):
    """`nbytes` of a storage, from `offset` on, that are `within` bytes into a slot of `lender`."""

    storage: torch.UntypedStorage
    offset: int
    slot: Slot
    within: int
    nbytes: int
    lender: Member | None = None


class Pace:
    """Lets what runs on a thread end no earlier than an emulated device would, unless a step has failed meanwhile."""

    def __init__(self) -> None:
        self._ending = Event()

    def keeping(self, seconds: float, run: Callable[[], None]) -> Callable[[], None]:
        """A function that runs `run`, and returns `seconds` after it was called or later."""
        ending = self._ending

        def paced() -> None:
            end = time.monotonic() + seconds
            run()
            while (left := end - time.monotonic()) > 0 and not ending.wait(left):
                pass

        return paced

    def abandon(self) -> None:
        """Functions that `keeping` has returned so far wait no longer, as after a failed step."""
        self._ending.set()
        self._ending = Event()


class Copier(Protocol):
    """What moves bytes between storages and slots.

    Copies of one direction of a device follow one another in the order in which they start. Those of the two directions
    run side by side.
    """

    @property
    def beside(self) -> bool:
        """Whether copies run while the device computes, so that they take time of their own."""

    def start(self, parts: Sequence[Part], *, outward: bool, seconds: float) -> Any:
        """Begin to copy, into the slots if `outward`, over links that take `seconds`; a handle to join."""

    def join(self, handle: Any) -> None:
        """What computes from now on finds the copy complete; the host may not, on a GPU."""

    def settle(self, handle: Any) -> None:
        """Return when the copy is complete, so that the host may read and write what was copied. Any thread may ask."""

    def abandon(self) -> None:
        """End all copies after a step has failed."""


class NoCopier:
    """Copies nothing: the tensors are fake."""

    beside = False

    def start(self, parts: Sequence[Part], *, outward: bool, seconds: float) -> None:
        """There is nothing to copy."""

    def join(self, handle: None) -> None:
        """The copy was complete from the start."""

    def settle(self, handle: None) -> None:
        """The copy was complete from the start."""

    def abandon(self) -> None:
        """Nothing is under way."""


class AtOnce(NoCopier):
    """Copies as a copy starts, in no time of any link: for several devices in one process, which take turns anyway."""

    def start(self, parts: Sequence[Part], *, outward: bool, seconds: float) -> None:
        carry(parts, outward=outward)


class Beside:
    """Copies on two threads, one outward and one inward, while the device computes."""

    beside = True

    def __init__(self) -> None:
        self._streams = [ThreadPoolExecutor(1, f"pipefit-copies-{way}") for way in ("in", "out")]
        self._under_way: list[Future[None]] = []
        self._pace = Pace()

    def start(self, parts: Sequence[Part], *, outward: bool, seconds: float) -> Future[None]:
        self._under_way = [copy for copy in self._under_way if not copy.done()]
        carrying = partial(carry_and_forget, list(parts), outward=outward)
        copy = self._streams[outward].submit(self._pace.keeping(seconds, carrying))
        self._under_way.append(copy)
        return copy

    def join(self, handle: Future[None]) -> None:
        handle.result()

    def settle(self, handle: Future[None]) -> None:
        handle.result()

    def abandon(self) -> None:
        self._pace.abandon()
        for copy in self._under_way:
            copy.exception()  # returns when the copy has ended, which now takes no time of a link
        self._under_way.clear()


def carry_and_forget(parts: list[Part], *, outward: bool) -> None:
    """Carry parts, and let go of their storages: a thread keeps its work for a moment after it has said that this is
    done, in which whoever joins it may want the memory back.
    """
    try:
        carry(parts, outward=outward)
    finally:
        parts.clear()


def carry(parts: Sequence[Part], *, outward: bool) -> None:
    """Copy parts to their slots, or back from them; it has been done when this returns."""
    for slot, own in groupby(parts, attrgetter("slot")):
        slot.carry(list(own), outward=outward)
