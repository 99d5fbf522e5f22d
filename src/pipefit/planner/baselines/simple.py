"""Planners without a search: `uniform`, `first_last`, `parameters` and `time`; and one that tries all splits.

The first four look at one property of blocks, and stage s is on device s.

The exhaustive planner tries every split of L blocks over P stages, and every order of different devices. It
finds the optimum in C(L-1, P-1) splits: 3,654 for 30 blocks on 4 devices, but far too many for 100 on 16, for
which `exact` is the planner to use. Tests compare both; they share only the question. (mCAP, section 3.4.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import accumulate, combinations, pairwise, permutations
from math import comb, factorial, prod

from pipefit.errors import UsageError
from pipefit.lowering import distinct_steps, step_programs
from pipefit.memory import Costs
from pipefit.planner.problem import PlannerResult, Question, Split, plan_of
from pipefit.schema.plan import Objective
from pipefit.schema.program import Program
from pipefit.simulator import Ledger, at_rest, highest
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


LIMIT = 2_000_000  # splits; about a minute


def exhaustive(question: Question) -> PlannerResult:
    """Return the split with the lexicographically lowest list of peaks, highest first, by trying all.

    Raises:
        UsageError: more than `LIMIT` splits.
    """
    count = _count(question)
    if count > LIMIT:
        raise UsageError(
            f"{question.profile.parts} on {question.stages} stages split in {count:,} ways, more than the "
            f"{LIMIT:,} that the exhaustive planner tries: use the exact planner, which finds the same plan"
        )
    value, split = _best(question)
    return PlannerResult(split, question.objective, value, count)


def _count(question: Question) -> int:
    """Return the number of splits times orders of device classes.

    The orders are counted one by one only if they would be few even with all devices different.
    """
    splits = comb(question.blocks - 1, question.stages - 1)
    sizes = [len(c.devices) for c in question.classes]
    devices = sum(sizes)
    if len(sizes) == 1:
        return splits
    if devices == question.stages:
        return splits * (factorial(devices) // prod(map(factorial, sizes)))
    orders = factorial(devices) // factorial(devices - question.stages)
    return splits * (sum(1 for _ in _orders(question)) if orders <= LIMIT else orders)


def _orders(question: Question) -> Iterator[tuple[int, ...]]:
    """Return every distinct sequence of device classes along the stages."""
    if len(question.classes) == 1:
        return iter([(0,) * question.stages])
    kinds = [kind for kind, members in enumerate(question.classes) for _ in members.devices]
    return iter(sorted(set(permutations(kinds, question.stages))))


def _best(question: Question) -> tuple[float, Split]:
    """Return the value and the split with the lowest list of costs, highest first.

    Splits with equal lists are compared by their stages from last to first.
    """
    peak = _peaks(question)
    units = [1 if question.equal_budgets else c.memory_bytes for c in question.classes]
    orders = list(_orders(question))

    def ranked() -> Iterator[tuple[list[float], list[tuple[int, int]]]]:
        for cuts in combinations(range(1, question.blocks), question.stages - 1):
            edges = (0, *cuts, question.blocks)
            peaks = [peak(stage, edges[stage], edges[stage + 1]) for stage in range(question.stages)]
            for kinds in orders:
                costs = [nbytes / units[kind] for nbytes, kind in zip(peaks, kinds, strict=True)]
                yield sorted(costs, reverse=True), list(zip(edges[-2::-1], kinds[::-1], strict=True))

    costs, path = min(ranked())
    free = [iter(c.devices) for c in question.classes]
    starts = [start for start, _ in reversed(path)]
    return costs[0], Split((*starts, question.blocks), tuple(next(free[kind]) for _, kind in reversed(path)))


def _peaks(question: Question) -> Callable[[int, int, int], int]:
    """Return a function from a stage's position and blocks to its peak.

    The peak is that of the simulator's ledger over all distinct steps.
    """
    costs, kind = Costs(question.measurement, question.training), question.cluster.devices[0].kind

    @cache
    def lowered(edges: tuple[int, ...]) -> tuple[Sequence[Program], range]:
        plan = plan_of(question, question.in_order(edges))
        return step_programs(plan), range(distinct_steps(plan))

    def split(stage: int, start: int, stop: int) -> tuple[int, ...]:
        """Return a split with this stage.

        Any split serves if forwards are one action, since programs are then equal.
        """
        if question.options.recompute != "always":
            return equal_lengths(question.blocks, question.stages)
        after = (
            equal_lengths(question.blocks - stop, question.stages - stage - 1)
            if stop < question.blocks
            else (0,)
        )
        return (*(equal_lengths(start, stage) if start else (0,)), *(stop + edge for edge in after))

    @cache
    def peak(stage: int, start: int, stop: int) -> int:
        programs, steps = lowered(split(stage, start, stop))
        cost = costs.stage(*question.layers(start, stop), kind)
        ledger = Ledger(stage, {stage: cost}, programs[-1])
        of_steps = (programs[min(step, len(programs) - 1)].actions[stage] for step in steps)
        changes = [
            (step, *effect) for step, actions in enumerate(of_steps) for effect in ledger.read(actions)
        ]
        return highest(at_rest([cost.rest], 0), changes)

    return peak
