"""The uniform planner: the same number of blocks on every device, or one more, as one would split by hand.

Good where all blocks are alike and memory is plenty. It ignores what blocks cost, and that early stages of 1F1B hold
more microbatches. Instant.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from pipefit.planner.problem import Found, Question
from pipefit.schema.plan import Objective
from pipefit.timing import seconds

# ----------------------------------------------------------------------------------------------------
# The first_last planner: equal numbers of blocks, but one less on the first stage and on the last.
#
# As torchtitan does, where an embedding and a head come on top of the blocks and weigh as much as one each.
# So L + 2 blocks are distributed evenly, with one more on the first stages if that is impossible, and then
# the first and the last stage lose one. A stage that would be empty takes a block from the longest. It
# ignores what blocks cost. Instant. (torchtitan, `generate_llm_fqn_per_model_part` with both weights one.)


def first_last(question: Question) -> Found:
    """Stages of equal length, the first and the last one block shorter. Stage s is on device s."""
    counts = _lengths(question.blocks, question.stages)
    edges = (0, *accumulate(counts))
    return Found(question.in_order(edges), Objective.BLOCKS, max(counts), proven=False)


def _lengths(blocks: int, stages: int) -> list[int]:
    """Number of blocks of every stage."""
    length, longer = divmod(blocks + 2, stages)
    counts = [length + (stage < longer) for stage in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    for stage in (0, stages - 1):
        while counts[stage] < 1:
            counts[counts.index(max(counts))] -= 1
            counts[stage] += 1
    return counts


# ----------------------------------------------------------------------------------------------------
# Splits a sequence of weights into consecutive parts so that the heaviest part is as light as possible.
#
# Exact for integers: bisection on the weight of the heaviest part, with a greedy filling by binary search for
# each of the few dozen tries, in O(P log L). Between equal solutions, the first parts are as long as
# possible.


def lightest_parts(weights: Sequence[int], parts: int) -> tuple[int, tuple[int, ...]]:
    """The lowest possible sum of the heaviest of `parts` parts, and their edges 0 = e0 < e1 < ... = len(weights).

    No weight is negative.
    """
    sums = [0, *accumulate(weights)]
    low, best = -1, (*range(parts), len(weights))
    high = _heaviest(sums, best)
    while high - low > 1:
        middle = (low + high) // 2
        edges = _filled(sums, parts, middle)
        if edges is None:
            low = middle
        else:
            best, high = edges, _heaviest(sums, edges)
    return high, best


def _filled(sums: Sequence[int], parts: int, most: int) -> tuple[int, ...] | None:
    """Edges of parts of at most `most` each, the first ones as long as possible; None where there are none."""
    count = len(sums) - 1
    edges = [0]
    for later in reversed(range(parts)):
        stop = min(bisect_right(sums, sums[edges[-1]] + most) - 1, count - later)
        if stop <= edges[-1]:
            return None
        edges.append(stop)
    return tuple(edges) if edges[-1] == count else None


def _heaviest(sums: Sequence[int], edges: Sequence[int]) -> int:
    return max(sums[b] - sums[a] for a, b in pairwise(edges))


# ----------------------------------------------------------------------------------------------------
# The parameters planner: the device with the most parameters has as few as possible. DeepSpeed's default.
#
# Good where parameters, gradients and optimizer state are most of the memory. It ignores activations: a model
# whose first layers have few parameters and large activations fills its first device. The minimum is exact,
# found in milliseconds. (DeepSpeed, `partition_method="parameters"`.)


def parameters(question: Question) -> Found:
    """The split whose largest stage has the fewest parameter bytes. Stage s is on device s."""
    sizes = [cost.parameter_bytes for cost in question.measurement.costs]
    weights = [sum(sizes[start:stop]) for start, stop in pairwise(question.edges)]
    value, edges = lightest_parts(weights, question.stages)
    return Found(question.in_order(edges), Objective.PARAMETERS, value)


# ----------------------------------------------------------------------------------------------------
# The time planner: the slowest stage is as fast as possible, as in planners for throughput. It ignores
# memory.
#
# Good where memory is plenty, because a pipeline runs at the pace of its slowest stage. Under 1F1B the first
# stage holds the most microbatches, so that stages of equal time fill the first device first. Forward and
# backward seconds are measured ones from the profile, or estimates for the kind of the first device. The
# minimum is exact, found in milliseconds. (torchgpipe's `balance_by_time`, solved exactly.)

_TICK = 1e-12  # seconds are rounded to this, so that sums of them are exact


def time(question: Question) -> Found:
    """The split whose slowest stage needs the fewest seconds forward and backward. Stage s is on device s."""
    slowest, edges = lightest_parts(ticks(question), question.stages)
    return Found(question.in_order(edges), Objective.SECONDS, slowest * _TICK)


def ticks(question: Question) -> list[int]:
    """Forward and backward time of every block, the loss with the last, in picoseconds."""
    kind, dtype = question.cluster.devices[0].kind, question.training.dtype
    costs, edges = (*question.measurement.costs, question.measurement.loss), list(question.edges)
    edges[-1] += 1
    return [
        sum(round(seconds(work, kind, dtype) / _TICK) for cost in part for work in (cost.forward, cost.backward))
        for part in (costs[start:stop] for start, stop in pairwise(edges))
    ]


# ----------------------------------------------------------------------------------------------------


def uniform(question: Question) -> Found:
    """Stages of equal length; if that is impossible, the first ones have one block more. Stage s is on device s."""
    edges = equal_lengths(question.blocks, question.stages)
    longest = edges[1]
    return Found(question.in_order(edges), Objective.BLOCKS, longest)


def equal_lengths(blocks: int, stages: int) -> tuple[int, ...]:
    """Edges of stages of equal length, the first ones one block longer if that is impossible."""
    length, longer = divmod(blocks, stages)
    return tuple(stage * length + min(stage, longer) for stage in range(stages + 1))
