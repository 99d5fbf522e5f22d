"""The uniform planner: the same number of layers on every device, or one more. What one does without a planner.

Good where all layers are alike and memory is plenty. It knows nothing of what layers cost, nor that early stages of
1F1B hold more microbatches. Instant.
"""

from __future__ import annotations

from pipefit.cluster import Cluster
from pipefit.planner.answer import Found, answer
from pipefit.planner.question import Options, Question
from pipefit.plans import Plan
from pipefit.profiles import ModelProfile
from pipefit.training import Training


def uniform(profile: ModelProfile, cluster: Cluster, training: Training, options: Options = Options()) -> Plan:
    """Stages of equal length; where that cannot be, the first ones hold one layer more. Stage s is on device s.

    Raises:
        UsageError: the question is wrong.
        InfeasibleError: a device is too small for its stage.
    """
    question = Question(profile=profile, cluster=cluster, training=training, options=options)
    edges = equal_lengths(question.layers, question.stages)
    longest = edges[1]
    return answer(question, Found("uniform", question.in_order(edges), "layers of the longest stage", longest, 1, 0.0))


def equal_lengths(layers: int, stages: int) -> tuple[int, ...]:
    """Edges of stages of equal length, the first ones a layer longer where that cannot be."""
    length, longer = divmod(layers, stages)
    return tuple(stage * length + min(stage, longer) for stage in range(stages + 1))
