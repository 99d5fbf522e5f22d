"""Folded dry runs of plans whose blocks are recomputed, moved and updated separately."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.capture.sample import sample
from pipefit.fake_cuda.chain import fake_chain
from pipefit.fake_cuda.target import FakeTarget
from pipefit.lowering import lower
from pipefit.lowering.passes.recomputation import Recompute, recompute_decisions
from pipefit.memory import AllocatorSettings
from pipefit.models import build
from pipefit.planner import PlanOptions, Question
from pipefit.planner.common_plans import AWAY, UPDATED, moved
from pipefit.planner.driver import solved
from pipefit.planner.lean import ALL_AWAY, STATE_AWAY, at_hosts
from pipefit.runtime import certify
from pipefit.runtime.dry_run.certify import Rehearsal
from pipefit.runtime.dry_run.layers import Shortened
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import SHARDINGS, Grid, Sharding, Stage
from pipefit.schema.json_io import load_cluster
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.trace import Trace
from pipefit.schema.training import Precision, Training
from support.gallery_samples import sampled
from support.known_profiles import profile


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
    """Four of six recomputed blocks are run, and every sample equals that of the whole dry run."""
    task = gpt(6)
    plan = recomputed(profile(task, microbatch_size=2, target="cuda"), microbatches)
    assert executed(task, plan) == len(plan.profile.layers) - 2
    assert certify(task, plan) == certify(task, plan, fold=False)


@pytest.mark.sample(1)
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


# ---------------------------------------------------------------- replicas that shard their state


def unfolded(task: Task, plan: Plan, **options: Any) -> tuple[Trace, int]:
    """Return a folded dry run, which is not made again, and the number of layers that it executes."""
    run, executed = Rehearsal._run, list[int]()

    def recorded(dry: Rehearsal, fake: FakeTarget, short: Shortened, *others: Any) -> Any:
        executed.append(len(short.kept))
        return run(dry, fake, short, *others)

    with mock.patch.object(Rehearsal, "_run", recorded):
        trace = certify(task, plan, **options)
    (count,) = executed
    return trace, count


def sharded(task: Task, shard: Sharding, data: int = 3, **options: Any) -> Plan:
    """Place all layers on replicas that shard their state; the recomputation of every block is optional."""
    recompute, buckets = options.pop("recompute", "always"), options.pop("buckets", 1)
    microbatches = options.pop("microbatches", 2)
    found = profile(task, microbatch_size=(data, 1), target="cuda")
    grid = Grid(devices=tuple(range(data)), data=data, shard=shard, buckets=buckets)
    stages = (Stage(start=0, stop=len(found.layers), grid=grid),)
    training = Training(
        batch_size=data * microbatches,
        microbatches=microbatches,
        precision=found.assumptions.precision,
        **options,
    )
    decisions = recompute_decisions(stages, found.edges, recompute, "1f1b", microbatches)
    return Plan(
        profile=found, cluster=load_cluster("hgx-h100"), training=training, stages=stages, decisions=decisions
    )


CASES = list(
    product(
        SHARDINGS[1:],
        ("float32", "mixed-bfloat16", "master-float16"),
        ("always", "never"),
        (None, 1.0),
        (None, AllocatorSettings()),
    )
)


@pytest.mark.parametrize(
    ("shard", "precision", "recompute", "clip", "allocator"),
    sampled(
        CASES,
        often=[("gradients", "master-float16", "never", 1.0, AllocatorSettings())],
    ),
)
def test_blocks_of_replicas_that_shard_state_are_folded(
    shard: Sharding, precision: Precision, recompute: Recompute, clip: float | None, allocator: Any
) -> None:
    """Four of six blocks stand for all on every ZeRO rank, although ranks own different numbers of them, and
    all samples and reserved bytes equal those of a dry run of all layers and devices.
    """
    task = replace(gpt(6), precision=precision)
    plan = sharded(task, shard, recompute=recompute, clip_norm=clip)
    trace, count = unfolded(task, plan, allocator=allocator)
    assert count == len(plan.profile.layers) - 2
    assert trace == certify(task, plan, fold=False, allocator=allocator)


@pytest.mark.gallery
@pytest.mark.parametrize(("data", "buckets"), sampled([(2, 1), (2, 3), (4, 11)], often=[(2, 3)]))
def test_ranks_with_buckets_are_folded(data: int, buckets: int) -> None:
    """Parameters that come bucket by bucket, with several blocks or with one, equal those of all layers."""
    task, allocator = replace(gpt(9), precision="mixed-bfloat16"), AllocatorSettings()
    plan = sharded(task, "parameters", data, buckets=buckets, microbatches=1)
    trace, _ = unfolded(task, plan, allocator=allocator)
    assert trace == certify(task, plan, fold=False, allocator=allocator)


@pytest.mark.gallery
@pytest.mark.parametrize("recompute", ["always", "never"])
def test_reserved_bytes_of_one_device_are_folded(recompute: Recompute) -> None:
    """Allocations of the executed blocks are repeated for the others, in the order of the program."""
    task, allocator = gpt(8), AllocatorSettings()
    plan = sharded(task, "none", 1, recompute=recompute)
    trace, count = unfolded(task, plan, allocator=allocator)
    assert count == len(plan.profile.layers) - 4
    assert trace == certify(task, plan, fold=False, allocator=allocator)


MOVES = [("optimizer", STATE_AWAY), *product(("gradients", "parameters"), (STATE_AWAY, UPDATED))]


@pytest.mark.gallery
@pytest.mark.parametrize(
    ("shard", "moves", "precision"),
    sampled(
        [
            (*one, precision)
            for one in (*MOVES, ("parameters", AWAY))
            for precision in ("float32", "mixed-bfloat16")
        ],
        often=[("parameters", UPDATED, "mixed-bfloat16")],
    ),
)
def test_blocks_of_replicas_that_move_sharded_state_are_folded(
    shard: Sharding, moves: Any, precision: Precision
) -> None:
    """Blocks whose owners keep their state at hosts, or have hosts update it, stand for each other."""
    task, allocator = replace(gpt(7), precision=precision), AllocatorSettings()
    still = sharded(task, shard, 2, buckets=9)
    blocks = pairwise(still.profile.edges)
    plan = replace(still, decisions=(*moved(0, blocks, moves, ahead=0), *still.decisions))
    trace, count = unfolded(task, plan, allocator=allocator)
    assert count < len(plan.profile.layers)
    assert trace == certify(task, plan, fold=False, allocator=allocator)


def tied() -> Task:
    """Return a model of equal blocks whose first and last layers share a weight."""

    def build_tied() -> nn.Sequential:
        table = nn.Embedding(32, 16)
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(9)]
        head = nn.Linear(16, 32, bias=False)
        head.weight = table.weight
        return nn.Sequential(table, *blocks, head)

    return Task(
        build_tied,
        batch=lambda size: (torch.randint(32, (size, 4)), torch.randint(32, (size, 4))),
        loss=lambda out, target: F.cross_entropy(out.flatten(0, 1), target.flatten()),
        optimizer=torch.optim.Adam,
        name="tied",
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("shard", SHARDINGS)
def test_blocks_between_layers_that_share_a_weight_are_folded(shard: Sharding) -> None:
    """Blocks between layers that share a weight are folded, and the sharing layers are not."""
    task, allocator = tied(), AllocatorSettings()
    plan = sharded(task, shard, recompute="never", clip_norm=0.5)
    trace, count = unfolded(task, plan, allocator=allocator)
    assert count < len(plan.profile.layers)
    assert trace == certify(task, plan, fold=False, allocator=allocator)


class Joined(torch.optim.SGD):
    """An optimizer whose step makes a tensor for all parameters."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        flat = torch.cat([p.grad.flatten() for p in parameters])
        return super().step() if len(flat) else None


def test_updates_that_join_blocks_are_run_with_all_layers() -> None:
    """If an update works on all blocks at once, the dry run notices and runs all layers."""
    task = replace(gpt(6), optimizer=partial(Joined, lr=0.1))
    plan = sharded(task, "optimizer", 2, recompute="never")
    allocator = AllocatorSettings()
    assert certify(task, plan, allocator=allocator) == certify(task, plan, fold=False, allocator=allocator)
