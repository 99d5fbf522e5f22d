"""Dry runs of one replica for all that do the same."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

import pytest

from pipefit.allocator import AllocatorSettings
from pipefit.grids import Grid, Stage
from pipefit.plans import Plan
from pipefit.profiler import profile
from pipefit.profiles import ModelProfile
from pipefit.runtime import certify, dry_run
from pipefit.runtime.representatives import representatives
from pipefit.schedule import step_programs
from replicated import replicated
from slices import sliced_plan
from wide import on_gpus, wide

SIZES = (12, 6, 4)


@pytest.fixture(scope="module")
def found() -> ModelProfile:
    """What the layers of `wide` cost on a GPU, for microbatches and their slices."""
    return profile(wide(), microbatch_size=SIZES, target="cuda")


@pytest.fixture(scope="module")
def normed() -> ModelProfile:
    """What the layers of a model with batch norms cost."""
    return profile(replicated("normed"), microbatch_size=SIZES)


def run_devices(plan: Plan) -> set[int]:
    """The devices that a dry run of a plan has to run."""
    return set(representatives(plan, step_programs(plan), ()).values())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("degree", [2, 3])
def test_one_replica_tells_what_all_allocate_and_reserve(found: ModelProfile, degree: int, seed: int) -> None:
    """Every sample of every device, and what its allocator reserves, are those of a run of all devices, dealt out at
    random, under either schedule.
    """
    rng = Random(seed)
    edges = [0, rng.randint(1, 5), 6]
    schedule = rng.choice(["gpipe", "1f1b"])
    plan = on_gpus(sliced_plan(found, edges, [degree, degree], microbatches=3, schedule=schedule, rng=rng))
    with mock.patch.object(dry_run._DryRun, "_whole") as again:
        told = certify(wide(), plan, allocator=AllocatorSettings())
    assert not again.called
    assert len(run_devices(plan)) == 2
    assert told == certify(wide(), plan, allocator=AllocatorSettings(), fold=False)


def test_one_replica_tells_what_all_hold_on_the_cpu(normed: ModelProfile) -> None:
    """Every sample, where layers are folded too."""
    task, plan = replicated("normed"), sliced_plan(normed, [0, 3, 6], [2, 2])
    assert len(run_devices(plan)) == 2
    assert certify(task, plan) == certify(task, plan, fold=False)


@pytest.mark.parametrize(
    ("degrees", "settings"),
    [([2, 1], {}), ([2, 2], {"clip_norm": 1.0}), ([2, 2], {"shard": ["optimizer", "none"]})],
)
def test_replicas_that_may_differ_are_all_run(normed: ModelProfile, degrees: list[int], settings: Any) -> None:
    """Neighbours of another degree, an agreement that one replica reports to, and state that they divide."""
    plan = sliced_plan(normed, [0, 3, 6], degrees, **settings)
    assert run_devices(plan) == set(plan.workers)


def test_the_shards_of_the_first_replica_are_run(normed: ModelProfile) -> None:
    """Two replicas of two shards each: the two devices of the first."""
    grid = Grid(devices=(3, 0, 2, 1), data=2, tensor=2)
    plan = sliced_plan(normed, [0, 3, 6], [2, 2])
    shards = replace(normed, measurements=tuple(replace(one, tensor=t) for one in normed.measurements for t in (1, 2)))
    divided = replace(plan, profile=shards, stages=(Stage(start=0, stop=6, grid=grid),))
    assert run_devices(divided) == {3, 0}
