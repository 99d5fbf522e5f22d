"""A stage that runs without its neighbours has the same peak as with them, and no side effects."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import nn

import gallery
from gallery import CHAINS
from pipefit.capture import Task
from pipefit.errors import OutOfMemory
from pipefit.measure.kernels import Kernels
from pipefit.profiler.training_runs.profilers import LoneStages
from pipefit.runtime import Trainer
from pipefit.runtime.hardware import Hardware
from pipefit.schema.plan import Plan
from support.gallery_samples import sampled, seeds
from support.random_trainings import plan_for, random_case
from support.small_tasks import plan_of, task_of


def in_company(task: Task, plan: Plan) -> list[int]:
    """Return the stages' peaks when all devices train."""
    trainer = Trainer(task, plan)
    for _ in range(2):
        trainer.step(task.batch(plan.training.batch_size))
    return [trainer.trace.peak_bytes[stage.device] for stage in plan.stages]


def alone(task: Task, plan: Plan, stage: int, lone: LoneStages | None = None) -> int:
    lone = lone or LoneStages(task, plan.training.microbatch_size)
    number = plan.stages[stage].device
    hardware = Hardware(plan)
    device = hardware.device(number)
    meter = hardware.meter(number, device, Kernels(torch.get_num_threads()))
    assert meter is not None
    return lone.train(plan, stage, device=device, meter=meter)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", seeds(3, of=6))
def test_every_stage_of_a_random_plan_needs_as_much_alone(seed: int) -> None:
    """Every stage of a random plan, for zoo and test models and any schedule, has the same peak alone, to the
    byte.
    """
    rng = Random(seed)
    name = rng.choice(sorted(CHAINS))
    case = (
        random_case(rng, model=rng.choice(["mlp", "gpt", "bert"]))
        if seed % 2
        else plan_for(gallery.task(name), rng, name=name)
    )
    lone = LoneStages(case.task, case.plan.training.microbatch_size)
    peaks = [alone(case.task, case.plan, stage, lone) for stage in range(len(case.plan.stages))]
    assert peaks == in_company(case.task, case.plan)


@pytest.mark.gallery
@pytest.mark.parametrize(
    "name", sampled(["frozen", "masked", "tied", "two losses", "unet"], often=["two losses"])
)
def test_a_traced_model_is_no_exception(name: str) -> None:
    """Traced models with skip connections, masks, shared parameters and integer values give the same peaks
    too.
    """
    rng = Random(name)
    case = plan_for(gallery.task(name), rng, name=name)
    peaks = [alone(case.task, case.plan, stage) for stage in range(len(case.plan.stages))]
    assert peaks == in_company(case.task, case.plan)


def test_random_generators_and_the_model_stay_as_they_were() -> None:
    """The caller's random generators keep their state; an existing module ends without gradients."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 4))
    task = task_of(lambda: [module])
    plan = plan_of(Task(module, batch=task.batch, loss=task.loss, optimizer=task.optimizer), (1, 2))
    state = torch.get_rng_state()
    alone(Task(module, batch=task.batch, loss=task.loss, optimizer=task.optimizer), plan, 1)
    assert torch.equal(state, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_cap_is_kept() -> None:
    """A device with one byte less than the stage needs runs out of memory, by that byte."""
    task = task_of(lambda: [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)])
    needed = alone(task, plan_of(task, (1, 1, 1)), 1)
    assert alone(task, plan_of(task, (1, 1, 1), memory_bytes=needed), 1) == needed
    with pytest.raises(OutOfMemory, match="1 B over"):
        alone(task, plan_of(task, (1, 1, 1), memory_bytes=needed - 1), 1)
