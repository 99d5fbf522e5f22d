"""The first_last planner: equal numbers of layers, but one less on the first stage and on the last.

What torchtitan does: the embedding before the first block and the head behind the last one count as a layer each.
So L + 2 layers are dealt out evenly, the first stages one more where that cannot be, and then the first stage and the
last hold one less. A stage that would be left empty takes a layer from the longest. Knows nothing of what layers cost.
Instant. (torchtitan, `generate_llm_fqn_per_model_part` with both weights one.)
"""

from __future__ import annotations

from itertools import accumulate

from pipefit.cluster import Cluster
from pipefit.planner.answer import Found, answer
from pipefit.planner.question import Options, Question
from pipefit.plans import Plan
from pipefit.profiles import ModelProfile
from pipefit.training import Training


def first_last(profile: ModelProfile, cluster: Cluster, training: Training, options: Options = Options()) -> Plan:
    """Stages of equal length, the first and the last one layer shorter. Stage s is on device s.

    Raises:
        UsageError: the question is wrong.
        InfeasibleError: a device is too small for its stage.
    """
    question = Question(profile=profile, cluster=cluster, training=training, options=options)
    counts = _lengths(question.layers, question.stages)
    edges = (0, *accumulate(counts))
    return answer(
        question,
        Found("first_last", question.in_order(edges), "layers of the longest stage", max(counts), 1, 0.0, proven=False),
    )


def _lengths(layers: int, stages: int) -> list[int]:
    """Number of layers of every stage."""
    length, longer = divmod(layers + 2, stages)
    counts = [length + (stage < longer) for stage in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    for stage in (0, stages - 1):
        while counts[stage] < 1:
            counts[counts.index(max(counts))] -= 1
            counts[stage] += 1
    return counts
