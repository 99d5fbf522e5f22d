"""Which oneDNN kernel runs a float convolution or its input gradient, and which copies and scratch it needs.

oneDNN tries its kernels in the order of src/cpu/cpu_convolution_list.cpp and takes the first whose `init_conf`
accepts the problem. PyTorch leaves the layouts to it for a contiguous problem: then the kernels block channels by
the vector width (and pad them to it), and both operands are reordered into fresh buffers unless they already are in
that layout. A channels-last problem keeps its activations as they are and reorders only the weights.

With AVX-512, exact for dense, depthwise and grouped convolutions whose kernel never falls wholly into padding, but
for two heuristics that are only approximated, both of brgemm kernels: the weight block for channels that 48 divides
better than 32 (off by up to a quarter of the weights' copy), and the output buffer of a strided input gradient whose
width the stride does not divide (the whole width is assumed: off by some pages per thread for wide images). The
general matrix kernel, taken when the others refuse, is assumed to unfold a whole image per thread; oneDNN may do so
in parts. With AVX2 the blocks are eight wide and the depthwise, 1x1 and direct kernels mirror their AVX-512
counterparts; the brgemm kernels, which run channels-last and strided input gradients, block by 8 to 32 there, so the
weights' copy may be too large by three blocks of eight channels.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.meter.workspace.ledger import ceil_div, round_up
from pipefit.meter.workspace.onednn_problem import FLOAT, Problem
from pipefit.meter.workspace.onednn_scratch import (
    ALIGNMENT,
    PAGE,
    booked,
    brgemm_batch,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffers:
    """Bytes that one oneDNN primitive allocates: reordered operands (0: used in place), its result and its scratch."""

    source: int = 0
    weights: int = 0
    destination: int = 0
    scratch: int = 0
    result_plain: bool = True  # whether the result only needs one more copy to become a contiguous tensor


def direct_block(p: Problem) -> int | None:
    """The channel block of the direct kernels: the vector width, or for narrow groups a half or quarter of it."""
    if p.groups == 1:
        return p.lanes
    for block in (p.lanes, 8, 4):
        if block <= p.lanes and p.in_group % block == 0 and p.out_group % block == 0:
            return block
    return None


def brgemm_block(channels: int, *, prefers_48: bool) -> int:
    """Channels to which the brgemm kernels pad one side of the weights."""
    if channels <= 16:
        return 16
    return 48 if prefers_48 and round_up(channels, 48) < round_up(channels, 32) else 32


def padded_bias(p: Problem) -> int:
    """The bias copied into whole blocks, where the channels are not a multiple."""
    return booked(round_up(p.out_channels, p.lanes) * FLOAT) if p.bias and p.out_channels % p.lanes else 0


def unit_stride_copy(p: Problem, blocks: int, threads: int) -> int:
    """A strided 1x1 convolution first gathers its source, per thread, at unit stride."""
    if not p.strided:
        return 0
    channels = p.in_channels if p.channels_last else blocks * p.lanes
    return booked(threads * p.pixels * channels * FLOAT)


def depthwise_direct(p: Problem) -> bool:
    """Whether the depthwise forward kernel takes the problem: its paddings must fit its unroll of six columns."""
    unroll = min(6 if p.lanes == 16 else 4, p.out_size[1])
    whole = p.out_size[1] - p.out_size[1] % unroll
    end = max(0, p.end_padding_for((p.out_size[0], whole))[1])
    return p.depthwise and not p.kernel_outside and p.padding[1] <= unroll and end <= unroll


def forward(p: Problem) -> Buffers:
    """The buffers of the forward convolution."""
    return _forward_channels_last(p) if p.channels_last else _forward_blocked(p)


def _forward_blocked(p: Problem) -> Buffers:
    lanes = p.lanes
    if depthwise_direct(p):
        return Buffers(
            source=p.depthwise_source(lanes),
            weights=p.depthwise_weights(lanes),
            destination=p.depthwise_destination(lanes),
            scratch=padded_bias(p),
        )
    if p.pointwise:
        return Buffers(
            source=p.source(lanes),
            weights=p.weights(lanes, lanes),
            destination=p.destination(lanes),
            scratch=padded_bias(p) + unit_stride_copy(p, ceil_div(p.in_channels, lanes), p.threads),
        )
    block = direct_block(p)
    if block is not None and not p.kernel_outside:
        few = p.groups == 1 and p.in_channels < lanes  # the first layer of a network reads its few channels as they are
        return Buffers(
            source=0 if few else p.source(block),
            weights=p.weights(1 if few else block, block),
            destination=p.destination(block),
            scratch=padded_bias(p) if p.groups == 1 else 0,
        )
    if p.groups > 1 and p.in_group <= 3 and p.out_group % 8 == 0 and not p.kernel_outside and (p.strided or p.taps > 1):
        return Buffers(weights=p.weights(1, 8), destination=p.destination(8))
    return Buffers(destination=p.destination(1), scratch=_unfolded_scratch(p))


def _forward_channels_last(p: Problem) -> Buffers:
    if p.depthwise:
        return Buffers(weights=p.depthwise_weights(p.lanes))
    if p.groups > 1:
        return Buffers(weights=_grouped_channels_last_weights(p))
    block = brgemm_block(p.out_channels, prefers_48=p.pixels > 16)
    return Buffers(weights=p.weights(1, block), scratch=brgemm_batch(p.threads, 1))


def _grouped_channels_last_weights(p: Problem) -> int:
    narrow = direct_block(p) if p.in_group < p.lanes and p.out_group < p.lanes else p.lanes
    return p.weights(narrow or p.lanes, narrow or p.lanes)


def takes_strided_gradient(p: Problem) -> bool:
    """Whether the brgemm kernel for strides computes the input gradient."""
    return p.strided and not p.dilated and p.groups == 1


def input_gradient(p: Problem) -> Buffers:
    """The buffers of the gradient with respect to the input."""
    lanes = p.lanes
    if takes_strided_gradient(p):
        return _strided_input_gradient(p)
    if p.depthwise and not p.dilated:
        if p.channels_last:
            return Buffers(weights=p.depthwise_weights(lanes))
        return Buffers(
            source=p.depthwise_source(lanes),
            weights=p.depthwise_weights(lanes),
            destination=p.depthwise_destination(lanes),
        )
    if p.channels_last:
        return _input_gradient_channels_last(p)
    if p.pointwise and not p.strided:
        return Buffers(source=p.source(lanes), weights=p.weights(lanes, lanes), destination=p.destination(lanes))
    block = direct_block(p)
    if block is not None and not p.kernel_outside and not (p.strided and p.dilated):
        return Buffers(source=p.source(block), weights=p.weights(block, block), destination=p.destination(block))
    return Buffers(source=p.source(1), scratch=_unfolded_gradient_scratch(p))


def _input_gradient_channels_last(p: Problem) -> Buffers:
    if p.groups > 1:
        return Buffers(weights=_grouped_channels_last_weights(p))
    if p.strided or p.kernel_outside:
        return Buffers(weights=p.weights(1, 1), scratch=_unfolded_gradient_scratch(p))
    scratch = brgemm_batch(p.threads, 1) + ALIGNMENT
    block = brgemm_block(p.in_channels, prefers_48=p.in_size[0] * p.in_size[1] > 16)
    return Buffers(weights=p.weights(block, 1), scratch=scratch)


def _strided_input_gradient(p: Problem) -> Buffers:
    """Works on channels-last buffers, gathering per thread the padded gradient of one image."""
    rows, columns = (
        p.out_size[d]
        + max(0, p.extent[d] - 1 - p.padding[d]) // p.stride[d]
        + max(0, p.extent[d] - 1 - p.end_padding[d]) // p.stride[d]
        for d in (0, 1)
    )
    gathered = round_up(rows * columns * p.out_channels, PAGE)
    columns_in = round_up(p.in_size[1], p.stride[1])
    scattered = round_up(columns_in * p.stride[1] * p.in_channels, PAGE) if columns_in != p.in_size[1] else 0
    scratch = (
        brgemm_batch(p.threads, 1)
        + booked(p.threads * gathered * FLOAT, PAGE)
        + booked(p.threads * PAGE, PAGE)
        + booked(p.threads * scattered * FLOAT, PAGE)
    )
    block = brgemm_block(p.in_channels, prefers_48=p.taps == 1 and p.in_channels % 48 == 0)
    weights = p.weights(block, 1)
    if p.channels_last:
        return Buffers(weights=weights, scratch=scratch)
    same_order = p.out_channels == 1 or p.pixels == 1
    return Buffers(
        source=p.source(1),
        weights=weights,
        destination=0 if same_order else p.destination(1),
        scratch=scratch,
        result_plain=p.in_channels == 1 or p.in_size == (1, 1),
    )


def _unfolds(p: Problem) -> bool:
    return p.taps > 1 or p.strided or p.in_size != p.out_size


def unfolded(p: Problem) -> int:
    """Floats of one unfolded image of one group."""
    return p.in_group * p.taps * p.pixels if _unfolds(p) else 0


def _unfolded_scratch(p: Problem) -> int:
    return booked(p.threads * unfolded(p) * FLOAT)


def _unfolded_gradient_scratch(p: Problem) -> int:
    outer, vector = p.groups * p.images, p.lanes
    inner = ceil_div(p.in_size[0] * p.in_size[1], vector) * ceil_div(p.in_group, vector)
    efficient = outer / round_up(outer, p.threads) >= inner / round_up(inner, p.threads)
    small = p.in_size[0] * p.in_size[1] * p.in_group * p.out_group // p.threads < 64 * 1024
    across = (p.pixels // p.threads < 512 or p.taps < 64) and (p.images != 1 or p.groups > 2)
    return booked((p.threads if across and (efficient or small) else 1) * unfolded(p) * FLOAT)
