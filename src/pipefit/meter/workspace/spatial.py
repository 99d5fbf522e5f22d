"""Pooling, interpolation and padding: layout conversions around kernels that want one layout.

ATen/native/cpu/MaxPoolKernel.cpp, AvgPoolKernel.cpp, AdaptiveAvgPoolKernel.cpp and UpSampleKernel.cpp. The backward
kernels follow the layout of the gradient and convert what disagrees; the nearest and bilinear forward run
channels-last and convert a contiguous input and output of several channels; bicubic and one-dimensional ones hold an
index and a weight per neighbour and output position of every axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipefit.meter.workspace.ledger import (
    Call,
    accumulator_nbytes,
    contiguous_copy_nbytes,
    nbytes,
    prefers_channels_last,
)

aten = torch.ops.aten


def pool(call: Call) -> int | None:
    """A copy of an input that is neither contiguous nor channels-last."""
    x = call.tensor(0, "self")
    copy = contiguous_copy_nbytes(x, channels_last=prefers_channels_last(x))
    return call.out_nbytes() + copy if copy else None


def pool_backward(call: Call) -> int | None:
    """The gradient made contiguous, and the result and the indices if their layout is not the gradient's."""
    grad, out = call.tensor(0, "grad_output"), call.tensors_out()[0]
    last = prefers_channels_last(grad)
    copies = contiguous_copy_nbytes(grad, channels_last=last) + contiguous_copy_nbytes(out, channels_last=last)
    indices = call.args[7] if len(call.args) > 7 and isinstance(call.args[7], torch.Tensor) else None
    copies += contiguous_copy_nbytes(indices, channels_last=last)
    return nbytes(out) + copies if copies else None


def interpolate(call: Call) -> int | None:
    """A contiguous input of several channels: it and the output also in channels-last order."""
    x, out = call.tensor(0, "self"), call.tensors_out()[0]
    if prefers_channels_last(x):
        copy = contiguous_copy_nbytes(x, channels_last=True)
        return nbytes(out) + copy if copy else None
    if x.shape[1] > 1:
        return nbytes(x) + 2 * nbytes(out)
    copy = contiguous_copy_nbytes(x)
    return nbytes(out) + copy if copy else None


def neighbours(count: int) -> Callable[[Call], int | None]:
    """The formula of an interpolation that tabulates `count` neighbours of every output position along each axis."""

    def kernel(call: Call) -> int | None:
        x, out = call.tensor(0, "self"), call.tensors_out()[0]
        copy = contiguous_copy_nbytes(x, channels_last=prefers_channels_last(x))
        return nbytes(out) + copy + count * sum(out.shape[2:]) * (8 + accumulator_nbytes(x.dtype))

    return kernel


def contiguous_gradient(call: Call) -> int | None:
    """The gradient made contiguous."""
    copy = contiguous_copy_nbytes(call.tensor(0, "grad_output"))
    return call.out_nbytes() + copy if copy else None


def interpolate_backward(call: Call) -> int | None:
    """The gradient made contiguous in its own order."""
    grad = call.tensor(0, "grad_output")
    copy = contiguous_copy_nbytes(grad, channels_last=prefers_channels_last(grad))
    return call.out_nbytes() + copy if copy else None


def pad(call: Call) -> int | None:
    """A contiguous copy of an input that is not."""
    x = call.tensor(0, "self")
    copy = contiguous_copy_nbytes(x, channels_last=prefers_channels_last(x))
    return call.out_nbytes() + copy if copy else None


KERNELS: Mapping[Any, Callable[[Call], int | None]] = {
    aten.max_pool2d_with_indices.default: pool,
    aten.avg_pool2d.default: pool,
    aten._adaptive_avg_pool2d.default: pool,
    aten.max_pool2d_with_indices_backward.default: pool_backward,
    aten.avg_pool2d_backward.default: pool_backward,
    aten._adaptive_avg_pool2d_backward.default: pool_backward,
    aten.upsample_nearest2d.default: interpolate,
    aten.upsample_bilinear2d.default: interpolate,
    aten._upsample_nearest_exact2d.default: interpolate,
    aten.upsample_nearest2d_backward.default: interpolate_backward,
    aten.upsample_bilinear2d_backward.default: interpolate_backward,
    aten._upsample_nearest_exact2d_backward.default: interpolate_backward,
    aten.upsample_bicubic2d.default: neighbours(4),
    aten.upsample_bicubic2d_backward.default: contiguous_gradient,
    aten.upsample_linear1d.default: neighbours(2),
    aten.upsample_nearest1d.default: neighbours(1),
    aten.reflection_pad1d.default: pad,
    aten.reflection_pad2d.default: pad,
    aten.replication_pad2d.default: pad,
}
