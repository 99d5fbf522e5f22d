"""Weight gradients of oneDNN: the kernels that sum over the batch, and how many threads share each sum.

Tried in oneDNN's order (src/cpu/cpu_convolution_list.cpp): depthwise, 1x1, direct with the full vector, direct with
eight lanes, general matrix product. Exact with AVX-512; with AVX2 the scratch of the 1x1 kernel, whose reduction is
two-dimensional there, is an estimate.
"""

from __future__ import annotations

from pipefit.meter.workspace.ledger import ceil_div, round_up
from pipefit.meter.workspace.onednn_kernels import Buffers, padded_bias, unfolded, unit_stride_copy
from pipefit.meter.workspace.onednn_problem import FLOAT, Problem
from pipefit.meter.workspace.onednn_scratch import (
    BARRIER,
    Threading,
    Work,
    booked,
    job_reduction,
    weight_reduction,
)

FEWEST_REDUCED_ROWS = 9  # rows of output below which the direct weight gradient does not divide them


def weight_gradient(p: Problem) -> Buffers:
    """The buffers of the gradients with respect to weights and bias."""
    for kernel in (_depthwise_gradient, _pointwise_gradient, _direct_gradient, _narrow_direct_gradient):
        buffers = kernel(p)
        if buffers is not None:
            return buffers
    return _unfolded_weight_gradient(p)


