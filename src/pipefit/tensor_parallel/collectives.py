"""What the ranks of a tensor-parallel group do together: four collectives, of which all others are made.

Sums, gathers, exchanges and broadcasts are the same with gloo and NCCL; reduce-scatter and averages are not, so that a
sum of which every rank gets its part is an exchange, added up by each. Every rank does them in one order, which the
rewritten layers fix. `Alone` stands for a rank whose peers are not there, so that one process without a network can say
what a rank holds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from pipefit.tensor_parallel.forms import Split, dealt, join, take

# ----------------------------------------------------------------------------------------------------
# Tensors that a collective has on loan: their memory is given back when it is complete, and not a moment
# later.
#
# gloo's threads drop their references a little after they have said that a collective is complete:
# microseconds, or a turn of the scheduler where many threads share a core. If they had the tensors, memory
# that nobody needs any more would still be there for that moment, and how much a rank holds at once would be
# a matter of chance.


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


# ----------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------
# The seams between forms: six autograd functions, each the other direction of another's.
#
#     copy     R -> C        forward nothing,                  backward sums the gradients
#     reduce   parts -> R    forward sums partial results,     backward nothing
#     gather   Split -> R    forward puts parts together,      backward takes this rank's part
#     slice    R -> Split    forward takes this rank's part,   backward puts parts together
#     spread   Split -> C    forward puts parts together,      backward sums gradients, and takes this rank's part
#     scatter  parts -> Split  forward sums partial results, and takes this rank's part,   backward puts parts together
#
# They keep no tensor. Each is what a rewritten layer calls, under the name of the function below it. (Shoeybi
# et al., "Megatron-LM", 2019, section 3, has the first two as f and g; Korthikanti et al., "Reducing
# Activation Recomputation in Large Transformer Models", 2022, section 4.2.2, the last two.)


def copied(whole: Tensor, group: Collectives) -> Tensor:
    """`whole`, whose gradients on the ranks are summed."""
    made: Tensor = _Copy.apply(whole, group)  # type: ignore[no-untyped-call]
    return made


def reduced(partial: Tensor, group: Collectives) -> Tensor:
    """The sum of the partial results of all ranks, in the memory of this one's, which nobody else may have."""
    made: Tensor = _Reduce.apply(partial, group)  # type: ignore[no-untyped-call]
    return made


def gathered(part: Tensor, form: Split, size: int, group: Collectives) -> Tensor:
    """The whole of the ranks' parts; its divided dimension has `size`."""
    made: Tensor = _Gather.apply(part, form, size, group)  # type: ignore[no-untyped-call]
    return made


def sliced(whole: Tensor, form: Split, group: Collectives) -> Tensor:
    """This rank's part of `whole`."""
    made: Tensor = _Slice.apply(whole, form, group)  # type: ignore[no-untyped-call]
    return made


def spread(part: Tensor, form: Split, size: int, group: Collectives) -> Tensor:
    """As `gathered`, where the gradients of the whole on the ranks are summed."""
    made: Tensor = _Spread.apply(part, form, size, group)  # type: ignore[no-untyped-call]
    return made


def scattered(partial: Tensor, form: Split, group: Collectives) -> Tensor:
    """This rank's part of the sum of the partial results of all ranks."""
    made: Tensor = _Scatter.apply(partial, form, group)  # type: ignore[no-untyped-call]
    return made


def _part_of_sum(partial: Tensor, form: Split, group: Collectives) -> Tensor:
    """This rank's part of a sum: its size goes to each of the others, which the ranks add up in one order."""
    return group.all_to_all(dealt(partial, form, group.size)).sum(0)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Collectives) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # A clone: others may hold the gradient that autograd hands over
        return ctx.group.all_reduce(gradient.clone(memory_format=torch.contiguous_format)), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Collectives) -> Tensor:
        ctx.mark_dirty(partial)
        return group.all_reduce(partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, form: Split, size: int, group: Collectives) -> Tensor:
        ctx.form, ctx.group = form, group
        return join(group.all_gather(part), form, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return take(gradient, ctx.form, ctx.group.rank, ctx.group.size), None, None, None


class _Slice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, form: Split, group: Collectives) -> Tensor:
        ctx.form, ctx.size, ctx.group = form, whole.shape[form.dim], group
        return take(whole, form, group.rank, group.size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return join(ctx.group.all_gather(gradient), ctx.form, ctx.size), None, None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, form: Split, size: int, group: Collectives) -> Tensor:
        ctx.form, ctx.group = form, group
        return join(group.all_gather(part), form, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _part_of_sum(gradient, ctx.form, ctx.group), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, form: Split, group: Collectives) -> Tensor:
        ctx.form, ctx.size, ctx.group = form, partial.shape[form.dim], group
        return _part_of_sum(partial, form, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return join(ctx.group.all_gather(gradient), ctx.form, ctx.size), None, None
