"""The parameters planner: the device with the most parameters has as few as can be. DeepSpeed's default.

Good where parameters, gradients and optimizer state are most of the memory. Blind to activations: a model whose
first layers are thin in parameters and thick in activations fills its first device. Exact for its own measure, in
milliseconds. (DeepSpeed, `partition_method="parameters"`.)
"""

from __future__ import annotations

import time

from pipefit.cluster import Cluster
from pipefit.planner.answer import Found, answer
from pipefit.planner.question import Options, Question
from pipefit.planner.sums import lightest_parts
from pipefit.plans import Plan
from pipefit.profiles import ModelProfile
from pipefit.training import Training


def parameters(profile: ModelProfile, cluster: Cluster, training: Training, options: Options = Options()) -> Plan:
    """The split with the lowest highest sum of parameter bytes. Stage s is on device s.

    Raises:
        UsageError: the question is wrong.
        InfeasibleError: a device is too small for its stage.
    """
    began = time.perf_counter()
    question = Question(profile=profile, cluster=cluster, training=training, options=options)
    weights = [cost.parameter_bytes for cost in question.measurement.costs]
    value, edges = lightest_parts(weights, question.stages)
    seconds = time.perf_counter() - began
    objective = "parameter bytes of the heaviest stage"
    return answer(question, Found("parameters", question.in_order(edges), objective, value, 1, seconds))
