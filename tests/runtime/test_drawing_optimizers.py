"""Optimizers that draw random numbers in their steps, such as Langevin samplers."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pipefit.capture import Task
from pipefit.runtime import Trainer
from pipefit.schema.profile import ModelProfile
from support.known_profiles import profile
from support.local_batches import batches, sliced_plan
from support.replicated_models import replicated

pytestmark = pytest.mark.usefixtures("one_thread")


class Langevin(torch.optim.SGD):
    """Gradient descent with noise."""

    def step(self, closure: Any = None) -> None:
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)


def trainer_of(degrees: list[int], schedule: str = "1f1b") -> Trainer:
    """Return a trainer of two stages of these degrees, with noise."""
    return Trainer(noisy(), sliced_plan(profiled(), [0, 3, 6], degrees, schedule=schedule))


def noisy() -> Task:
    """Return a task whose optimizer adds noise."""
    return replicated("dropped", optimizer=partial(Langevin, lr=0.1))


@cache
def profiled() -> ModelProfile:
    """Return the profile of the noisy task."""
    return profile(noisy(), microbatch_size=(4, 2))


def weights(trainer: Trainer, runner: int) -> list[torch.Tensor]:
    """Return copies of one device's parameters."""
    return [
        parameter.detach().clone()
        for stage in trainer.runners[runner].stages.values()
        for parameter in stage.parameters
    ]


def test_replicas_draw_alike() -> None:
    """Replicas draw the same numbers; otherwise they would diverge despite equal gradients."""
    trainer = trainer_of([2, 1])
    for one in batches(trainer.task, trainer.plan, 2):
        trainer.step(one)
    assert all(map(torch.equal, weights(trainer, 0), weights(trainer, 1)))


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_every_update_draws_numbers_of_its_own(schedule: str) -> None:
    """Draws differ between two steps, two stages and two microbatches under `pipedream`."""
    trainer = trainer_of([1, 1], schedule)
    drawn: list[float] = []
    original = torch.randn_like

    def noted(like: torch.Tensor) -> torch.Tensor:
        found = original(like)
        drawn.append(found.flatten()[0].item())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randn_like", noted)
        for one in batches(trainer.task, trainer.plan, 3):
            trainer.step(one)
        trainer.finish()
    assert len(drawn) == len(set(drawn)) >= 3 * 8


def test_after_a_checkpoint_updates_draw_as_if_training_had_not_stopped(tmp_path: Path) -> None:
    """After a checkpoint, updates draw as in uninterrupted training: draws depend on the seed and the
    update's place.
    """
    before, after = trainer_of([2, 1]), trainer_of([2, 1])
    first, second = batches(before.task, before.plan, 2)
    before.step(first)
    before.save(tmp_path, background=False)
    after.load(tmp_path)
    for trainer in (before, after):
        torch.manual_seed(id(trainer))
        trainer.step(second)
    assert all(map(torch.equal, before.state_dict().values(), after.state_dict().values()))
