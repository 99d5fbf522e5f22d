"""Tensors that a collective has on loan: their memory is given back when it is complete, and not a moment later.

gloo's threads drop their references a little after they have said that a collective is complete: microseconds, or a
turn of the scheduler where many threads share a core. If they had the tensors, memory that nobody needs any more would
still be there for that moment, and how much a rank holds at once would be a matter of chance.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class Loan:
    """What a collective gets in the place of its `owners`: `tensors` over the same memory, which keep it until the
    loan ends. On a GPU they are the owners themselves, which NCCL lets go as it is joined.
    """

    def __init__(self, owners: Sequence[Tensor]) -> None:
        self._held = list[Any]()
        self.tensors = [self._lent(owner) for owner in owners]

    def _lent(self, owner: Tensor) -> Tensor:
        if owner.device.type != "cpu" or not owner.numel():
            return owner
        memory: Any = (ctypes.c_char * owner.nbytes).from_address(owner.data_ptr())
        memory.owner = owner
        self._held.append(memory)
        return torch.frombuffer(memory, dtype=owner.dtype).as_strided(owner.shape, owner.stride())

    def wait(self, *_: Any) -> None:
        """End the loan, at once: the collective is complete, so that nobody reads or writes the memory any more."""
        for memory in self._held:
            memory.owner = None


@contextmanager
def lent(*owners: Tensor) -> Iterator[list[Tensor]]:
    """What a collective gets for these tensors. It is complete when the block ends; if it fails, the memory is kept as
    long as its threads may use it.
    """
    loan = Loan(owners)
    yield loan.tensors
    loan.wait()
