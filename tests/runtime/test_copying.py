"""Copies between storages and slots: the right bytes, in order, no earlier than a link allows, beside computing."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator

import pytest
import torch

from pipefit.runtime.copying import AtOnce, Beside, Copier, Part, Slot

BYTES = 4096


@pytest.fixture(params=[AtOnce, Beside])
def copier(request: pytest.FixtureRequest) -> Iterator[Copier]:
    """Either kind that copies."""
    made: Copier = request.param()
    yield made
    made.abandon()


def slot() -> Slot:
    """Memory of zeros."""
    memory = ctypes.create_string_buffer(BYTES)
    return Slot(BYTES, ctypes.addressof(memory), memory)


def values(seed: int) -> torch.Tensor:
    """Bytes of noise."""
    return torch.randint(0, 256, (BYTES,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def part(tensor: torch.Tensor, there: Slot) -> list[Part]:
    """All bytes of both."""
    return [Part(tensor.untyped_storage(), 0, there, 0, BYTES)]


def test_what_goes_out_comes_back(copier: Copier) -> None:
    """Parts of two storages that lie crosswise in two slots return to where they were, and touch nothing else."""
    one, other, there = values(1), values(2), (slot(), slot())
    wanted = [one.clone(), other.clone()]
    half = BYTES // 2
    parts = [
        Part(one.untyped_storage(), 0, there[0], half, half),
        Part(one.untyped_storage(), half, there[1], 0, half),
        Part(other.untyped_storage(), 10, there[0], 0, 100),
    ]
    copier.join(copier.start(parts, outward=True, seconds=0.0))
    one.zero_()
    other[10:110] = 0
    copier.join(copier.start(parts, outward=False, seconds=0.0))
    assert torch.equal(one, wanted[0]) and torch.equal(other, wanted[1])


def test_a_copy_ends_no_earlier_than_its_link_allows() -> None:
    """Two copies in one direction take the seconds of both, one after the other, and starting them takes none."""
    copier, began = Beside(), time.monotonic()
    copies = [copier.start(part(values(n), slot()), outward=True, seconds=0.15) for n in range(2)]
    assert time.monotonic() - began < 0.1
    copier.join(copies[0])
    assert 0.15 <= time.monotonic() - began < 0.29
    copier.join(copies[1])
    assert time.monotonic() - began >= 0.3


def test_copies_in_both_directions_run_side_by_side() -> None:
    """An inward copy need not wait for an outward one."""
    copier, began = Beside(), time.monotonic()
    out, back = (copier.start(part(values(0), slot()), outward=way, seconds=0.3) for way in (True, False))
    copier.join(out)
    copier.join(back)
    assert 0.3 <= time.monotonic() - began < 0.55


def test_copies_that_are_abandoned_end_at_once() -> None:
    """Neither the one that runs nor those that wait behind it hold anything up; the next ones run as ever."""
    copier, tensor, began = Beside(), values(3), time.monotonic()
    for _ in range(3):
        copier.start(part(tensor, slot()), outward=True, seconds=60.0)
    copier.abandon()
    assert time.monotonic() - began < 5
    there = slot()
    copier.join(copier.start(part(tensor, there), outward=True, seconds=0.0))
    assert ctypes.string_at(there.address, BYTES) == bytes(tensor.tolist())
