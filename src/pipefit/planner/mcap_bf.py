"""mCAP's brute force over mCAP's predictor: every split, by the two numbers that training runs found for every layer.

Among splits with the same highest peak the fullest device is left out and the rest compared, and so on; among those
that are still equal, stages are compared from the last to the first: the smaller first layer wins. It is the split of
`additive`, which finds it by dynamic programming; here so that the paper's searches can be compared as they were.
C(L-1, P-1) predictions: a tenth of a second for 42 layers on 4 devices. (mCAP, section 3.4.)
"""

from __future__ import annotations

from itertools import combinations, pairwise
from math import comb

from pipefit.errors import UsageError
from pipefit.planner.additive import measured_costs
from pipefit.planner.question import Found, Question
from pipefit.plans import Objective

LIMIT = 2_000_000  # splits; about half a minute


def mcap_bf(question: Question) -> Found:
    """The split whose fullest device is least full, then the next, and so on, by mCAP's estimates.

    Raises:
        UsageError: more than `LIMIT` splits, or no training runs were made under this training.
    """
    costs, layers, stages = measured_costs(question), question.layers, question.stages
    count = comb(layers - 1, stages - 1)
    if count > LIMIT:
        raise UsageError(
            f"{layers} layers on {stages} stages split in {count:,} ways, more than the {LIMIT:,} that mcap_bf tries: "
            "use the additive planner, which finds the same split"
        )
    splits = ((0, *cuts, layers) for cuts in combinations(range(1, layers), stages - 1))
    peaks, _, edges = min(
        (sorted((costs.peak(*stage) for stage in pairwise(edges)), reverse=True), edges[::-1], edges)
        for edges in splits
    )
    return Found(question.in_order(edges), Objective.ESTIMATED_PEAK, peaks[0], count)
