"""Tensors that an optimizer makes at construction count on its device, in its state or not; values that it
reads do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pipefit.errors import PipefitWarning
from pipefit.runtime import Trainer, certify
from pipefit.simulator import simulate
from support.known_profiles import profile
from support.small_tasks import batch_of, plan_of, task_of


class Lookahead(torch.optim.SGD):
    """Lookahead: after every step, weights go half of the way back to slow weights (Zhang et al., 2019)."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, lr=lr)
        self.slow = [
            [parameter.detach().clone() for parameter in group["params"]] for group in self.param_groups
        ]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        with torch.no_grad():
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for parameter, old in zip(group["params"], slow, strict=True):
                    old.lerp_(parameter, 0.5)
                    parameter.copy_(old)


def layers() -> list[nn.Module]:
    """Return two trained layers, of 32 and 64 weights."""
    return [nn.Linear(8, 4, bias=False), nn.Tanh(), nn.Linear(4, 16, bias=False)]


def test_what_an_optimizer_makes_at_once_is_counted() -> None:
    """Simulator, dry run and meter count slow weights from the beginning: 4 bytes a weight, in addition to
    SGD's memory.
    """
    task = task_of(layers, outputs=16, optimizer=partial(Lookahead, lr=0.1))
    plan = plan_of(task, [2, 1])
    trainer = Trainer(task, plan)
    assert [sum(one.nbytes for one in stage.updates.made) for stage in trainer.stages] == [128, 256]
    trainer.step(batch_of(task, plan))
    peaks = [
        [device.step_peak_bytes(0) for device in trace.devices]
        for trace in (trainer.trace, certify(task, plan, steps=1), simulate(plan, steps=1))
    ]
    assert peaks[0] == peaks[1] == peaks[2]
    plain = simulate(plan_of(task_of(layers, outputs=16), [2, 1]), steps=1)
    assert all(
        ours >= device.step_peak_bytes(0) + slow
        for ours, device, slow in zip(peaks[0], plain.devices, (128, 256), strict=True)
    )


class Clipped(torch.optim.SGD):
    """An optimizer that scales gradients of a large norm down, in new memory."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            norm = parameter.grad.norm().item()
            if norm > self.defaults["lr"] + 10:
                parameter.grad = parameter.grad * (10 / norm)
        super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, torch.optim.ASGD])
@pytest.mark.filterwarnings("error::pipefit.errors.PipefitWarning")
def test_numbers_that_an_update_reads_are_no_memory(kind: type[torch.optim.Optimizer]) -> None:
    """Step counts, rates and norms that an update reads need no memory and give no warning; bytes are those
    of training.
    """
    task = task_of(layers, outputs=16, optimizer=partial(kind, lr=0.1))
    plan = plan_of(task, [2, 1])
    trainer = Trainer(task, plan)
    for step in range(2):
        trainer.step(batch_of(task, plan, step))
    assert trainer.trace.peak_bytes == certify(task, plan).peak_bytes == simulate(plan).peak_bytes
    assert plan.profile.kernels.unknown == ()


def test_an_update_whose_memory_depends_on_what_it_reads_is_named() -> None:
    """An update whose memory depends on values is named: clipping by a gradient's norm allocates only for a
    large one.
    """
    task = task_of(layers, outputs=16, optimizer=partial(Clipped, lr=0.1))
    found = profile(task, microbatch_size=2)
    assert [kernel.operation for kernel in found.kernels.unknown] == ["aten._local_scalar_dense.default"]
    with pytest.warns(PipefitWarning, match="_local_scalar_dense"):
        certify(task, plan_of(task, [2, 1], profiled=found))
