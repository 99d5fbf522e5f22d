"""Whole-stage recomputation: less memory, the same numbers, and every peak known in advance."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gallery
from gallery import CHAINS
from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.lowering.passes.recomputation import RECOMPUTE, Recompute, recompute_decisions
from pipefit.models import build
from pipefit.planner import plan as make_plan
from pipefit.runtime import Trainer
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.training import Training
from pipefit.simulator import simulate
from support.gallery_samples import sampled, seeds
from support.known_profiles import profile
from support.random_trainings import accounts, plan_for, random_case
from support.small_tasks import plan_of, profile_of


def recomputed(plan: Plan, mode: Recompute) -> Plan:
    """Return the same plan with whole stages recomputed or kept."""
    training = plan.training
    return replace(
        plan,
        decisions=recompute_decisions(
            plan.stages,
            plan.profile.edges,
            mode,
            training.schedule,
            training.microbatches,
        ),
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", seeds(4, of=6))
def test_peaks_are_exact(seed: int) -> None:
    """Dry run, simulator and allocator agree to the byte on random models, splits and schedules."""
    rng = Random(1000 + seed)
    case = random_case(rng)
    case = replace(case, plan=recomputed(case.plan, rng.choice(["except_last", "except_one", "always"])))
    for account in accounts(case):
        assert account.dry_run_bytes == account.oracle_bytes == account.simulated_bytes


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", sampled(CHAINS, often=("strided", "encoder")))
def test_peaks_of_other_models(name: str) -> None:
    """Copies of batch-norm statistics, and copies of inputs for in-place layers, are counted exactly."""
    case = plan_for(gallery.task(name), Random(7))
    for account in accounts(replace(case, plan=recomputed(case.plan, "always"))):
        assert account.dry_run_bytes == account.oracle_bytes == account.simulated_bytes


EVERY = [(name, mode) for name in ("strided", "encoder", "vgg11", "gpt") for mode in RECOMPUTE[1:]]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "mode"), sampled(EVERY, often=[*EVERY[::4], ("gpt", "except_one")]))
def test_the_numbers_stay_the_same(name: str, mode: Recompute) -> None:
    """Losses, parameters and batch-norm statistics, with dropout, equal training without recomputation bit by
    bit.
    """
    task = gallery.task(name) if name in CHAINS else _zoo(name)
    case = plan_for(task, Random(3))
    plain, again = (Trainer(task, recomputed(case.plan, kept)) for kept in ("never", mode))
    for step in range(3):
        torch.manual_seed(step)
        batch = task.batch(case.plan.training.batch_size)
        assert plain.step(batch) == again.step(batch)
    state = again.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in plain.state_dict().items())


def _zoo(name: str) -> Task:
    if name == "gpt":
        return build("gpt", layers=2, hidden=32, heads=4, vocabulary=64, sequence=16, dropout=0.2)
    return build("vgg11", width=4, image_size=32, dropout=0.5)


@pytest.mark.gallery
def test_gpipe_with_recomputation_holds_inputs_instead_of_activations() -> None:
    """GPipe with recomputation keeps inputs instead of activations; planner and simulator agree on the bytes
    saved.
    """
    task = build("gpt", layers=4, hidden=64, heads=4, vocabulary=64, sequence=64)
    costs, cluster = profile_of(task, 2), Cluster.emulated((3, 1 << 30))
    peaks = {}
    for mode in RECOMPUTE:
        plan = make_plan(costs, cluster, batch_size=16, microbatches=8, schedule="gpipe", recompute=mode)
        assert plan.prediction is not None
        assert plan.prediction.peak_bytes == simulate(plan, steps=2).peak_bytes
        peaks[mode] = max(plan.prediction.peak_bytes)
    assert peaks["always"] <= peaks["except_one"] <= peaks["except_last"] < 0.5 * peaks["never"]


def test_recomputation_takes_time() -> None:
    """A recomputed step runs every forward twice, except one microbatch's for except_last and except_one."""
    costs = profile(build("mlp"), microbatch_size=2)
    seconds = {}
    training = Training(batch_size=8, microbatches=4, schedule="gpipe")
    stage = Stage(start=0, stop=len(costs.layers), grid=Grid.of(0))
    plan = Plan(profile=costs, cluster=Cluster.emulated((1, 1 << 30)), training=training, stages=(stage,))
    for mode in RECOMPUTE:
        seconds[mode] = simulate(recomputed(plan, mode)).step_seconds[0]
    forward = (seconds["always"] - seconds["never"]) / 4
    assert forward > 0
    assert seconds["except_last"] == pytest.approx(seconds["never"] + 3 * forward)
    assert seconds["except_one"] == pytest.approx(seconds["except_last"])


def test_inputs_that_a_layer_overwrites_unnoticed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that changes its own inputs cannot be recomputed and raises."""
    task = Task(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)),
        batch=lambda size: (torch.randn(size, 4), torch.randn(size, 4)),
        loss=F.mse_loss,
    )
    plan = plan_of(task, [1, 2], recompute="always")
    Trainer(task, plan).step(task.batch(4))  # copies are made where the profile knows
    trainer = Trainer(task, plan)
    storages = trainer.runners[1].stages[1].storages
    monkeypatch.setattr(
        storages, "costs", tuple(replace(cost, mutates_inputs=False) for cost in storages.costs)
    )
    with pytest.raises(UsageError, match="in place"):
        trainer.step(task.batch(4))
