"""The time planner: the slowest stage is as fast as possible, as in planners for throughput. It ignores memory.

Good where memory is plenty, because a pipeline runs at the pace of its slowest stage. Under 1F1B the first stage holds
the most microbatches, so that stages of equal time fill the first device first. Forward and backward seconds are
measured ones from the profile, or estimates for the kind of the first device. The minimum is exact, found in
milliseconds. (torchgpipe's `balance_by_time`, solved exactly.)
"""

from __future__ import annotations

from itertools import pairwise

from pipefit.cost.time import seconds
from pipefit.planner.question import Found, Question
from pipefit.planner.sums import lightest_parts
from pipefit.provenance import Objective

_TICK = 1e-12  # seconds are rounded to this, so that sums of them are exact


def time(question: Question) -> Found:
    """The split whose slowest stage needs the fewest seconds forward and backward. Stage s is on device s."""
    slowest, edges = lightest_parts(ticks(question), question.stages)
    return Found(question.in_order(edges), Objective.SECONDS, slowest * _TICK)


def ticks(question: Question) -> list[int]:
    """Forward and backward time of every block, the loss with the last, in picoseconds."""
    kind, dtype = question.cluster.devices[0].kind, question.training.dtype
    costs, edges = (*question.measurement.costs, question.measurement.loss), list(question.edges)
    edges[-1] += 1
    return [
        sum(round(seconds(work, kind, dtype) / _TICK) for cost in part for work in (cost.forward, cost.backward))
        for part in (costs[start:stop] for start, stop in pairwise(edges))
    ]
