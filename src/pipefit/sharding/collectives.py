"""What the ranks of a tensor-parallel group do together: four collectives, of which all others are made.

Sums, gathers, exchanges and broadcasts are the same with gloo and NCCL; reduce-scatter and averages are not, so that a
sum of which every rank gets its part is an exchange, added up by each. Every rank does them in one order, which the
rewritten layers fix. `Alone` stands for a rank whose peers are not there, so that one process without a network can say
what a rank holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipefit.sharding.loans import lent


class Collectives(Protocol):
    """One rank's end of its group."""

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over all ranks, in place, and returns it."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks in order; all have one shape."""

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """What all ranks have for this one, in their order, of the shape of `tensor`: that has something for each rank
        along its first dimension, and is contiguous.
        """

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Overwrites `tensor` with that of rank `source`, and returns it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroupCollectives:
    """Collectives of `torch.distributed`, over gloo or NCCL; of all processes, or of the process group given."""

    group: Any = None

    def __deepcopy__(self, memo: Any) -> ProcessGroupCollectives:
        return self  # a copy of a layer belongs to the same processes

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with lent(tensor) as (loan,):
            dist.all_reduce(loan, group=self.group)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        own = tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        with lent(own, *parts) as (loan, *found):
            dist.all_gather(found, loan, group=self.group)
        return parts

    def all_to_all(self, tensor: Tensor) -> Tensor:
        found = torch.empty_like(tensor)
        with lent(tensor, found) as (source, target):
            dist.all_to_all_single(target, source, group=self.group)
        return found

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        with lent(tensor) as (loan,):
            dist.broadcast(loan, group_src=source, group=self.group)
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A rank without its peers: tensors have the right shapes and memory, and numbers that mean nothing."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        own = tensor.contiguous()
        return [own.clone() for _ in range(self.size)]

    def all_to_all(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return tensor
