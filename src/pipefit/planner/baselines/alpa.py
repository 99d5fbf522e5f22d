"""The alpa planner: the fewest seconds by Alpa's formula, the sum of all stages plus M - 1 times the slowest.

Cuts and the degree of every stage are chosen together. Memory is only a limit: a stage has to fit its
devices. The seconds of the slowest stage are bounded by one of some values, and for each value dynamic
programming finds the plan with the lowest sum. (Zheng et al., "Alpa", OSDI 2022, section 5.2; the all-reduce
of gradients is divided among the microbatches, as there.)

Cost: dynamic programming for each value of the slowest stage.
"""

from __future__ import annotations

import numpy as np

from pipefit.errors import UsageError
from pipefit.planner.hybrid import Hybrid, HybridSearch, budget_level
from pipefit.planner.hybrid.programme import Cost, StageRequest
from pipefit.planner.problem import PlannerResult, Question
from pipefit.schema.plan import Objective

_SLOWEST = 24  # number of values that are tried


def alpa(question: Question) -> PlannerResult:
    """Return the plan with the fewest seconds by the formula that fits; if none fits, ignore memory.

    Raises:
        UsageError: no plan has the requested degrees.
    """
    search, best = HybridSearch(question, shards=question.shards[:1]), list[Hybrid]()
    for level in (budget_level(question), float("inf")):
        for slowest in _values(search):
            within = _within(search, slowest, level)
            best += [within] if within is not None else []
        if best:
            break
    else:
        best.append(search.best(lambda _, choice: Cost(search.barred_ranges(choice))))  # raises: no plan
    result = min(best, key=lambda hybrid: hybrid.value)
    return PlannerResult(result.split, Objective.ESTIMATED_STEP, result.value, result.evaluated, proven=False)


def _values(search: HybridSearch) -> list[float]:
    """Return values for the seconds of the slowest stage, as quantiles over all stages."""
    every = np.concatenate(
        [search.each(choice)[np.isfinite(search.shares(1, choice))] for choice in search.choices]
    )
    result: list[float] = np.unique(np.quantile(every, np.linspace(0, 1, _SLOWEST), method="higher")).tolist()
    return result


def _within(search: HybridSearch, slowest: float, level: float) -> Hybrid | None:
    """Return the plan with the lowest sum within `slowest` seconds for each stage and a memory level."""

    def cost(left: int, choice: StageRequest) -> Cost:
        each = search.each(choice)
        allowed = (
            (each <= slowest)
            & (search.shares(left, choice) <= level)
            & (search.shares(left, choice) < np.inf)
        )
        return Cost.of(np.where(allowed, 0.0, np.inf), each)

    try:
        result = search.best(cost)
    except UsageError:
        return None
    times = [float(search.each(stage.choice)[stage.start, stage.stop]) for stage in result.stages]
    return result._replace(value=sum(times) + (search.question.training.microbatches - 1) * max(times))