def _depthwise_gradient(p: Problem) -> Buffers | None:
    end = tuple(max(0, e) for e in p.end_padding)
    fits = (
        p.depthwise
        and not p.dilated
        and p.stride[1] <= p.kernel[1] <= 3
        and all(p.padding[d] <= p.kernel[d] // 2 and end[d] <= p.kernel[d] // 2 for d in (0, 1))
        and p.in_size[0] >= p.kernel[0] + -p.padding[0] % p.stride[0]
        and all(pad <= 1 or pad % p.stride[0] == 0 for pad in (p.padding[0], end[0]))
        and all(
            p.out_size[d] == (p.in_size[d] + p.padding[d] + end[d] - p.kernel[d]) // p.stride[d] + 1 for d in (0, 1)
        )
    )
    if not fits:
        return None
    groups = round_up(p.groups, p.lanes)
    by_group = min(groups // p.lanes, p.threads)
    by_image = min(max(1, p.threads // by_group), p.images)
    helpers = by_image - 1
    if p.channels_last:
        helpers = _depthwise_threads(p, groups // p.lanes) - 1
    sums = p.groups if p.channels_last else groups
    scratch = booked(groups * p.taps * helpers * FLOAT) + (booked(sums * helpers * FLOAT) if p.bias else 0)
    weights = p.depthwise_weights(p.lanes)
    if p.channels_last:
        return Buffers(weights=weights, scratch=scratch)
    return Buffers(
        source=p.depthwise_source(p.lanes),
        weights=weights,
        destination=p.depthwise_destination(p.lanes),
        scratch=scratch,
    )


def _depthwise_threads(p: Problem, blocks: int) -> int:
    """Threads of a channels-last depthwise weight gradient: the most that channels, images and rows can share."""
    together = min(blocks, max(1, min(4, 31 // (2 * p.kernel[1]))))
    best = 1
    for across in range(1, min(ceil_div(blocks, together), p.threads) + 1):
        for images in range(1, min(p.images, p.threads // across) + 1):
            best = max(best, across * images * min(p.out_size[0], p.threads // across // images))
    return best


def _reduction_block(size: int) -> int:
    """Pixels that the 1x1 weight gradient reduces at once: the divisor of least waste from 7 to 16."""
    return best_divisor(size, 7, 16, largest=True)


def best_divisor(value: int, lowest: int, highest: int, *, largest: bool) -> int:
    """The chunk between the bounds that wastes least when `value` is rounded up to it."""
    highest = max(1, min(highest, value))
    lowest = max(1, min(lowest, highest))
    best, least = highest, float("inf")
    for chunk in range(highest, lowest - 1, -1):
        whole = round_up(value, chunk)
        waste = (whole - value) / whole
        if waste < least or (not largest and waste == least):
            best, least = chunk, waste
    return best


def _pointwise_gradient(p: Problem) -> Buffers | None:
    if not p.pointwise:
        return None
    lanes = p.lanes
    block = _reduction_block(p.pixels)
    if p.pixels % block:
        block = best_divisor(p.out_size[1], 4, p.out_size[1], largest=False)
    block = 1 if block > 256 else block
    ins, outs, reduced = ceil_div(p.in_channels, lanes), ceil_div(p.out_channels, lanes), ceil_div(p.pixels, block)
    threading = weight_reduction(
        Work(
            threads=p.threads,
            groups=1,
            reduced=p.images * reduced,
            reduced_source=p.images * reduced,
            most_batch=p.images * reduced,
            source_blocks=ins,
            destination_blocks=outs,
            source_weight=lanes * block,
            source_stride=1,
            destination_weight=lanes * block,
            kernel_weight=12 * lanes * lanes,
            whole_batch=p.images,
            refine=False,
        )
    )
    helpers = threading.batch - 1
    bias = 0
    if p.bias:
        bias = padded_bias(p) + job_reduction(
            threads=threading.total, job=lanes, jobs=outs, reduced=p.images, most=threading.total * 3 * 5 * 5 * lanes**2
        )
    gathered = unit_stride_copy(p, best_divisor(ins, 5, ins, largest=False), threading.total)
    scratch = bias + booked(p.weights(lanes, lanes) * helpers) + (BARRIER if helpers else 0) + gathered
    return _gradient_buffers(p, lanes, lanes, scratch)


def _gradient_buffers(p: Problem, block: int, in_block: int, scratch: int, *, source_plain: bool = False) -> Buffers:
    weights = p.weights(in_block, block)
    if p.channels_last:
        return Buffers(weights=weights, scratch=scratch)
    return Buffers(
        source=0 if source_plain else p.source(block),
        weights=weights,
        destination=p.destination(block),
        scratch=scratch,
    )


def _direct_gradient(p: Problem) -> Buffers | None:
    lanes = p.lanes
    end, extent = tuple(max(0, e) for e in p.end_padding), p.extent
    few = p.groups == 1 and p.in_channels < lanes
    fits = (
        lanes == 16
        and not (p.dilation[0] > 1 and (p.stride[0] > 1 or extent[0] > p.in_size[0]))
        and p.padding[0] <= extent[0] // 2
        and end[0] <= extent[0] // 2
        and p.padding[1] < extent[1]
        and end[1] < extent[1]
        and max(p.padding[1], end[1]) <= 28
        and p.kernel[1] <= 14
        and (p.channels_last or not few or p.in_channels <= 3)
        and (p.channels_last or p.groups == 1 or (p.in_group % lanes == 0 and p.out_group % lanes == 0))
    )
    if not fits:
        return None
    threading = _direct_threading(p, few)
    in_block = p.in_group if few else lanes
    helpers = threading.batch - 1
    outs = p.groups * ceil_div(p.out_group, lanes)
    scratch = 0
    if helpers:
        floats = p.weights(in_block, lanes) // FLOAT + outs * lanes
        scratch += booked(floats * helpers * FLOAT) + BARRIER
    if p.bias:
        scratch += booked(outs * lanes * FLOAT) if p.out_group % lanes else 0
        scratch += job_reduction(
            threads=threading.total, job=lanes, jobs=outs, reduced=p.images, most=threading.total * 3 * 5 * 5 * lanes**2
        )
    return _gradient_buffers(p, lanes, in_block if few else lanes, scratch, source_plain=few)


def _direct_threading(p: Problem, few: bool) -> Threading:
    lanes = p.lanes
    by_rows = p.dilation[0] == 1 and p.out_size[0] > FEWEST_REDUCED_ROWS and not p.channels_last
    in_block = p.in_group if few else lanes
    rows_in, rows_out = p.in_size[0], p.out_size[0]
    most = p.images * (max(1, rows_out // FEWEST_REDUCED_ROWS) if by_rows else 1)
    return weight_reduction(
        Work(
            threads=p.threads,
            groups=p.groups,
            reduced=p.images * (rows_out if by_rows else 1),
            reduced_source=p.images * (rows_in if by_rows else 1),
            most_batch=most,
            source_blocks=ceil_div(p.in_group, in_block),
            destination_blocks=ceil_div(p.out_group, lanes),
            source_weight=in_block * p.in_size[1] * (1 if by_rows else rows_in),
            source_stride=p.stride[0] * p.stride[1],
            destination_weight=lanes * p.out_size[1] * (1 if by_rows else rows_out),
            kernel_weight=8 * p.taps * in_block * lanes,
            whole_batch=most,
            refine=True,
        )
    )


def _narrow_direct_gradient(p: Problem) -> Buffers | None:
    """The eight-lane direct kernel, which also takes what the sixteen-lane one refuses."""
    end, extent, block = tuple(max(0, e) for e in p.end_padding), p.extent, 8
    flat = p.groups == 1 and p.in_channels == 3
    fits = (
        not p.dilated
        and all(p.padding[d] < extent[d] and end[d] < extent[d] for d in (0, 1))
        and p.kernel[1] < 14
        and p.kernel[0] <= p.in_size[0]
        and (p.groups == 1 or (p.in_group % block == 0 and p.out_group % block == 0))
    )
    if not fits:
        return None
    in_block = p.in_group if flat else block
    outs = p.groups * ceil_div(p.out_group, block)
    ins = ceil_div(p.in_group, in_block)
    scratch = job_reduction(
        threads=p.threads, job=p.taps * in_block * block, jobs=ins * outs, reduced=p.images, most=1 << 21
    )
    if p.bias:
        scratch += booked(outs * block * FLOAT) if p.out_group % block else 0
        scratch += job_reduction(threads=p.threads, job=block, jobs=outs, reduced=p.images, most=1 << 21)
    return _gradient_buffers(p, block, in_block, scratch, source_plain=flat)


def _unfolded_weight_gradient(p: Problem) -> Buffers:
    across = p.pixels // p.threads < 256 and (p.images != 1 or p.groups > 2)
    threads = p.threads if across else 1
    weights = p.weights(1, 1)
    image = p.in_size[0] * p.in_size[1] * p.in_group * FLOAT if p.channels_last else 0
    scratch = booked(threads * weights * FLOAT) + booked(threads * unfolded(p) * FLOAT) + booked(threads * image)
    return Buffers(weights=weights, scratch=scratch)
