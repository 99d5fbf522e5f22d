"""mCAP's Bayesian optimisation over mCAP's predictor: the settings of the paper, and its two numbers for every layer.

The search of `bayesian`, over estimated peaks instead of true ones; what the paper compares with its brute force
(`mcap_bf`). A baseline: `additive` finds the best split by the same estimates, proven, in a fraction of a second. Ten
to twenty seconds; needs `pipefit[bayes]`. (mCAP, section 3.4.)
"""

from __future__ import annotations

from itertools import pairwise

from pipefit.planner.additive import measured_costs
from pipefit.planner.bayesian import SEED, minimiser, search
from pipefit.planner.question import Found, Question
from pipefit.plans import Objective
from pipefit.profiles import AdditiveCosts

Edges = tuple[int, ...]


def mcap_bo(question: Question) -> Found:
    """The best of 75 splits by mCAP's estimates, each chosen after looking at those before.

    Raises:
        UsageError: no training runs were made under this training, or scikit-optimize is not installed.
    """
    values = estimates(measured_costs(question), question.layers, question.stages)
    value, edges = min((value, edges) for edges, value in values.items())
    return Found(question.in_order(edges), Objective.ESTIMATED_PEAK, value, len(values), proven=False)


def estimates(costs: AdditiveCosts, layers: int, stages: int, *, seed: int = SEED) -> dict[Edges, float]:
    """Every split that the optimisation looks at, by its edges, and the estimated peak of its fullest device.

    Raises:
        UsageError: scikit-optimize is not installed.
    """

    def value(edges: Edges) -> float:
        return max(costs.peak(*stage) for stage in pairwise(edges))

    return search(value, layers, stages, minimiser(), seed=seed)
