"""The additive planner, mCAP's: the best split by the two numbers that training runs measured for every block.

It needs a profile with such runs (`pipefit profile --runs incremental` or `trimmed`), made with the settings of the
training that is planned. Dynamic programming finds the split that mCAP-BF finds by trying each (`mcap_bf`): the highest
peak is as low as possible, then the second highest, and so on. These peaks are estimates that ignore a stage's place in
the schedule; the finished plan shows the true ones. Stage s is on device s, and all devices count as alike. A few
hundredths of a second for 42 blocks. (mCAP, listing 1.1 and section 3.4.)
"""

from __future__ import annotations

from itertools import pairwise
from math import comb

from pipefit.additive_costs import AdditiveCosts
from pipefit.errors import UsageError
from pipefit.planner.prediction import best_split
from pipefit.planner.question import Found, Question
from pipefit.provenance import Objective


def additive(question: Question) -> Found:
    """The split with the lowest highest estimated peak, then the lowest second highest, and so on.

    Raises:
        UsageError: no training runs were made under this training.
    """
    costs = measured_costs(question)
    edges = best_split(costs, question.blocks, question.stages)
    highest = max(costs.peak(start, stop) for start, stop in pairwise(edges))
    looked_at = question.stages * comb(question.blocks - question.stages + 2, 2)
    return Found(question.in_order(edges), Objective.ESTIMATED_PEAK, highest, looked_at)


def measured_costs(question: Question) -> AdditiveCosts:
    """What training runs measured, under exactly the training that is planned.

    Raises:
        UsageError: there were none, or they were made under another training; says what differs.
    """
    model, costs = question.profile.model, question.profile.additive
    if costs is None:
        raise UsageError(
            f"this planner takes what training runs measured, and there were none of {model}: profile it with "
            "--runs incremental or --runs trimmed, or use the exact planner, which needs none"
        )
    unlike = costs.differences(question.training, question.options.recompute)
    if unlike:
        raise UsageError(
            f"the training runs of {model} were made with {'; '.join(unlike)}: ask for a plan of that training, "
            "profile with --runs and the settings of this one, or use the exact planner, which needs no runs"
        )
    if question.blocks < len(question.profile.block_names):
        raise UsageError(
            f"the training runs of {model} were made block by block, and schedule {question.training.schedule} keeps "
            "blocks that share a parameter in one stage: use the exact planner, or untie them"
        )
    return costs
