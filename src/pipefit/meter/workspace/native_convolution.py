"""Convolutions that ATen runs itself, by unfolding the input into a matrix.

ATen/native/ConvolutionMM2d.cpp unfolds the whole batch before a forward or a weight gradient (not for a plain 1x1
kernel, whose input is that matrix already); its input gradient needs nothing. ATen/native/NaiveDilatedConvolution.cpp
unfolds one image at a time for all three. Exact for problems without groups; a grouped one runs group by group and
concatenates, which is exact only where the operands of one group need no copy: single images under a plain 1x1 kernel.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from pipefit.meter.workspace.ledger import Call, nbytes, peak


def _columns(x: torch.Tensor, weight: torch.Tensor, out_size: Any, images: int) -> int:
    """Bytes of the unfolded input of so many images."""
    taps, pixels = math.prod(weight.shape[2:]), math.prod(int(size) for size in out_size)
    return images * x.shape[1] * taps * pixels * x.element_size()


def _plain(weight: torch.Tensor, stride: Any, padding: Any) -> bool:
    """Whether the input is its own unfolding."""
    return max(weight.shape[2:]) == 1 and max(stride) == 1 and max(padding) == 0


def forward(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, parameters: tuple[Any, Any, Any, int], copies: int
) -> int | None:
    """Bytes of the forward: copies into the problem's order, unfolded input and output."""
    stride, padding, dilation, groups = parameters
    if groups > 1:
        return 2 * nbytes(out)
    if max(dilation) > 1:
        return copies + nbytes(out) + _columns(x, weight, out.shape[2:], 1)
    columns = 0 if _plain(weight, stride, padding) else _columns(x, weight, out.shape[2:], x.shape[0])
    return copies + nbytes(out) + columns


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    parameters: tuple[Any, Any, Any, int],
    mask: Any,
    copies: int,
) -> int | None:
    """Bytes of the backward: the gradients and, while those of the weights are made, the unfolded input."""
    stride, padding, dilation, groups = parameters
    wants_parameters = mask[1] or mask[2]
    bias = weight.shape[0] * x.element_size() if mask[2] else 0
    out = (nbytes(x) if mask[0] else 0) + (nbytes(weight) if mask[1] else 0) + bias
    if groups > 1:
        return 2 * out
    if max(dilation) > 1:
        return copies + out + _columns(x, weight, grad.shape[2:], 1) + bias
    if not wants_parameters or _plain(weight, stride, padding):
        return copies + out
    columns = _columns(x, weight, grad.shape[2:], x.shape[0])
    return peak(copies + (nbytes(x) if mask[0] else 0), out - (nbytes(x) if mask[0] else 0) + columns)


def transposed_forward(call: Call) -> int | None:
    """Bytes of a transposed forward: the output and one image's columns (NaiveConvolutionTranspose2d.cpp)."""
    x, weight = call.tensor(0, "input"), call.tensor(1, "weight")
    if x.dim() != 4 or call.args[8] > 1:
        return None
    return call.out_nbytes() + math.prod(weight.shape[1:]) * math.prod(x.shape[2:]) * x.element_size()
