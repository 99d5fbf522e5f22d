"""What is handed over in the wrong place, or is no document at all, is refused by the name of its argument."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

import pipefit
from pipefit.cluster import Cluster
from pipefit.errors import UsageError
from pipelines import make_plan, random_profile
from tiny import task_of

PLAN = make_plan(random_profile(6), (2, 4))
TASK = task_of(lambda: [nn.Linear(8, 4)])
CLUSTER = Cluster.emulated((2, 1 << 30))
CALLS: list[tuple[Callable[[], object], str]] = [
    (lambda: pipefit.plan(PLAN.profile, None, batch_size=4), "cluster must be a Cluster, not None"),
    (lambda: pipefit.plan("zoo:gpt", CLUSTER), "model must be a Task, not 'zoo:gpt'"),
    (lambda: pipefit.plan(nn.Linear(2, 2), CLUSTER), "model must be a Task, not "),
    (lambda: pipefit.plan(PLAN.profile, CLUSTER, 4), "training must be a Training, not 4"),
    (lambda: pipefit.profile(nn.Linear(2, 2), microbatch_size=1), "task must be a Task"),
    (lambda: pipefit.simulate("plan.json"), "plan must be a Plan, not 'plan.json': pipefit.load reads one"),
    (lambda: pipefit.certify(PLAN, TASK), "task must be a Task"),
    (lambda: pipefit.Trainer(PLAN, TASK), "task must be a Task"),
    (lambda: pipefit.Trainer(TASK, "plan.json"), "plan must be a Plan"),
    (lambda: pipefit.lower("plan.json"), "plan must be a Plan"),
    (lambda: pipefit.load_cluster(4), "name_or_path must be a str, not 4"),
]


@pytest.mark.parametrize(("call", "words"), CALLS, ids=[words[:40] for _, words in CALLS])
def test_the_argument_is_named(call: Callable[[], object], words: str) -> None:
    """With what it must be, and what it is."""
    with pytest.raises(UsageError) as caught:
        call()
    assert words in str(caught.value)


def test_a_cluster_may_be_named_in_a_call() -> None:
    """By the names and forms of `load_cluster`; a plan of a profile is the same either way."""
    asked = {"batch_size": PLAN.training.batch_size, "planner": "exact", "data": 1, "tensor": 1}
    one, two = (
        pipefit.plan(PLAN.profile, cluster, **asked)
        for cluster in ("emulated:2x1GiB", pipefit.load_cluster("emulated:2x1GiB"))
    )
    assert (one.stages, one.cluster) == (two.stages, two.cluster)
