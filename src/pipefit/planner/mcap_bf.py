"""mCAP's brute force: tries every split, with peaks estimated from the two numbers that runs measured for each block.

Splits are compared by their highest peak, then by their second highest, and so on. Between splits that are equal in
all, the stages are compared from the last to the first: the one with the smaller first block wins. The `additive`
planner finds the same split by dynamic programming; this one exists to reproduce the paper's comparisons.
C(L-1, P-1) predictions: a tenth of a second for 42 blocks on 4 devices. (mCAP, section 3.4.)
"""

from __future__ import annotations

from itertools import combinations, pairwise
from math import comb

from pipefit.errors import UsageError
from pipefit.planner.additive import measured_costs
from pipefit.planner.question import Found, Question
from pipefit.provenance import Objective

LIMIT = 2_000_000  # splits; about half a minute


def mcap_bf(question: Question) -> Found:
    """The split with the lowest highest estimated peak, then the lowest second highest, and so on.

    Raises:
        UsageError: more than `LIMIT` splits, or no training runs were made under this training.
    """
    costs, blocks, stages = measured_costs(question), question.blocks, question.stages
    count = comb(blocks - 1, stages - 1)
    if count > LIMIT:
        raise UsageError(
            f"{question.profile.parts} on {stages} stages split in {count:,} ways, more than the {LIMIT:,} that "
            "mcap_bf tries: use the additive planner, which finds the same split"
        )
    splits = ((0, *cuts, blocks) for cuts in combinations(range(1, blocks), stages - 1))
    peaks, _, edges = min(
        (sorted((costs.peak(*stage) for stage in pairwise(edges)), reverse=True), edges[::-1], edges)
        for edges in splits
    )
    return Found(question.in_order(edges), Objective.ESTIMATED_PEAK, peaks[0], count)
