"""Stages on several devices under asynchronous schedules: numbers of a replay in local batches, predicted
bytes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch

from pipefit.lowering import ENDLESS, distinct_steps
from pipefit.lowering.asynchronous import period
from pipefit.runtime import Trainer, certify, train
from pipefit.runtime.dry_run import certify as dry_run
from pipefit.schema.grids import SHARDINGS
from pipefit.schema.plan import Plan
from support.asynchronous_replay import replayed
from support.asynchronous_training import batches_of
from support.gallery_samples import sampled
from support.local_batches import equal, parameters
from support.memory_samples import samples
from support.random_decisions import compacted
from support.sharded_stages import GRIDS, MODELS, divided, grid_plan
from support.small_tasks import in_one_process
from support.step_peaks import step_peaks

MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

pytestmark = pytest.mark.usefixtures("one_thread")


def random_plan(name: str, schedule: str, rng: Random) -> Plan:
    """Return up to three stages of random grids on at most eight devices, with random sharding, or none, in
    some buckets; half of the plans have random decisions.
    """
    count = rng.choice([2, 3] if name != "tied" else [1, 2])
    degrees = [(8, 2)]
    while sum(data * tensor for data, tensor in degrees) > 8 or max(degrees) == (1, 1):
        degrees = [rng.choice(GRIDS) for _ in range(count)]
    cuts = sorted(rng.sample(range(1, 6), count - 1)) if name != "tied" else [5][: count - 1]
    least = count if schedule == "pipedream-2bw" else 1
    plan = grid_plan(
        name, [0, *cuts, 6], degrees, microbatches=rng.randint(least, 4), schedule=schedule, rng=rng
    )
    stages = tuple(
        replace(
            stage, grid=replace(stage.grid, shard=rng.choice(SHARDINGS[:3]), buckets=rng.choice([1, 2, 3]))
        )
        if stage.grid.data > 1
        else stage
        for stage in plan.stages
    )
    plan = replace(plan, stages=stages)
    return compacted(plan, rng) if rng.random() < 0.5 else plan


def assert_replayed(name: str, schedule: str, seed: int) -> None:
    """Check a random plan's numbers against the replay, with random drains and sometimes a smaller batch or
    last microbatch.
    """
    rng = Random(f"{name} {schedule} {seed}")
    task, plan = divided(name, optimizer=MOMENTUM), random_plan(name, schedule, rng)
    size, count, turn = plan.training.microbatch_size, plan.training.microbatches, period(plan)
    least = len(plan.stages) if schedule == "pipedream-2bw" else 1
    sizes = [
        size * rng.choice([n for n in range(least, count + 1) if n % turn == 0])
        for _ in range(rng.randint(2, 5))
    ]
    shorter = {step for step in range(len(sizes)) if not any(d.what == "offload" for d in plan.decisions)}
    sizes = [
        batch - 6 if step in shorter and rng.random() < 0.4 else batch for step, batch in enumerate(sizes)
    ]
    sizes = [
        batch if all(batch % 12 % data == 0 for data, _ in degrees_of(plan)) else batch + 6 for batch in sizes
    ]
    drains = [step for step in range(len(sizes)) if rng.random() < 0.2 or step == len(sizes) - 1]
    given = batches_of(task, sizes)
    trainer, losses = Trainer(task, plan), list[float]()
    for step, batch in enumerate(given):
        losses.append(trainer.step(batch))
        losses += trainer.finish() if step in drains else []
    plain = replayed(task, plan, given, seed=0, drains=drains)
    means, at = list[float](), 0
    for batch in sizes:
        parts = [min(size, batch - begin) for begin in range(0, batch, size)]
        means.append(sum(part * loss for part, loss in zip(parts, plain.losses[at:], strict=False)) / batch)
        at += len(parts)
    assert [loss for loss in losses if loss == loss] == pytest.approx(means, rel=1e-6)
    assert equal(parameters(trainer.state_dict()), parameters(plain.state), relative=1e-9)


def degrees_of(plan: Plan) -> list[tuple[int, int]]:
    """Return the replicas and shards of every stage."""
    return [(stage.grid.data, stage.grid.tensor) for stage in plan.stages]


def assert_foretold(name: str, schedule: str, seed: int) -> None:
    """Check the peaks of every device in every distinct step, to the byte, in all accounts."""
    rng = Random(f"{name} {schedule} {seed}")
    task, plan = divided(name, optimizer=MOMENTUM), random_plan(name, schedule, rng)
    steps = distinct_steps(plan) + 1
    found = step_peaks(task, plan, steps=steps)
    assert found.dry == found.metered
    if not any(decision.place is not None for decision in plan.decisions):  # lent memory is in no event
        # Shards run on threads, whose events are not seen
        alone = [
            n
            for n, device in enumerate(plan.workers)
            if plan.stages[plan.stages_of(device)[0]].grid.tensor == 1
        ]
        assert [found.metered[n] for n in alone] == [found.allocated[n] for n in alone]
    if name != "tied":
        assert found.dry == found.simulated


def assert_folded(name: str, schedule: str, seed: int) -> None:
    """Check that a dry run of a random plan's representatives has the samples of one of all devices."""
    rng = Random(f"{name} {schedule} {seed}")
    task, plan = divided(name, optimizer=MOMENTUM), random_plan(name, schedule, rng)
    steps = distinct_steps(plan) + 1
    assert samples(certify(task, plan, steps=steps)) == samples(certify(task, plan, steps=steps, fold=False))


