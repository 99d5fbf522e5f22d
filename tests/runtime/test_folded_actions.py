"""Folded dry runs of plans whose blocks are recomputed, moved and updated separately."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from pipefit.capture import Task
from pipefit.capture.sample import sample
from pipefit.fake_cuda.chain import fake_chain
from pipefit.fake_cuda.target import FakeTarget
from pipefit.lowering import lower
from pipefit.lowering.passes.recomputation import recompute_decisions
from pipefit.models import build
from pipefit.planner import PlanOptions, Question
from pipefit.planner.driver import solved
from pipefit.planner.lean import ALL_AWAY, at_hosts
from pipefit.profiler import profile
from pipefit.runtime import certify
from pipefit.runtime.dry_run.layers import Shortened
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.json_io import load_cluster
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training


def gpt(layers: int) -> Task:
    """Return a small GPT."""
    return build("gpt", layers=layers, hidden=32, heads=2, sequence=8, vocabulary=32)


def executed(task: Task, plan: Plan) -> int:
    """Return the number of layers that a dry run executes."""
    with FakeTarget("cuda") as fake:
        chain = fake_chain(task, fake, sample(task, plan.training.microbatch_size))
        return len(Shortened.of(task, plan, lower(plan), chain).chain.layers)


def recomputed(found: ModelProfile, microbatches: int) -> Plan:
    """Place all layers on one device and recompute every block separately."""
    stages = (Stage(start=0, stop=len(found.layers), grid=Grid.of(0)),)
    return Plan(
        profile=found,
        cluster=Cluster.emulated((1, 1 << 30)),
        training=Training(batch_size=2 * microbatches, microbatches=microbatches),
        stages=stages,
        decisions=recompute_decisions(stages, found.edges, "always", "1f1b", microbatches),
    )


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.gallery), 3])
def test_blocks_that_are_recomputed_separately_are_folded(microbatches: int) -> None:
    """Four of nine recomputed blocks are run, and every sample equals that of the whole dry run."""
    task = gpt(9)
    plan = recomputed(profile(task, microbatch_size=2, target="cuda"), microbatches)
    assert executed(task, plan) == len(plan.profile.layers) - 5
    assert certify(task, plan) == certify(task, plan, fold=False)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("part", "moves"), [(1.0, None), (0.75, None), (1.0, ALL_AWAY)], ids=["all", "some", "away"]
)
def test_blocks_whose_state_moves_separately_are_folded(part: float, moves: Any) -> None:
    """Blocks that hosts update one by one are folded, and so are those whose parameters move too."""
    task = gpt(6)
    question = Question(
        profile=profile(task, microbatch_size=2, target="cuda"),
        cluster=load_cluster("4x-titan-rtx"),
        training=Training(batch_size=6, microbatches=3),
        options=PlanOptions(data=1, tensor=1, stages=1, allow_infeasible=True),
    )
    planner = partial(at_hosts, part=part, **({} if moves is None else {"moves": moves}))
    plan = solved(question, planner, name="lean")
    assert executed(task, plan) < len(plan.profile.layers)
    assert certify(task, plan) == certify(task, plan, fold=False)
