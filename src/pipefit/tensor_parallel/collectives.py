"""Collectives of a tensor-parallel group: four basic ones, from which all others are built.

All-reduce, all-gather, all-to-all and broadcast behave equally with gloo and NCCL; reduce-scatter and
averages do not, so a reduce-scatter is an all-to-all whose parts each rank adds up. Every rank runs the
collectives in one order, which the rewritten layers fix. `Alone` stands for a rank without peers, with which
one process without a network can determine the memory of a rank.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch import distributed as dist

from pipefit.tensor_parallel.forms import DimSplit, dealt, join, take
from pipefit.torch_internals.fake_tensors import FakeTensor

# ---- Tensors lent to a collective: their memory is returned exactly when the collective completes
#
# gloo's threads drop their references shortly after they report a collective as complete: microseconds, or a
# scheduler slice if many threads share a core. If they held the tensors, unneeded memory would remain for
# that time, and the peak of a rank would be random.

_PATIENCE = 10_000  # looks for the references of a thread, which drops them after a few


class Loan:
    """Tensors that a collective gets in place of its `owners`.

    `tensors` share the owners' memory and keep it alive until the loan ends. Fake tensors, and those on a
    GPU, which NCCL releases when it is joined, are lent themselves.
    """

    def __init__(self, owners: Sequence[Tensor]) -> None:
        self._held = list[Any]()
        self.tensors = [self._lent(owner) for owner in owners]

    def _lent(self, owner: Tensor) -> Tensor:
        if owner.device.type != "cpu" or not owner.numel() or isinstance(owner, FakeTensor):
            return owner
        memory: Any = (ctypes.c_char * owner.nbytes).from_address(owner.data_ptr())
        memory.owner = owner
        self._held.append(memory)
        return torch.frombuffer(memory, dtype=owner.dtype).as_strided(owner.shape, owner.stride())

    def wait(self, *_: Any) -> None:
        """End the loan at once: the collective is complete, so no thread uses the memory any more."""
        for memory in self._held:
            memory.owner = None

    def settle(self) -> None:
        """End the loan, and wait until no thread holds its tensors.

        A thread drops them under the interpreter's lock. A backward that runs meanwhile would free memory
        later.
        """
        self.wait()
        left = [ref(memory) for memory in self._held]
        self._held.clear()
        self.tensors.clear()
        for _ in range(_PATIENCE):
            if not any(memory() is not None for memory in left):
                break
            time.sleep(0)


@contextmanager
def lent(*owners: Tensor) -> Iterator[list[Tensor]]:
    """Lend these tensors to a collective that completes in the body.

    If the collective fails, the memory is kept as long as its threads may use it.
    """
    loan = Loan(owners)
    yield loan.tensors
    loan.wait()


# ---- The interface, and its implementations


class Collectives(Protocol):
    """A rank's interface to its tensor-parallel group."""

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over all ranks, in place, and return it."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks in order; all have one shape."""

    def all_to_all(self, tensor: Tensor) -> Tensor:
        """Return what all ranks hold for this one, in rank order, in the shape of `tensor`.

        `tensor` is contiguous, and its first dimension has an entry for each rank.
        """

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Overwrite `tensor` with that of rank `source`, and return it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroupCollectives:
    """Collectives of `torch.distributed`, over gloo or NCCL; of all processes, or of the given process
    group.

    Each runs in a context of `around`, which may give its errors other names.
    """

    group: Any = None
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def __deepcopy__(self, memo: Any) -> ProcessGroupCollectives:
        return self  # a copy of a layer belongs to the same processes

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with self.around(), lent(tensor) as (loan,):
            dist.all_reduce(loan, group=self.group)
        return tensor

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        own = tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        with self.around(), lent(own, *parts) as (loan, *result):
            dist.all_gather(result, loan, group=self.group)
        return parts

    def all_to_all(self, tensor: Tensor) -> Tensor:
        result = torch.empty_like(tensor)
        with self.around(), lent(tensor, result) as (source, target):
            dist.all_to_all_single(target, source, group=self.group)
        return result

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        with self.around(), lent(tensor) as (loan,):
            dist.broadcast(loan, group_src=source, group=self.group)
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """A rank without its peers: tensors have the right shapes and memory, but meaningless values."""

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


