"""The parameters planner: the device with the most parameters has as few as possible. DeepSpeed's default.

Good where parameters, gradients and optimizer state are most of the memory. It ignores activations: a model whose first
layers have few parameters and large activations fills its first device. The minimum is exact, found in milliseconds.
(DeepSpeed, `partition_method="parameters"`.)
"""

from __future__ import annotations

from itertools import pairwise

from pipefit.planner.question import Found, Question
from pipefit.planner.sums import lightest_parts
from pipefit.provenance import Objective


def parameters(question: Question) -> Found:
    """The split whose largest stage has the fewest parameter bytes. Stage s is on device s."""
    sizes = [cost.parameter_bytes for cost in question.measurement.costs]
    weights = [sum(sizes[start:stop]) for start, stop in pairwise(question.edges)]
    value, edges = lightest_parts(weights, question.stages)
    return Found(question.in_order(edges), Objective.PARAMETERS, value)
