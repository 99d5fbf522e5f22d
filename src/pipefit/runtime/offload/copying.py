"""Copies between storages and slots: immediately, in parallel with computing, or not at all in a dry run.

A `Copier` starts a copy and returns a handle to join, as a transport does with messages. Threads copy with
the C library, without operations of torch: no meter sees the copies, and they do not hold Python's lock. Each
kind of slot defines its transfer: memory is copied, a disk is written and read (`runtime.offload.disk`).

Links of emulated devices are paced: a copy ends no earlier than its start plus the time of its link. A
device's copies of one direction are sequential, as in the simulator; contention between devices on a common
wire, and the `duplex` of a link, are not emulated. Updates on a host are paced in the same way (`Pace`).
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
from typing import Any, NamedTuple

import torch

from pipefit.schema.devices import Member


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """`nbytes` of memory from `address` on; `owner` keeps it alive. Slots of a dry run have neither."""

    nbytes: int
    address: int = 0
    owner: object = None

    def carry(self, parts: Sequence[SlotPart], *, outward: bool) -> None:
        """Copy parts of this slot, which lie in it one after the other, from their storages or back to
        them.
        """
        for storage, offset, _, within, nbytes, _ in parts:
            here, there = storage.data_ptr() + offset, self.address + within
            ctypes.memmove(*((there, here) if outward else (here, there)), nbytes)


def in_a_row(nbytes: int, count: int, address: int, owner: object) -> list[Slot]:
    """Return `count` adjacent slots of `nbytes` in memory of `owner`, from `address` on."""
    return [Slot(nbytes, address + number * nbytes, owner) for number in range(count)]


class SlotPart(NamedTuple):
    """`nbytes` of a storage, from `offset` on, that are `within` bytes into a slot of `lender`."""

    storage: torch.UntypedStorage
    offset: int
    slot: Slot
    within: int
    nbytes: int
    lender: Member | None = None


class Pace:
    """Delays work on a thread until an emulated device would have done it, unless a step has failed."""

    def __init__(self) -> None:
        self._ending = Event()

    def keeping(self, seconds: float, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that runs `run`, and returns `seconds` after its call or later."""
        ending = self._ending

        def paced() -> None:
            end = time.monotonic() + seconds
            run()
            while (left := end - time.monotonic()) > 0 and not ending.wait(left):
                pass

        return paced

    def abandon(self) -> None:
        """End the delays of all functions that `keeping` has returned so far, as after a failed step."""
        self._ending.set()
        self._ending = Event()


class Copier:
    """Copies bytes between storages and slots. This one copies nothing, for fake tensors.

    Copies of one direction of a device run one after the other, in the order of their starts. The two
    directions run in parallel.
    """

    beside = False  # whether copies run while the device computes, and therefore take time separately

    def start(self, parts: Sequence[SlotPart], *, outward: bool, seconds: float) -> Any:
        """Begin to copy, into the slots if `outward`, over links that take `seconds`.

        Return a handle to join.
        """

    def join(self, handle: Any) -> None:
        """Order later computations after the copy; on a GPU the host does not wait."""

    def settle(self, handle: Any) -> None:
        """Wait until the copy is complete, so that the host may read and write the bytes.

        Any thread may call it.
        """

    def abandon(self) -> None:
        """End all copies after a failed step."""


class UnpacedCopies(Copier):
    """Copies completely at the start of a copy, without pacing.

    It serves several devices in one process, which run in turns.
    """

    def start(self, parts: Sequence[SlotPart], *, outward: bool, seconds: float) -> None:
        carry(parts, outward=outward)


class Beside(Copier):
    """Copies on two threads, one outward and one inward, while the device computes."""

    beside = True

    def __init__(self) -> None:
        self._streams = [ThreadPoolExecutor(1, f"pipefit-copies-{way}") for way in ("in", "out")]
        self._under_way: list[Future[None]] = []
        self._pace = Pace()

    def start(self, parts: Sequence[SlotPart], *, outward: bool, seconds: float) -> Future[None]:
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
            copy.exception()  # returns when the copy has ended, without pacing
        self._under_way.clear()


def carry_and_forget(parts: list[SlotPart], *, outward: bool) -> None:
    """Copy parts, and then release their storages.

    A thread keeps its arguments for a moment after it has reported the end of its work, and the caller that
    joins it may need the memory at once.
    """
    try:
        carry(parts, outward=outward)
    finally:
        parts.clear()


def carry(parts: Sequence[SlotPart], *, outward: bool) -> None:
    """Copy parts to their slots, or back from them; the copy is complete on return."""
    for slot, own in groupby(parts, attrgetter("slot")):
        slot.carry(list(own), outward=outward)
