"""Training resumed from a checkpoint, on a CUDA device and on the CPU. Skipped without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.runtime import Trainer
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from support.known_profiles import profile
from support.separate_process import elsewhere
from support.small_tasks import batch_of, plan_of, task_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "fused": partial(torch.optim.AdamW, fused=True),
    "capturable": partial(torch.optim.AdamW, capturable=True),
    "nadam": torch.optim.NAdam,  # keeps two numbers on the host
    "asgd": torch.optim.ASGD,  # and this one three on the device
}


class Scaled(nn.Module):
    """A product with a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.scale = nn.Linear(8, 8), nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x) * self.scale


def task_with(optimizer: str) -> Task:
    """Return a task with random draws."""
    return task_of(lambda: [Scaled(), nn.Dropout(0.3), nn.Linear(8, 4)], optimizer=OPTIMIZERS[optimizer])


def found(optimizer: str) -> ModelProfile:
    """Return its layers' profile on a GPU."""
    return profile(task_with(optimizer), microbatch_size=2, target="cuda")


def trained_by(optimizer: str) -> tuple[Task, Plan]:
    """Return a task that trains with this optimizer, and its plan for one GPU."""
    task = task_with(optimizer)
    plan = plan_of(task, [3], profiled=elsewhere(found, optimizer))
    return task, replace(plan, cluster=replace(plan.cluster, backend="cuda"))


def devices(trainer: Trainer) -> dict[str, str]:
    """Return the device of every tensor of the optimizer."""
    return {name: tensor.device.type for name, tensor in trainer.state_dict(optimizer=True).items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_as_if_it_had_not_stopped(optimizer: str, tmp_path: Path) -> None:
    """Training resumes bit by bit, with the optimizer's tensors on their devices; the CPU can resume from it,
    and back.
    """
    task, plan = trained_by(optimizer)
    before = Trainer(task, plan, cap=False)
    for step in range(2):
        before.step(batch_of(task, plan, step))
    before.save(tmp_path)
    before.finish()
    after = Trainer(task, plan, cap=False, seed=9)
    assert after.load(tmp_path) == 2
    assert devices(after) == devices(before)
    for step in range(2, 4):
        assert after.step(batch_of(task, plan, step)) == before.step(batch_of(task, plan, step))
    taken, had = after.state_dict(optimizer=True), before.state_dict(optimizer=True)
    assert all(torch.equal(taken[name], tensor) for name, tensor in had.items())

    if optimizer == "capturable":  # which the CPU's cannot be
        return
    here = Trainer(task, replace(plan, cluster=replace(plan.cluster, backend="cpu")))
    here.load(tmp_path)
    here.step(batch_of(task, plan, 2))
    here.save(tmp_path / "cpu")
    here.finish()
    again = Trainer(task, plan, cap=False)
    assert again.load(tmp_path / "cpu") == 3
    assert devices(again) == devices(before)
    again.step(batch_of(task, plan, 3))


def test_weights_alone_come_from_a_checkpoint_of_a_gpu(tmp_path: Path) -> None:
    """Loading weights alone from a GPU's checkpoint gives parameters and buffers on the device."""
    task, plan = trained_by("fused")
    before = Trainer(task, plan, cap=False)
    before.step(batch_of(task, plan))
    weights = {name: tensor.cpu() for name, tensor in before.state_dict().items()}
    after = Trainer(task, plan, cap=False, seed=9)
    after.load_state_dict(weights)
    assert all(torch.equal(tensor, before.state_dict()[name]) for name, tensor in after.state_dict().items())
