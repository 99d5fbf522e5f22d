"""mCAP's Bayesian optimisation of estimated peaks, with the settings of the paper. A baseline.

It is the search of `bayesian`, but over the peaks that mCAP estimates from two numbers for each block; the paper
compares it with its brute force (`mcap_bf`). The `additive` planner finds the best split by the same estimates, proven,
in a fraction of a second; this one takes ten to twenty seconds and needs `pipefit[bayes]`. (mCAP, section 3.4.)
"""

from __future__ import annotations

from itertools import pairwise

from pipefit.additive_costs import AdditiveCosts
from pipefit.planner.additive import measured_costs
from pipefit.planner.bayesian import SEED, Edges, minimiser, search
from pipefit.planner.question import Found, Question
from pipefit.provenance import Objective


def mcap_bo(question: Question) -> Found:
    """The best of 75 splits by mCAP's estimates, each chosen from the results of those before.

    Raises:
        UsageError: no training runs were made under this training, or scikit-optimize is not installed.
    """
    values = estimates(measured_costs(question), question.blocks, question.stages)
    value, edges = min((value, edges) for edges, value in values.items())
    return Found(question.in_order(edges), Objective.ESTIMATED_PEAK, value, len(values), proven=False)


def estimates(costs: AdditiveCosts, blocks: int, stages: int, *, seed: int = SEED) -> dict[Edges, float]:
    """The splits that the optimisation evaluates, by their edges, each with its highest estimated peak.

    Raises:
        UsageError: scikit-optimize is not installed.
    """

    def value(edges: Edges) -> float:
        return max(costs.peak(*stage) for stage in pairwise(edges))

    return search(value, blocks, stages, minimiser(), seed=seed)
