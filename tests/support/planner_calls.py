"""One-line calls of planners."""

from __future__ import annotations

from pipefit.planner import Planner, PlanOptions, Question, solved
from pipefit.schema.cluster import Cluster
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training


def asked(
    planner: Planner,
    profile: ModelProfile,
    cluster: Cluster,
    training: Training,
    options: PlanOptions | None = None,
) -> Plan:
    """Return the plan of `planner`, which is named after its function."""
    question = Question(profile=profile, cluster=cluster, training=training, options=options or PlanOptions())
    return solved(question, planner, name=planner.__name__)
