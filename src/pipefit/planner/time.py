"""The time planner: the slowest stage is as fast as can be. What planners of throughput do; memory has no say.

Good for speed when memory is plenty: a pipeline runs at the pace of its slowest stage. Under 1F1B the first stage
holds the most microbatches, so equal time fills it first. Takes forward and backward seconds from the profile, or
their estimate, on the first device's kind. Exact for its own measure, in milliseconds. (torchgpipe's
`balance_by_time`, solved exactly.)
"""

from __future__ import annotations

from pipefit.cost.time import seconds
from pipefit.planner.question import Found, Question
from pipefit.planner.sums import lightest_parts
from pipefit.plans import Objective

_TICK = 1e-12  # seconds are rounded to this, so that sums of them are exact


def time(question: Question) -> Found:
    """The split with the lowest highest sum of forward and backward seconds. Stage s is on device s."""
    slowest, edges = lightest_parts(ticks(question), question.stages)
    return Found(question.in_order(edges), Objective.SECONDS, slowest * _TICK)


def ticks(question: Question) -> list[int]:
    """Forward and backward time of every layer, the loss with the last, in picoseconds."""
    kind, dtype = question.cluster.devices[0].kind, question.training.dtype
    *costs, last = question.measurement.costs
    parts = [(cost,) for cost in costs] + [(last, question.measurement.loss)]
    return [
        sum(round(seconds(work, kind, dtype) / _TICK) for cost in part for work in (cost.forward, cost.backward))
        for part in parts
    ]