# ---- Conversions between forms: six differentiable functions, each the transpose of another
#
#     copy     R -> C        forward nothing,                  backward sums the gradients
#     reduce   parts -> R    forward sums partial results,     backward nothing
#     gather   Split -> R    forward joins the parts,          backward takes this rank's part
#     slice    R -> Split    forward takes this rank's part,   backward joins the parts
#     spread   Split -> C    forward joins the parts,          backward sums gradients, and takes this rank's
# part
#     scatter  parts -> Split  forward sums partial results, and takes this rank's part,   backward joins the
# parts
#
# They save no tensors. A rewritten layer calls each by the name of the function below. (Shoeybi et al.,
# "Megatron-LM", 2019, section 3, has the first two as f and g; Korthikanti et al., "Reducing Activation
# Recomputation in Large Transformer Models", 2022, section 4.2.2, the last two.)


def copied(whole: Tensor, group: Collectives) -> Tensor:
    """Return `whole`, whose gradients are summed over the ranks."""
    return _converted(whole, _view, lambda gradient: _summed(gradient, group))


def reduced(partial: Tensor, group: Collectives) -> Tensor:
    """Return the sum of all ranks' partial results, in the memory of `partial`, which must not be shared."""
    tensor: Tensor = _Reduce.apply(partial, group)  # type: ignore[no-untyped-call]
    return tensor


def gathered(part: Tensor, form: DimSplit, size: int, group: Collectives) -> Tensor:
    """Return the whole of the ranks' parts; its divided dimension has `size`."""
    return _converted(
        part,
        lambda own: join(group.all_gather(own), form, size),
        lambda gradient: take(gradient, form, group.rank, group.size),
    )


def sliced(whole: Tensor, form: DimSplit, group: Collectives) -> Tensor:
    """Return this rank's part of `whole`."""
    size = whole.shape[form.dim]
    return _converted(
        whole,
        lambda value: take(value, form, group.rank, group.size),
        lambda gradient: join(group.all_gather(gradient), form, size),
    )


def spread(part: Tensor, form: DimSplit, size: int, group: Collectives) -> Tensor:
    """Return the whole of the ranks' parts, like `gathered`, but sum its gradients over the ranks."""
    return _converted(
        part,
        lambda own: join(group.all_gather(own), form, size),
        lambda gradient: _part_of_sum(gradient, form, group),
    )


def scattered(partial: Tensor, form: DimSplit, group: Collectives) -> Tensor:
    """Return this rank's part of the sum of all ranks' partial results."""
    size = partial.shape[form.dim]
    return _converted(
        partial,
        lambda own: _part_of_sum(own, form, group),
        lambda gradient: join(group.all_gather(gradient), form, size),
    )


def _view(whole: Tensor) -> Tensor:
    return whole.view_as(whole)


def _summed(gradient: Tensor, group: Collectives) -> Tensor:
    """Return the sum over the ranks of a clone, because other code may hold autograd's gradient."""
    return group.all_reduce(gradient.clone(memory_format=torch.contiguous_format))


def _part_of_sum(partial: Tensor, form: DimSplit, group: Collectives) -> Tensor:
    """Return this rank's part of a sum: ranks exchange parts, and add them up in one order."""
    return group.all_to_all(dealt(partial, form, group.size)).sum(0)


Conversion = Callable[[Tensor], Tensor]


def _converted(tensor: Tensor, forward: Conversion, backward: Conversion) -> Tensor:
    """Return `forward(tensor)`, whose backward is `backward`."""
    made: Tensor = _Convert.apply(tensor, forward, backward)  # type: ignore[no-untyped-call]
    return made


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Conversion, back: Conversion) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.back(gradient), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Collectives) -> Tensor:
        ctx.mark_dirty(partial)
        return group.all_reduce(partial)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None
