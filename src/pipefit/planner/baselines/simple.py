"""Simple planners, which look at one property of blocks: `uniform`, `first_last`, `parameters` and `time`.

Stage s is on device s.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from pipefit.planner.problem import PlannerResult, Question
from pipefit.schema.plan import Objective
from pipefit.timing import seconds

# ---- first_last


def first_last(question: Question) -> PlannerResult:
    """Split into stages of equal length, the first and the last one block shorter.

    As torchtitan does for models whose embedding and head weigh as much as one block each: L + 2 blocks are
    distributed evenly, with one more on the first stages if needed, and then the first and the last stage
    lose one. An empty stage takes a block from the longest. The costs of blocks are ignored. (torchtitan,
    `generate_llm_fqn_per_model_part` with both weights one.)
    """
    counts = _lengths(question.blocks, question.stages)
    edges = (0, *accumulate(counts))
    return PlannerResult(question.in_order(edges), Objective.BLOCKS, max(counts), proven=False)


def _lengths(blocks: int, stages: int) -> list[int]:
    """Return the number of blocks of every stage."""
    length, longer = divmod(blocks + 2, stages)
    counts = [length + (stage < longer) for stage in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    for stage in (0, stages - 1):
        while counts[stage] < 1:
            counts[counts.index(max(counts))] -= 1
            counts[stage] += 1
    return counts


# ---- Lightest parts


def lightest_parts(weights: Sequence[int], parts: int) -> tuple[int, tuple[int, ...]]:
    """Return the lowest sum of the heaviest of `parts` parts, and the edges of the parts.

    Edges are 0 = e0 < e1 < ... = len(weights). Exact for non-negative integers: bisection on the weight of
    the heaviest part, with a greedy filling by binary search for each try, in O(P log L). Of equal solutions,
    the first parts are as long as possible.
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
    """Return edges of parts of at most `most` each, the first ones as long as possible, or None."""
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


# ---- parameters


def parameters(question: Question) -> PlannerResult:
    """Return the split whose largest stage has the fewest parameter bytes, DeepSpeed's default.

    Useful if parameters, gradients and optimizer state are most of the memory. Activations are ignored: a
    model whose first layers have few parameters and large activations fills its first device. The minimum is
    exact, found in milliseconds. (DeepSpeed, `partition_method="parameters"`.)
    """
    sizes = [cost.parameter_bytes for cost in question.measurement.costs]
    weights = [sum(sizes[start:stop]) for start, stop in pairwise(question.edges)]
    value, edges = lightest_parts(weights, question.stages)
    return PlannerResult(question.in_order(edges), Objective.PARAMETERS, value)


# ---- time

_TICK = 1e-12  # seconds are rounded to this, so that their sums are exact


def time(question: Question) -> PlannerResult:
    """Return the split whose slowest stage needs the fewest seconds forward and backward.

    Useful if memory is plenty, because a pipeline runs at the pace of its slowest stage. Memory is ignored:
    under 1F1B the first stage holds the most microbatches, so stages of equal time fill the first device
    first. Seconds are measured ones from the profile, or estimates for the kind of the first device. The
    minimum is exact, found in milliseconds. (torchgpipe's `balance_by_time`, solved exactly.)
    """
    slowest, edges = lightest_parts(ticks(question), question.stages)
    return PlannerResult(question.in_order(edges), Objective.SECONDS, slowest * _TICK)


def ticks(question: Question) -> list[int]:
    """Return the forward and backward time of every block, the loss with the last, in picoseconds."""
    kind, dtype = question.cluster.devices[0].kind, question.training.dtype
    costs, edges = (*question.measurement.costs, question.measurement.loss), list(question.edges)
    edges[-1] += 1
    return [
        sum(
            round(seconds(work, kind, dtype) / _TICK)
            for cost in part
            for work in (cost.forward, cost.backward)
        )
        for part in (costs[start:stop] for start, stop in pairwise(edges))
    ]


# ---- uniform


def uniform(question: Question) -> PlannerResult:
    """Split into stages of equal length; if that is impossible, the first ones have one block more.

    Useful if all blocks are equal and memory is plenty. The costs of blocks, and the additional microbatches
    that early stages of 1F1B hold, are ignored.
    """
    edges = equal_lengths(question.blocks, question.stages)
    longest = edges[1]
    return PlannerResult(question.in_order(edges), Objective.BLOCKS, longest)


def equal_lengths(blocks: int, stages: int) -> tuple[int, ...]:
    """Return the edges of stages of equal length, the first ones one block longer if needed."""
    length, longer = divmod(blocks, stages)
    return tuple(stage * length + min(stage, longer) for stage in range(stages + 1))
