"""Misplaced or non-document arguments are refused by the name of the argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import pipefit
from pipefit.errors import UsageError
from pipefit.schema.cluster import Cluster
from support.pipelines import make_plan, random_profile
from support.small_tasks import SGD, plan_of, task_of

PLAN = make_plan(random_profile(6), (2, 4))
TASK = task_of(lambda: [nn.Linear(8, 4)])


TWO = task_of(lambda: [nn.Linear(8, 8), nn.Linear(8, 4)])
ON_ONE = plan_of(TWO, (2,))
METAL = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).to("meta")


def trained(**changed: Any) -> pipefit.Trainer:
    """Return a trainer of a task of two layers with one changed argument."""
    return pipefit.Trainer(replace(TWO, **changed), ON_ONE)


def profiled(**changed: Any) -> object:
    """Return the profile of the task with one changed argument."""
    return pipefit.profile(replace(TASK, **changed), microbatch_size=1)


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
    (lambda: pipefit.plan(PLAN.profile, CLUSTER, planner=[]), "planner must be a str or None, not [] (list)"),
    (lambda: pipefit.plan(PLAN.profile, CLUSTER, planner="jiont"), "unknown planner 'jiont': did you mean joint?"),
    (lambda: pipefit.plan(PLAN.profile, CLUSTER, planner="joint", objective="peak"),
     "the joint planner minimises step time, not the peak: omit the planner"),
    (lambda: pipefit.plan(PLAN.profile, CLUSTER, planner="mpress", objective="peak"),
     "the mpress planner minimises step time"),
    (lambda: pipefit.plan(PLAN.profile, CLUSTER, objective=[]), "objective must be 'throughput' or 'peak', not []"),
    (lambda: pipefit.plan(PLAN.profile, CLUSTER, means=None), "means must be a Means, not None"),
    (lambda: pipefit.plan(PLAN.profile, CLUSTER, batch_size=True), "batch_size must be an int or None, not True"),
    (lambda: pipefit.plan(PLAN.profile, CLUSTER, batch_size=1 << 63), "batch_size must be a whole number from 1 to"),
    (lambda: pipefit.plan(TASK, CLUSTER, batch_size=1 << 63), "batch_size must be a whole number from 1 to"),
    (lambda: pipefit.plan(TASK, CLUSTER, microbatches="4"), "microbatches must be an int or None, not '4'"),
    (lambda: pipefit.plan(TASK, CLUSTER, batch_size=4, progress=3), "progress must be a function or None, not 3 (int)"),
    (lambda: pipefit.plan(TASK, CLUSTER, target="gpu"), "target must be 'cpu' or 'cuda' or None, not 'gpu'"),
    (lambda: pipefit.plan(TASK, CLUSTER, precision="mixed-bfloat16"), "it belongs to the task, pipefit.Task(module"),
    (lambda: pipefit.plan(PLAN.profile, CLUSTER, microbatch=3), "not take the argument 'microbatch': did you mean"),
    (lambda: pipefit.plan_again("plan.json", CLUSTER), "old must be a Plan, not 'plan.json': pipefit.load reads one"),
    (lambda: pipefit.plan_again(PLAN, "dgx1-v100"), "cluster must be a Cluster, not 'dgx1-v100'"),
    (lambda: pipefit.fit(TASK, CLUSTER, microbatches={}), "microbatches must be an int or None, not {} (dict)"),
    (lambda: pipefit.profile(TASK, microbatch_size=1, progress=3), "progress must be a Callable, not 3"),
    (lambda: pipefit.simulate(PLAN, program=PLAN), "program must be a Program, not <Plan"),
    (lambda: pipefit.simulate(PLAN, steps=10**9), "steps must be a whole number from 1 to 1000, not 1000000000"),
    (lambda: pipefit.lower(PLAN, microbatches=0), "microbatches must be a whole number from 1 to"),
    (lambda: pipefit.certify(TASK, PLAN, steps=10**9), "steps must be a whole number from 1 to 1000, not 1000000000"),
    (lambda: pipefit.certify(TASK, PLAN, fold=0), "fold must be a bool, not 0 (int)"),
    (lambda: pipefit.certify(TASK, PLAN, chains=3), "chains must be a Chains, not 3 (int)"),
    (lambda: pipefit.certify_numbers(PLAN, TASK), "task must be a Task"),
    (lambda: pipefit.certify_numbers(TASK, "plan.json"), "plan must be a Plan"),
    (lambda: pipefit.train(str, "plan.json", steps=1), "plan must be a Plan"),
    (lambda: pipefit.load(None), "a file is named by a text or a path, not by None"),
    (lambda: pipefit.load("plan.json", 3), "a int is not a document"),
    (lambda: pipefit.save(PLAN, b"plan.json"), "a file is named by a text or a path, not by a bytes"),
    (lambda: pipefit.Training(batch_size=1 << 63, microbatches=1), "a batch of 9223372036854775808 samples exceeds"),
    (lambda: replace(TASK, precision="fp16"), "Task.precision must be 'float32' or "),
    (lambda: replace(TASK, granularity="block"), "Task.granularity must be 'blocks' or 'halves' or 'layers', "),
    (lambda: replace(TASK, groups={}), "Task.groups must be a function or None, not {} (dict)"),
    (lambda: replace(TASK, scheduler="cosine"), "Task.scheduler must be a function or None, not 'cosine'"),
    (lambda: replace(TASK, name=3), "Task.name must be a str, not 3 (int)"),
    (lambda: profiled(optimizer=lambda groups: None), "the optimizer of tiny is a function that returns None"),
    (lambda: trained(optimizer=lambda groups: SGD(nn.Linear(1, 1).parameters())), "of tiny works on other parameters"),
    (lambda: trained(optimizer=lambda groups: SGD(groups[:1])), "the optimizer of tiny works on other parameters"),
    (lambda: trained(module=METAL), "0.weight of tiny is on the meta device and holds no numbers"),
    (lambda: pipefit.certify_numbers(replace(TWO, module=METAL), ON_ONE), "0.weight of tiny is on the meta device"),
    (lambda: profiled(groups=lambda name, parameter: {name: 1 / 0}), "groups of the Task fails for 0.weight: "),
    (lambda: profiled(groups=lambda name, parameter: None), "not None as for 0.weight"),
    (lambda: profiled(groups=lambda name, parameter: {"params": []}), "not {'params': []} as for 0.weight"),
    (lambda: pipefit.Cluster.preset(3), "name must be a str, not 3 (int)"),
    (lambda: pipefit.Cluster.emulated(4), "emulated devices are pairs (count, bytes)"),
    (lambda: pipefit.Cluster.emulated((1 << 63, 1)), "the number of emulated devices must be a whole number"),
    (lambda: trained().load(None), "a file is named by a text or a path, not by None"),
    (lambda: trained().save(b"runs"), "a file is named by a text or a path, not by a bytes"),
    (lambda: trained().load_weights(3), "a file is named by a text or a path, not by a int"),
    (lambda: trained().load_state_dict(None), "tensors must be a Mapping, not None"),
    (lambda: trained().step((torch.ones(4, 8).long(), torch.ones(4, 4))), "tensor 0 of the inputs of this batch has"),
    (lambda: trained().step((torch.ones(4, 8), torch.ones(4, 4).bool())), "tensor 0 of the targets of this batch has"),
    (lambda: trained().evaluate((torch.ones(4, 8).to_sparse(), torch.ones(4, 4))), "sparse, nested, quantised, fake"),
    (lambda: trained().step((torch.ones(4, 8, device="meta"), torch.ones(4, 4))), "or on the meta device"),
    (lambda: pipefit.chain(3), "parts must be a Sequence, not 3 (int)"),
    (lambda: pipefit.chain([3]), "part 0 of a chain must be a module or a pair (name, module), not a int"),
    (lambda: pipefit.chain([("a", nn.ReLU()), ("a", nn.ReLU())]), "part 1 of a chain has the name 'a', which is"),
    (lambda: pipefit.chain([("1", nn.ReLU()), nn.ReLU()]), "part 1 of a chain has the name '1', which is"),
    (lambda: pipefit.chain([("a.b", nn.ReLU())]), "part 0 of a chain has a name that modules cannot have"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), CALLS, ids=[words[:40] for _, words in CALLS])
def test_the_argument_is_named(call: Callable[[], object], words: str) -> None:
    """The message states the expected and the given value."""
    with pytest.raises(UsageError) as caught:
        call()
    assert words in str(caught.value)


def test_a_cluster_may_be_named_in_a_call() -> None:
    """Calls accept the names and forms of `load_cluster`; a plan of a profile is the same either way."""
    asked = {"batch_size": PLAN.training.batch_size, "planner": "exact", "data": 1, "tensor": 1}
    one, two = (
        pipefit.plan(PLAN.profile, cluster, **asked)
        for cluster in ("emulated:2x1GiB", pipefit.load_cluster("emulated:2x1GiB"))
    )
    assert (one.stages, one.cluster) == (two.stages, two.cluster)
