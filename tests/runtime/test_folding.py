"""Dry runs of a few microbatches predict the memory of all."""

from __future__ import annotations

import itertools
from random import Random

import pytest
import torch
from torch import nn

from pipefit.capture import Task
from pipefit.lowering import SCHEDULES, lower
from pipefit.runtime import certify
from pipefit.runtime.dry_run.microbatches import Folding, shortened
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Microbatches, Run, What
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from support.gallery_samples import seeds
from support.known_profiles import profile
from support.small_tasks import task_of


@pytest.fixture(scope="module")
def task() -> Task:
    """Return layers with buffers, in-place operations, dropout and unequal sizes."""
    return task_of(
        lambda: (
            nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(16, 4)
        ),
        optimizer=torch.optim.AdamW,
    )  # fmt: skip


@pytest.fixture(scope="module")
def found(task: Task) -> ModelProfile:
    """Return their profile."""
    return profile(task, microbatch_size=2)


def drawn(found: ModelProfile, seed: int) -> Plan:
    """Return any split over up to three devices, any schedule, up to nine microbatches, and any recomputed
    run.
    """
    rng = Random(seed)
    layers, count, number = len(found.layers), rng.randint(1, 3), rng.randint(1, 9)
    cuts = [0, *sorted(rng.sample(range(1, layers), count - 1)), layers]
    stages = tuple(
        Stage(start=start, stop=stop, grid=Grid.of(device))
        for device, (start, stop) in enumerate(itertools.pairwise(cuts))
    )
    decisions = []
    for stage, place in enumerate(stages):
        start = rng.randint(place.start, place.stop - 1)
        run = Run(start=start, stop=rng.randint(start + 1, place.stop))
        share = Microbatches(rng.randint(1, 3), 3, rng.randint(0, 2))
        ahead = rng.randint(0, 2)
        decision = Decision(stage=stage, subject=run, what=What.RECOMPUTE, microbatches=share, ahead=ahead)
        decisions += [decision] * (rng.random() < 0.6)
    return Plan(
        profile=found,
        cluster=Cluster.emulated((3, 1 << 30)),
        training=Training(batch_size=2 * number, microbatches=number, schedule=rng.choice(sorted(SCHEDULES))),
        stages=stages,
        decisions=tuple(decisions),
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", seeds(6, of=12))
def test_a_folded_dry_run_tells_what_a_whole_one_does(task: Task, found: ModelProfile, seed: int) -> None:
    """A folded dry run has the same samples of every action, by category, as a whole one, in three steps."""
    plan = drawn(found, seed)
    assert certify(task, plan, steps=3) == certify(task, plan, steps=3, fold=False)


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_the_microbatches_that_are_run_do_not_grow_with_those_of_a_step(
    found: ModelProfile, schedule: str
) -> None:
    """A thousand microbatches execute as few of them as fifty."""
    stages = tuple(Stage(start=n, stop=n + 2, grid=Grid.of(n // 2)) for n in range(0, 6, 2))
    cluster, counts = Cluster.emulated((3, 1 << 30)), []
    for number in (50, 1000):
        training = Training(batch_size=2 * number, microbatches=number, schedule=schedule)
        program = lower(Plan(profile=found, cluster=cluster, training=training, stages=stages))
        folding = Folding.of(program)
        assert folding.later <= folding.first
        assert {a.microbatch for d in shortened(program, folding.first).actions for a in d} == {
            None,
            *folding.first,
        }
        counts.append(len(folding.first))
    assert counts[0] == counts[1] <= 5
