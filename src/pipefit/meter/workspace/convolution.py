"""Convolutions: `aten.convolution` and `aten.convolution_backward`, from the choice of backend to the buffers.

ATen/native/Convolution.cpp sends most float convolutions to oneDNN (ATen/native/mkldnn/Conv.cpp) and the rest, which
are small single images and doubles, to kernels that unfold the input into a matrix (ATen/native/ConvolutionMM2d.cpp,
NaiveDilatedConvolution.cpp, NaiveConvolutionTranspose2d.cpp). Around a oneDNN primitive ATen allocates, for a
contiguous problem, the primitive's result in oneDNN's own layout and then a contiguous copy of it; for a
channels-last problem the result is written in place, except that a weight gradient is copied twice.

A transposed convolution is the input gradient of the convolution it transposes, and its gradients are that
convolution's forward and weight gradient (ATen/native/mkldnn/Conv.cpp, `mkldnn_convolution_transpose`).

One- and two-dimensional convolutions are exact where `onednn_kernels` is. Bfloat16 and half return the layouts'
buffers without the primitive's scratch, which is an estimate; three-dimensional ones return none, and a processor
without AVX2 is taken to unfold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipefit.meter.workspace import native_convolution as native
from pipefit.meter.workspace.ledger import Call, nbytes, peak, suggests_channels_last
from pipefit.meter.workspace.onednn_gradients import weight_gradient
from pipefit.meter.workspace.onednn_kernels import Buffers, forward, input_gradient, takes_strided_gradient
from pipefit.meter.workspace.onednn_problem import Problem
from pipefit.meter.workspace.onednn_scratch import booked

aten = torch.ops.aten

FEWEST_PIXELS = 20480  # elements of a single image above which oneDNN takes any kernel size


def _pair(values: Any, first: int) -> tuple[int, int]:
    """Two spatial values, of a one-dimensional problem after `first` for the row that is added."""
    return (first, values[0]) if len(values) == 1 else (values[0], values[-1])


def _as_image(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides with a row of one added to a one-dimensional problem."""
    sizes, strides = list(tensor.shape), list(tensor.stride())
    if tensor.dim() == 3:
        sizes.insert(2, 1)
        strides.insert(2, strides[2] * sizes[3])
    return sizes, strides


