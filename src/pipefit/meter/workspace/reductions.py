"""Reductions and losses: casts of the operand, per-thread partial results, and the divisor of a mean.

ATen/native/ReduceOps.cpp casts an operand whose type is not the result's; ATen/native/TensorIteratorReduce.cpp
gives every thread a slot when a large operand is reduced to one element; a mean is a sum divided in place by a
number, in float when the operand is bfloat16 or half (ATen/native/ReduceOps.cpp, `mean_kernel_impl`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipefit.meter.workspace.elementwise import cast_nbytes
from pipefit.meter.workspace.ledger import GRAIN_NUMEL, Call, nbytes, peak

aten = torch.ops.aten

MEAN = 1  # at::Reduction
LOW_PRECISION = (torch.bfloat16, torch.float16)


def partials_nbytes(numel: int, kept: int, itemsize: int, threads: int) -> int:
    """Bytes of the per-thread results of a reduction of `numel` elements to `kept` ones."""
    return threads * itemsize if kept == 1 and numel >= GRAIN_NUMEL and threads > 1 else 0


def reduction(*, sums_integers: bool) -> Callable[[Call], int | None]:
    """The formula of a reduction that accumulates in the type of its result."""

    def kernel(call: Call) -> int | None:
        x, out = call.tensor(0, "self"), call.tensors_out()[0]
        partials = partials_nbytes(x.numel(), out.numel(), out.element_size(), call.threads)
        cast = sums_integers and x.dtype != out.dtype
        if not cast and not partials:
            return None
        return nbytes(out) + partials + (x.numel() * out.element_size() if cast else 0)

    return kernel


def any_or_all(call: Call) -> int | None:
    """`any` and `all`: the operand cast to booleans, one byte each."""
    x, out = call.tensor(0, "self"), call.tensors_out()[0]
    cast = 0 if x.dtype in (torch.bool, torch.uint8) else x.numel()
    return nbytes(out) + cast + partials_nbytes(x.numel(), out.numel(), 1, call.threads)


def mean_temporaries(numel: int, kept: int, source: torch.dtype, result: torch.dtype, threads: int) -> int:
    """Bytes that a mean needs beyond its result: partial sums, then the divisor and its cast."""
    if result in LOW_PRECISION:
        cast = numel * 4 + partials_nbytes(numel, kept, 4, threads)
        return kept * 4 + max(cast, cast_nbytes(1, torch.float32))
    cast = numel * result.itemsize if source != result else 0
    return max(cast + partials_nbytes(numel, kept, result.itemsize, threads), cast_nbytes(1, result))


def mean(call: Call) -> int | None:
    """`mean`: the result, and what the sum and the division take in turn."""
    x, out = call.tensor(0, "self"), call.tensors_out()[0]
    return nbytes(out) + mean_temporaries(x.numel(), out.numel(), x.dtype, out.dtype, call.threads)


def variance(call: Call) -> int | None:
    """`var` and `std` of everything: the mean first, as a tensor (`std_var_all_cpu`); none along dimensions."""
    x, out = call.tensor(0, "self"), call.tensors_out()[0]
    dims = call.arg(1, "dim")
    if x.dtype in LOW_PRECISION or (dims is not None and len(dims) not in (0, x.dim())) or out.numel() != 1:
        return None
    if dims is not None and len(dims) == x.dim() and x.dim() > 0 and not x.is_contiguous():
        return None
    return nbytes(out) + nbytes(out) + mean_temporaries(x.numel(), 1, x.dtype, x.dtype, call.threads)


def logsumexp(call: Call) -> int | None:
    """`logsumexp`: the maxima, then the shifted exponentials and their sums (ATen/native/ReduceOps.cpp)."""
    x, out = call.tensor(0, "self"), call.tensors_out()[0]
    if not x.dtype.is_floating_point or x.numel() == 0:
        return None
    maxima = nbytes(out)
    # abs(maxima) == inf: a number, its cast, the mask; then exp(x - maxima) and its sum
    infinite = cast_nbytes(float("inf"), x.dtype) + out.numel()
    return peak(nbytes(out), maxima, infinite, -infinite, -maxima, nbytes(x), maxima)


def safe_softmax(call: Call) -> int | None:
    """`_safe_softmax`: the mask of -inf entries, its reduction, and the zero to fill in (ATen/native/SoftMax.cpp)."""
    x, out, dim = call.tensor(0, "self"), call.tensors_out()[0], call.arg(1, "dim")
    rows = x.numel() // x.shape[dim] if x.numel() else 0
    return nbytes(out) + x.numel() + rows + x.element_size()


def pointwise_loss(*, kept_full: bool) -> Callable[[Call], int | None]:
    """`mse_loss` and its like: the element-wise loss, then its mean or sum.

    The structured ones (`kept_full`) give their result a storage as large as the operand before they reduce into it.
    """

    def kernel(call: Call) -> int | None:
        x, kind, out = call.tensor(0, "self"), call.arg(2, "reduction", MEAN), call.tensors_out()[0]
        if kind == 0:
            return None
        held = 2 * nbytes(x) if kept_full else nbytes(x) + nbytes(out)
        if kind == MEAN:
            return held + mean_temporaries(x.numel(), 1, x.dtype, x.dtype, call.threads)
        return held + partials_nbytes(x.numel(), 1, x.element_size(), call.threads)

    return kernel


def with_logits(call: Call) -> int | None:
    """`binary_cross_entropy_with_logits` (ATen/native/Loss.cpp): two element-wise terms, then the mean.

    With weights, three terms: an estimate.
    """
    x, kind = call.tensor(0, "self"), call.arg(4, "reduction", MEAN)
    if call.arg(2, "weight") is not None or call.arg(3, "pos_weight") is not None:
        return 3 * nbytes(x)
    if kind == 0:
        return 2 * nbytes(x)
    reduced = x.element_size()
    if kind == MEAN:
        return 2 * nbytes(x) + reduced + mean_temporaries(x.numel(), 1, x.dtype, x.dtype, call.threads)
    return 2 * nbytes(x) + reduced + partials_nbytes(x.numel(), 1, x.element_size(), call.threads)


def cross_entropy_of_probabilities(call: Call) -> int | None:
    """`binary_cross_entropy`: its result keeps the element-wise storage, into which the mean is put back."""
    x, kind = call.tensor(0, "self"), call.arg(3, "reduction", MEAN)
    if kind == 0 or call.arg(2, "weight") is not None:
        return None
    if kind == MEAN:
        return nbytes(x) + x.element_size() + mean_temporaries(x.numel(), 1, x.dtype, x.dtype, call.threads)
    return nbytes(x) + x.element_size() + partials_nbytes(x.numel(), 1, x.element_size(), call.threads)


def cross_entropy_of_probabilities_backward(call: Call) -> int | None:
    """`binary_cross_entropy_backward`: with a mean, the gradient is divided in place by a number."""
    x = call.tensor(1, "self")
    return nbytes(x) + cast_nbytes(1, x.dtype) if call.arg(4, "reduction", MEAN) == MEAN else None


def cumulative(call: Call) -> int | None:
    """`cumsum` and `cumprod`: the operand cast to the type of the result."""
    x, out = call.tensor(0, "self"), call.tensors_out()[0]
    return None if x.dtype == out.dtype else nbytes(out) + nbytes(out)


def _build() -> dict[Any, Callable[[Call], int | None]]:
    total, none_cast = reduction(sums_integers=True), reduction(sums_integers=False)
    table: dict[Any, Callable[[Call], int | None]] = {
        aten.sum.default: total,
        aten.sum.dim_IntList: total,
        aten.prod.default: total,
        aten.prod.dim_int: total,
        aten.amax.default: none_cast,
        aten.amin.default: none_cast,
        aten.mean.default: mean,
        aten.mean.dim: mean,
        aten.logsumexp.default: logsumexp,
        aten._safe_softmax.default: safe_softmax,
        aten.mse_loss.default: pointwise_loss(kept_full=True),
        aten.smooth_l1_loss.default: pointwise_loss(kept_full=True),
        aten.huber_loss.default: pointwise_loss(kept_full=False),
        aten.soft_margin_loss.default: pointwise_loss(kept_full=False),
        aten.binary_cross_entropy_with_logits.default: with_logits,
        aten.binary_cross_entropy.default: cross_entropy_of_probabilities,
        aten.binary_cross_entropy_backward.default: cross_entropy_of_probabilities_backward,
        aten.cumsum.default: cumulative,
        aten.cumprod.default: cumulative,
    }
    for overload in (aten.var.correction, aten.std.correction):
        table[overload] = variance
    for overload in (aten.any.default, aten.all.default, aten.any.dim, aten.all.dim, aten.any.dims, aten.all.dims):
        table[overload] = any_or_all
    return table


KERNELS: Mapping[Any, Callable[[Call], int | None]] = _build()
