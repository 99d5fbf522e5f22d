"""The exhaustive planner: try every split of L blocks over P stages, and every order of different devices.

It finds the optimum in C(L-1, P-1) splits: 3,654 for 30 blocks on 4 devices, but far too many for 100 on 16,
for which `exact` is the planner to use. Tests compare both; they share only the question. (mCAP, section
3.4.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations, permutations
from math import comb, factorial, prod

from pipefit.errors import UsageError
from pipefit.lowering import distinct_steps, step_programs
from pipefit.memory import Costs
from pipefit.planner.baselines.simple import equal_lengths
from pipefit.planner.driver import plan_of
from pipefit.planner.problem import PlannerResult, Question, Split
from pipefit.schema.program import Program
from pipefit.simulator import Ledger, at_rest, highest

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