def _channels_last(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ATen runs the convolution channels-last: if either operand looks it, in a two-dimensional problem."""
    if x.dtype == torch.float64:
        return False
    return suggests_channels_last(*_as_image(x)) or suggests_channels_last(*_as_image(weight))


def takes_onednn(
    x: torch.Tensor, weight: torch.Tensor, *, stride: Any, dilation: Any, groups: int, threads: int, available: bool
) -> bool:
    """ATen's choice (`ConvParams::use_mkldnn`): in float, anything but a small single image."""
    if not available or not torch.backends.mkldnn.enabled or x.numel() == 0 or x.dtype == torch.float64:
        return False
    if x.dtype != torch.float32:
        return True
    sizes = _as_image(weight)[0]
    rows, columns = sizes[-2:]
    unit = max(stride) == 1 and max(dilation) == 1 and rows == columns == 1 and x.shape[0] < 16 and threads == 1
    large = groups > 1 or (rows > 3 and columns > 3) or x.shape[0] > 1 or x.numel() > FEWEST_PIXELS
    return large and not unit


def _order_copy(tensor: torch.Tensor, channels_last: bool) -> int:
    """Bytes of the copy that brings an operand into the problem's order."""
    if tensor.dim() == 3 or not channels_last:
        if channels_last and tensor.dim() == 3:
            sizes, strides = _as_image(tensor)
            return 0 if suggests_channels_last(sizes, strides) else nbytes(tensor)
        return 0 if tensor.is_contiguous() else nbytes(tensor)
    return 0 if tensor.is_contiguous(memory_format=torch.channels_last) else nbytes(tensor)


def _problem(
    x: torch.Tensor, weight: torch.Tensor, out_size: Any, call: Call, parameters: tuple[Any, Any, Any, int], bias: bool
) -> Problem:
    stride, padding, dilation, groups = parameters
    in_sizes, kernel = _as_image(x)[0], _as_image(weight)[0]
    return Problem(
        images=x.shape[0],
        in_channels=x.shape[1],
        out_channels=weight.shape[0],
        groups=groups,
        in_size=(in_sizes[2], in_sizes[3]),
        out_size=_pair(out_size, 1),
        kernel=(kernel[2], kernel[3]),
        stride=_pair(stride, 1),
        padding=_pair(padding, 0),
        dilation=_pair(dilation, 1),
        bias=bias,
        channels_last=_channels_last(x, weight),
        threads=call.threads,
        lanes=call.cpu.float_lanes,
    )


def _parameters(call: Call, first: int) -> tuple[Any, Any, Any, int]:
    stride, padding, dilation = call.args[first : first + 3]
    spatial = call.args[1].dim() - 2
    stride, padding, dilation = (
        list(values) * spatial if len(values) == 1 else list(values) for values in (stride, padding, dilation)
    )
    return stride, padding, dilation, int(call.args[first + 5])


def _narrowed(buffers: Buffers, itemsize: int) -> Buffers:
    """The buffers of a type of two bytes: half as large, without the scratch."""
    return Buffers(
        source=buffers.source * itemsize // 4,
        weights=buffers.weights * itemsize // 4,
        destination=buffers.destination * itemsize // 4,
    )


def convolution(call: Call) -> int | None:
    """The forward convolution."""
    x, weight, bias = call.args[0], call.args[1], call.args[2]
    parameters, transposed = _parameters(call, 3), call.args[6]
    stride, _, dilation, groups = parameters
    available = call.cpu.onednn and call.cpu.float_lanes > 1
    onednn = takes_onednn(
        x, weight, stride=stride, dilation=dilation, groups=groups, threads=call.threads, available=available
    )
    if x.dim() not in (3, 4):
        return None
    if transposed:
        return _transposed(call, parameters) if onednn else native.transposed_forward(call)
    out = call.tensors_out()[0]
    last = _channels_last(x, weight)
    copies = _order_copy(x, last) + _order_copy(weight, last)
    if not onednn:
        return native.forward(x, weight, out, parameters, copies)
    p = _problem(x, weight, out.shape[2:], call, parameters, bias is not None)
    buffers = forward(p) if x.dtype == torch.float32 else _narrowed(forward(p), x.element_size())
    if p.channels_last:
        return copies + nbytes(out) + buffers.weights + buffers.scratch
    working = buffers.scratch + buffers.source + buffers.weights
    return copies + peak(working, buffers.destination, -working, nbytes(out))


def convolution_backward(call: Call) -> int | None:
    """The gradients of a convolution: of the input first, then of weights and bias."""
    grad, x, weight = call.args[:3]
    parameters, transposed, mask = _parameters(call, 4), call.args[7], call.args[10]
    stride, _, dilation, groups = parameters
    available = call.cpu.onednn and call.cpu.float_lanes > 1
    onednn = takes_onednn(
        x, weight, stride=stride, dilation=dilation, groups=groups, threads=call.threads, available=available
    )
    if x.dim() not in (3, 4) or (transposed and not onednn):
        return None
    if transposed:
        return _transposed_backward(call, parameters)
    last = _channels_last(x, weight)
    copies = sum(_order_copy(t, last) for t in (grad, x, weight))
    if not onednn:
        return native.backward(grad, x, weight, parameters, mask, copies)
    p = _problem(x, weight, grad.shape[2:], call, parameters, bool(mask[2]))
    narrow = x.dtype != torch.float32
    events = [copies]
    if mask[0]:
        b = _narrowed(input_gradient(p), x.element_size()) if narrow else input_gradient(p)
        events += _input_events(p, b, nbytes(x))
    if mask[1] or mask[2]:
        b = _narrowed(weight_gradient(p), x.element_size()) if narrow else weight_gradient(p)
        bias = weight.shape[0] * x.element_size() if mask[2] else 0
        events += _weight_events(p, b, nbytes(weight), bias)
    return peak(*events)


def _transposed_problem(
    x: torch.Tensor, out: torch.Tensor, call: Call, parameters: Any, weight: torch.Tensor
) -> Problem:
    """The convolution that a transposed one reverses: from its output to its input."""
    p = _problem(out, weight, x.shape[2:], call, parameters, False)
    return dataclasses.replace(p, channels_last=_channels_last(x, weight))


def _nested(buffers: Buffers, itemsize: int) -> Buffers:
    """The buffers of a convolution inside a deconvolution, which books its scratch as one aligned block."""
    if itemsize < 4:
        return _narrowed(buffers, itemsize)
    return dataclasses.replace(buffers, scratch=booked(buffers.scratch))


def _transposed(call: Call, parameters: Any) -> int | None:
    x, weight, out = call.args[0], call.args[1], call.tensors_out()[0]
    p = _transposed_problem(x, out, call, parameters, weight)
    b = input_gradient(p)
    if call.args[2] is not None and not p.channels_last and not takes_strided_gradient(p):
        b = dataclasses.replace(b, scratch=b.scratch + b.source)  # the result before the bias is added
    b = _nested(b, x.element_size())
    copies = _order_copy(x, p.channels_last) + _order_copy(weight, p.channels_last)
    return peak(copies, *_input_events(p, b, nbytes(out)))


def _transposed_backward(call: Call, parameters: Any) -> int | None:
    grad, x, weight, mask = call.args[0], call.args[1], call.args[2], call.args[10]
    p = _transposed_problem(x, grad, call, parameters, weight)
    size = x.element_size()
    events = [sum(_order_copy(t, p.channels_last) for t in (grad, x, weight))]
    if mask[0]:
        b = _nested(forward(p), size)
        working = b.scratch + b.weights
        if p.channels_last:
            events += [nbytes(x), working, -working]
        else:
            events += [working + b.source, b.destination, -working - b.source, nbytes(x), -b.destination]
    if mask[1] or mask[2]:
        b = _nested(weight_gradient(p), size)
        bias = weight.shape[1] * p.groups * size if mask[2] else 0
        events += _weight_events(p, b, nbytes(weight), bias)
    return peak(*events)


def _input_events(p: Problem, b: Buffers, out: int) -> list[int]:
    if p.channels_last:
        return [out, b.weights, b.scratch, -b.scratch - b.weights]
    working = b.destination + b.weights + b.scratch
    copies = out if b.result_plain else 2 * out
    return [working, b.source, -working, copies, out - copies - b.source]


def _weight_events(p: Problem, b: Buffers, out: int, bias: int) -> list[int]:
    working = b.destination + b.source + b.scratch
    copies = 2 * out if p.channels_last else out
    return [working, b.weights, bias, -working, bias, copies]


KERNELS: Mapping[Any, Callable[[Call], int | None]] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
