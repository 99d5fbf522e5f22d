"""Planners asked in one line."""

from __future__ import annotations

from pipefit.cluster import Cluster
from pipefit.planner import Options, Planner, Question, solved
from pipefit.plans import Plan
from pipefit.profiles import ModelProfile
from pipefit.training import Training


def asked(
    planner: Planner, profile: ModelProfile, cluster: Cluster, training: Training, options: Options | None = None
) -> Plan:
    """The plan that `planner` finds, which is known by its function's name."""
    question = Question(profile=profile, cluster=cluster, training=training, options=options or Options())
    return solved(question, planner, name=planner.__name__)