EVERY = [(name, schedule) for name in MODELS for schedule in ENDLESS]


@pytest.mark.parametrize(("name", "schedule"), sampled(EVERY, often=[("dropped", "pipedream-2bw")]))
def test_numbers_and_bytes_are_as_told(name: str, schedule: str) -> None:
    """Losses and parameters are those of the replay, and all accounts agree on the bytes of every step."""
    assert_replayed(name, schedule, 0)
    assert_foretold(name, schedule, 0)


@pytest.mark.gallery
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize(("name", "schedule"), EVERY)
def test_more_plans_are_as_told(name: str, schedule: str, seed: int) -> None:
    """Many more random plans have exact numbers and bytes."""
    assert_replayed(name, schedule, seed)
    assert_foretold(name, schedule, seed)
    assert_folded(name, schedule, seed)


@pytest.mark.gallery
@pytest.mark.parametrize("schedule", sampled(ENDLESS, often=["pipedream-2bw"]))
def test_workers_do_what_one_process_does(schedule: str) -> None:
    """Workers have one process's losses and peaks, for replicas that shard gradients in buckets, all-reduced
    in the next step, before two shards.
    """
    plan = grid_plan("dropped", [0, 4, 6], [(2, 1), (1, 2)], schedule=schedule)
    grid = replace(plan.stages[0].grid, shard="gradients", buckets=2)
    plan = replace(plan, stages=(replace(plan.stages[0], grid=grid), plan.stages[1]))
    task = partial(divided, "dropped", optimizer=MOMENTUM)
    trainer, losses = in_one_process(task(), plan, 3)
    found, trace = train(task, plan, steps=3)
    assert found == pytest.approx([*losses[trainer.late :], *trainer.finish()], rel=1e-12)
    assert trace.peak_bytes == trainer.trace.peak_bytes == certify(task(), plan).peak_bytes


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ENDLESS)
def test_replicas_that_do_the_same_are_run_dry_once(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all stages have the same number of replicas, the first ones are run dry for all, with equal samples."""
    plan = grid_plan("dropped", [0, 4, 6], [(2, 1), (2, 1)], schedule=schedule, microbatches=3)
    task, ran = divided("dropped", optimizer=MOMENTUM), list[int]()
    assembled = dry_run.assemble

    def counted(site: Any, number: int, **how: Any) -> Any:
        ran.append(number)
        return assembled(site, number, **how)

    monkeypatch.setattr(dry_run, "assemble", counted)
    folded = certify(task, plan)
    assert ran == [0, 2]
    assert samples(folded) == samples(certify(task, plan, fold=False))
    assert ran == [0, 2, 0, 1, 2, 3]
