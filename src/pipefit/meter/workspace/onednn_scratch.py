"""Scratchpads of oneDNN's convolutions: who reduces what with how many threads.

A scratchpad is one allocation: the sum of its bookings, each enlarged by its alignment (oneDNN
src/common/memory_tracking.hpp). Weight gradients need one when several threads each sum over part of the batch, and
then two searches decide how many: `weight_reduction` (the `balance` of jit_avx512_common_conv_kernel.cpp and of
jit_avx512_common_1x1_conv_kernel.cpp) and `job_reduction` (`reduce_balancer_t` of cpu_reducer.cpp). Both are short
searches over divisors of the thread count.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.meter.workspace.ledger import ceil_div, round_up

ALIGNMENT = 128
PAGE = 4096
BARRIER = 2 * PAGE  # a barrier between threads is one page, aligned to a page
FLOAT = 4
BATCH_ELEMENT = 40  # bytes of one pair of operands in the batch of a brgemm kernel


def booked(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """Bytes that a booking adds to a scratchpad: none if it is empty, else its size and its alignment."""
    return nbytes + alignment if nbytes else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Threading:
    """How a weight gradient is divided: threads over the batch, and in all."""

    batch: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What `weight_reduction` weighs against each other, in elements and blocks."""

    threads: int
    groups: int
    reduced: int  # units of the reduction: images, times rows where rows are divided too
    reduced_source: int  # the same, counted in source rows
    most_batch: int  # most threads that may share the reduction
    source_blocks: int
    destination_blocks: int
    source_weight: int  # elements of one source block in one unit of the reduction
    source_stride: int  # strides that the source's cost is divided by
    destination_weight: int
    kernel_weight: int  # elements of one block of the weights, times the cost of writing them
    whole_batch: int  # threads that the reduction takes when more than half of them would be in it
    refine: bool  # whether to trade memory cost for balance in a second pass


def weight_reduction(work: Work) -> Threading:
    """The cheapest division of a weight gradient over threads, by the kernels' own estimate of memory traffic."""
    if work.threads < work.groups:
        return Threading(batch=1, total=work.threads)
    threads = work.threads // work.groups

    def memory(batch: int, outs: int, ins: int) -> int:
        out_blocks, in_blocks = ceil_div(work.destination_blocks, outs), ceil_div(work.source_blocks, ins)
        source = ceil_div(work.reduced_source, batch) * in_blocks * work.source_weight // work.source_stride
        destination = ceil_div(work.reduced, batch) * out_blocks * work.destination_weight
        return source + destination + out_blocks * in_blocks * work.kernel_weight

    def compute(batch: int, outs: int, ins: int) -> int:
        return (
            ceil_div(work.reduced, batch) * ceil_div(work.destination_blocks, outs) * ceil_div(work.source_blocks, ins)
        )

    candidates = [
        (batch, outs, min(threads // batch // outs, work.source_blocks))
        for batch in range(1, min(threads, work.most_batch) + 1)
        for outs in range(1, min(threads // batch, work.destination_blocks) + 1)
    ]
    best = (1, 1, 1)
    for candidate in candidates:
        if memory(*candidate) <= memory(*best):
            best = candidate
    if work.refine:
        lowest_memory = memory(*best)
        for candidate in candidates:
            mine, theirs = compute(*candidate), compute(*best)
            if (mine <= theirs and memory(*candidate) < 1.1 * lowest_memory) or 4 * mine <= 3 * theirs:
                best = candidate
    batch = best[0]
    if work.threads // 2 < batch < work.threads:
        batch = min(work.whole_batch, work.threads)
    return Threading(batch=batch, total=batch * work.groups * best[1] * best[2])


def job_reduction(*, threads: int, job: int, jobs: int, reduced: int, most: int) -> int:
    """Scratch bytes of `jobs` sums of `job` floats over `reduced` terms: threads in groups, one buffer per helper."""
    fewest = max(1, jobs // threads)
    ceiling = max(1, most // (threads * job))
    groups = min(jobs // fewest, threads)
    members = min(threads // groups, reduced)
    per_group = ceil_div(jobs, groups)
    cost = jobs * job * reduced
    for tried in range(fewest, jobs):
        some_groups = min(jobs // tried, threads)
        some_members = min(threads // some_groups, reduced)
        some_per_group = ceil_div(jobs, some_groups)
        if some_members > 1 and some_per_group > ceiling:
            continue
        some_cost = job * some_per_group * (ceil_div(reduced, some_members) + (some_members != 1))
        if some_cost < cost:
            groups, members, per_group, cost = some_groups, some_members, some_per_group, some_cost
    if members == 1:
        return 0
    return booked(groups * (members - 1) * per_group * job * FLOAT, PAGE) + groups * PAGE + PAGE


def brgemm_batch(threads: int, products: int) -> int:
    """The list of operand pairs of each thread, filled up to whole pages."""
    elements = ceil_div(round_up(products * BATCH_ELEMENT, PAGE), BATCH_ELEMENT)
    return booked(threads * elements * BATCH_ELEMENT, PAGE)
