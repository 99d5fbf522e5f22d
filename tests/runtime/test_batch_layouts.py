"""Batches in a script's memory layouts: parts of longer sequences, time first, channels last."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.runtime import Trainer, certify
from pipefit.schema.trace import Trace
from support.known_profiles import profile
from support.small_tasks import plan_of, profile_of

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "one behind the other": lambda x: x,
    "the part of a longer one": lambda x: F.pad(x, (0, 0, 0, 0, 0, 1))[:, :-1],
    "samples inside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "the same for all": lambda x: x[:1].expand(x.shape),
}


class Pictures(nn.Module):
    """Two convolutions, traced."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


def task_of(layout: Callable[[Tensor], Tensor]) -> Task:
    """Return a task with this layout of inputs and targets; the numbers are the same in every layout."""

    def batch(size: int) -> tuple[Tensor, Tensor]:
        first, wanted = torch.randn(1, 3, 8, 8), torch.randn(1, 4, 4, 4)
        return layout(first.repeat(size, 1, 1, 1)), layout(wanted.repeat(size, 1, 1, 1))

    return Task(Pictures, batch=batch, loss=F.mse_loss, optimizer=torch.optim.SGD)


def peaks(trace: Trace) -> list[list[int]]:
    """Return the peaks of two steps on each device."""
    return [[device.step_peak_bytes(step) for step in range(2)] for device in trace.devices]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_it_is_the_same_model_for_one_sample_and_for_several(layout: Callable[[Tensor], Tensor]) -> None:
    """A local batch of one sample is contiguous and one of several is not; both give the same model."""
    task = task_of(layout)
    made = profile(task, microbatch_size=(4, 1))
    assert made.fingerprint == profile(task, microbatch_size=1).fingerprint


@pytest.mark.sample(1)
@pytest.mark.parametrize("planned", ["one behind the other", "samples inside", "channels last"])
def test_a_batch_takes_what_its_plan_says_however_it_lies(planned: str) -> None:
    """A loop may pass batches in other layouts than the plan's: bytes and losses are the plan's."""
    task = task_of(LAYOUTS[planned])
    plan = plan_of(task, [1, len(profile_of(task, 2).layers) - 1])
    dry, losses = peaks(certify(task, plan, steps=2)), set[float]()
    for layout in LAYOUTS.values():
        torch.manual_seed(0)
        trainer = Trainer(task, plan)
        losses.add(sum(trainer.step(task_of(layout).batch(plan.training.batch_size)) for _ in range(2)))
        assert peaks(trainer.trace) == dry
    assert len(losses) == 1
