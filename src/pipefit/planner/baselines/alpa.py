"""The alpa planner: the fewest seconds by Alpa's formula, the sum of all stages and M - 1 times the slowest.

Cuts and the degree of every stage are chosen together. Memory only counts in that a stage has to fit its devices, so
that the plan takes what there is. The slowest stage is bounded by one of some values, and for each the plan of the
lowest sum is found by dynamic programming. (Zheng et al., "Alpa", OSDI 2022, section 5.2; the sum of gradients is
divided among the microbatches, as there.)

Costs: a dynamic programme for each of the values of the slowest stage.
"""

from __future__ import annotations

import numpy as np

from pipefit.errors import UsageError
from pipefit.planner.hybrid import Hybrid, Search, budget_level
from pipefit.planner.hybrid.programme import Choice, Cost
from pipefit.planner.problem import Found, Question
from pipefit.schema.plan import Objective

_SLOWEST = 24  # values that are tried


def alpa(question: Question) -> Found:
    """The plan that takes the fewest seconds by the formula and fits; without regard to memory, where none does.

    Raises:
        UsageError: there is no plan of the degrees that are asked for.
    """
    search, best = Search(question, shards=question.shards[:1]), list[Hybrid]()
    for level in (budget_level(question), float("inf")):
        for slowest in _values(search):
            within = _within(search, slowest, level)
            best += [within] if within is not None else []
        if best:
            break
    else:
        best.append(search.best(lambda _, choice: Cost(search.barred_ranges(choice))))  # which says that there is none
    found = min(best, key=lambda one: one.value)
    return Found(found.split, Objective.ESTIMATED_STEP, found.value, found.evaluated, proven=False)


def _values(search: Search) -> list[float]:
    """Values that the slowest stage may have, from those of all stages."""
    every = np.concatenate([search.each(choice)[np.isfinite(search.shares(1, choice))] for choice in search.choices])
    found: list[float] = np.unique(np.quantile(every, np.linspace(0, 1, _SLOWEST), method="higher")).tolist()
    return found


def _within(search: Search, slowest: float, level: float) -> Hybrid | None:
    """The plan of the lowest sum whose stages are no slower and within a level of memory; None where there is none."""

    def cost(left: int, choice: Choice) -> Cost:
        each = search.each(choice)
        allowed = (each <= slowest) & (search.shares(left, choice) <= level) & (search.shares(left, choice) < np.inf)
        return Cost.of(np.where(allowed, 0.0, np.inf), each)

    try:
        found = search.best(cost)
    except UsageError:
        return None
    times = [float(search.each(one.choice)[one.start, one.stop]) for one in found.stages]
    return found._replace(value=sum(times) + (search.question.training.microbatches - 1) * max(times))
