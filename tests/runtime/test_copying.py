"""Copies between storages and slots: the right bytes, in order, no earlier than a link allows, during
computation.
"""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from pipefit.runtime.offload.copying import Beside, Copier, Slot, SlotPart, UnpacedCopies

BYTES = 4096


@pytest.fixture(params=[UnpacedCopies, Beside])
def copier(request: pytest.FixtureRequest) -> Iterator[Copier]:
    """Return one of both kinds of copiers."""
    made: Copier = request.param()
    yield made
    made.abandon()


def slot() -> Slot:
    """Return zeroed memory."""
    memory = ctypes.create_string_buffer(BYTES)
    return Slot(BYTES, ctypes.addressof(memory), memory)


def values(seed: int) -> torch.Tensor:
    """Return bytes of noise."""
    return torch.randint(0, 256, (BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def part(tensor: torch.Tensor, there: Slot) -> list[SlotPart]:
    """Return all bytes of both."""
    return [SlotPart(tensor.untyped_storage(), 0, there, 0, BYTES)]


def test_what_goes_out_comes_back(copier: Copier) -> None:
    """Parts of two storages that are crossed over in two slots return to their places, without touching other
    bytes.
    """
    one, other, there = values(1), values(2), (slot(), slot())
    wanted = [one.clone(), other.clone()]
    half = BYTES // 2
    parts = [
        SlotPart(one.untyped_storage(), 0, there[0], half, half),
        SlotPart(one.untyped_storage(), half, there[1], 0, half),
        SlotPart(other.untyped_storage(), 10, there[0], 0, 100),
    ]
    copier.join(copier.start(parts, outward=True, seconds=0.0))
    one.zero_()
    other[10:110] = 0
    copier.join(copier.start(parts, outward=False, seconds=0.0))
    assert torch.equal(one, wanted[0]) and torch.equal(other, wanted[1])


@dataclass(frozen=True, slots=True, eq=False)
class Gated(Slot):
    """A slot at which copies wait until it is opened."""

    opened: threading.Event = field(default_factory=threading.Event)

    def carry(self, parts: Sequence[SlotPart], *, outward: bool) -> None:
        assert self.opened.wait(60)
        Slot.carry(self, parts, outward=outward)


@pytest.fixture
def gated() -> Iterator[Gated]:
    """Return a closed slot, which is opened at the end at the latest."""
    there = slot()
    made = Gated(BYTES, there.address, there.owner)
    yield made
    made.opened.set()


def test_a_copy_ends_no_earlier_than_its_link_allows(gated: Gated) -> None:
    """Two copies in one direction take the sum of their seconds, and starting them takes none."""
    copier, began = Beside(), time.monotonic()
    copies = [copier.start(part(values(n), gated), outward=True, seconds=0.15) for n in range(2)]
    assert not copies[0].done()
    gated.opened.set()
    copier.join(copies[0])
    assert time.monotonic() - began >= 0.15
    copier.join(copies[1])
    assert time.monotonic() - began >= 0.3


def test_copies_in_both_directions_run_side_by_side(gated: Gated) -> None:
    """Copies in opposite directions run in parallel; copies in the same direction wait for each other."""
    copier, tensor = Beside(), values(0)
    out, behind = (copier.start(part(tensor, there), outward=True, seconds=0.0) for there in (gated, slot()))
    copier.join(copier.start(part(values(1), slot()), outward=False, seconds=0.0))
    assert not out.done() and not behind.done()


def test_what_has_been_copied_is_its_owners_alone(gated: Gated) -> None:
    """A copied tensor is held by its owner alone: a thread may go idle some time after the join, without
    holding memory.
    """
    copier, tensor, rests = Beside(), values(0), threading.Event()
    storage = weakref.ref(tensor.untyped_storage())
    copy = copier.start(part(tensor, gated), outward=True, seconds=0.0)
    copy.add_done_callback(lambda _: rests.wait(60))  # on the thread, which still has its work
    gated.opened.set()
    copier.join(copy)
    del tensor
    assert storage() is None
    rests.set()


def test_copies_that_are_abandoned_end_at_once() -> None:
    """Abandoned copies, running or queued, end at once; later copies run as usual."""
    copier, tensor, began = Beside(), values(3), time.monotonic()
    for _ in range(3):
        copier.start(part(tensor, slot()), outward=True, seconds=60.0)
    copier.abandon()
    assert time.monotonic() - began < 60  # one copy alone takes as long
    there = slot()
    copier.join(copier.start(part(tensor, there), outward=True, seconds=0.0))
    assert ctypes.string_at(there.address, BYTES) == bytes(tensor.tolist())
