"""Batch, group and layer normalization: per-channel scales, per-thread partial sums, contiguous copies.

ATen/native/Normalization.cpp, ATen/native/group_norm.cpp, ATen/native/layer_norm.cpp and their kernels under
ATen/native/cpu. Exact for inputs that are contiguous or channels-last; a batch norm whose input is neither is
predicted only as far as its backward goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipefit.meter.workspace.ledger import (
    Call,
    accumulator_nbytes,
    contiguous_copy_nbytes,
    is_laid_out,
    nbytes,
    prefers_channels_last,
)

aten = torch.ops.aten


def _runs_channels_last(x: torch.Tensor) -> bool:
    """Whether the batch norm kernels take the channels-last route: also a contiguous input of one pixel."""
    return not x.is_contiguous() or x.numel() == x.shape[0] * x.shape[1]


def _either_layout(x: torch.Tensor) -> bool:
    return x.is_contiguous() or (x.dim() in (4, 5) and is_laid_out(x, channels_last=True))


def batch_norm(call: Call) -> int | None:
    """Scale and shift per channel, and before them mean and variance sums; channels-last, a row of sums per thread."""
    x, scale = call.tensor(0, "input"), call.arg(1, "weight")
    training = call.arg(5, "training")
    if not _either_layout(x):
        return None
    channels, accumulator = x.shape[1], accumulator_nbytes(x.dtype)
    alpha_beta = 2 * channels * accumulator
    if not training:
        return nbytes(x) + alpha_beta
    statistics = x.element_size() if scale is None else scale.element_size()
    sums = 2 * channels * statistics
    if _runs_channels_last(x):
        sums += call.threads * channels * accumulator
    return nbytes(x) + 2 * channels * statistics + max(sums, alpha_beta)


def batch_norm_backward(call: Call) -> int | None:
    """One more gradient of the input's size; channels-last, two rows of sums per thread, and scales in float."""
    grad, x = call.tensor(0, "grad_out"), call.tensor(1, "input")
    wants_input = call.arg(9, "output_mask")[0]
    training = call.arg(7, "train")
    channels, accumulator = x.shape[1], accumulator_nbytes(x.dtype)
    low = x.element_size() < 4
    out = call.out_nbytes()
    same = prefers_channels_last(x) == prefers_channels_last(grad)
    if not (_either_layout(x) and _either_layout(grad) and same):
        return out + channels * x.element_size() + (channels * 4 + x.numel() * 4 if low else 0)
    temporary = nbytes(x) if wants_input else 0
    if not _runs_channels_last(x):
        return out + temporary
    scales = 3 if low else (0 if training else 1)
    return out + max(temporary, (scales + 2 * call.threads) * channels * accumulator)


def group_norm(call: Call) -> int | None:
    """Channels-last: the sums of every image and channel, twice."""
    x, images, channels = call.tensor(0, "input"), int(call.arg(3, "N")), int(call.arg(4, "C"))
    if x.is_contiguous() or not _either_layout(x):
        return None
    return call.out_nbytes() + 2 * images * channels * accumulator_nbytes(x.dtype)


def group_norm_backward(call: Call) -> int | None:
    """The two inner products of every image and channel; the gradient is copied to the layout of the input."""
    grad, x = call.tensor(0, "grad_out"), call.tensor(1, "input")
    images, channels = int(call.args[5]), int(call.args[6])
    copy = contiguous_copy_nbytes(grad, channels_last=prefers_channels_last(x))
    return call.out_nbytes() + copy + 2 * images * channels * accumulator_nbytes(x.dtype)


def layer_norm(call: Call) -> int | None:
    """A contiguous copy of an input that is not."""
    copy = contiguous_copy_nbytes(call.tensor(0, "input"))
    return call.out_nbytes() + copy if copy else None


def layer_norm_backward(call: Call) -> int | None:
    """Per-thread sums of both parameter gradients, and contiguous copies of input and gradient that are not."""
    grad, x, mask = call.tensor(0, "grad_out"), call.tensor(1, "input"), call.args[7]
    width = math.prod(call.args[2])
    sums = 2 * call.threads * width * x.element_size() if mask[1] or mask[2] else 0
    return call.out_nbytes() + contiguous_copy_nbytes(x) + contiguous_copy_nbytes(grad) + sums


KERNELS: Mapping[Any, Callable[[Call], int | None]] = {
    aten.native_batch_norm.default: batch_norm,
    aten.native_batch_norm_backward.default: batch_norm_backward,
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
    aten.native_layer_norm.default: layer_norm,
    aten.native_layer_norm_backward.default: layer_norm_backward,
}
