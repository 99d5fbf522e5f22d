"""The seams between forms: six autograd functions, each the other direction of another's.

    copy     R -> C        forward nothing,                  backward sums the gradients
    reduce   parts -> R    forward sums partial results,     backward nothing
    gather   Split -> R    forward puts parts together,      backward takes this rank's part
    slice    R -> Split    forward takes this rank's part,   backward puts parts together
    spread   Split -> C    forward puts parts together,      backward sums gradients, and takes this rank's part
    scatter  parts -> Split  forward sums partial results, and takes this rank's part,   backward puts parts together

They keep no tensor. Each is what a rewritten layer calls, under the name of the function below it. (Shoeybi et al.,
"Megatron-LM", 2019, section 3, has the first two as f and g; Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models", 2022, section 4.2.2, the last two.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipefit.sharding.collectives import Collectives
from pipefit.sharding.forms import Split, dealt, join, take


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
