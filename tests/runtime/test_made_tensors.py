"""What an optimizer makes as it is made counts on its device, in its state or not."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from pipefit.runtime import Trainer, certify
from pipefit.simulator import simulate
from tiny import batch_of, plan_of, task_of


class Lookahead(torch.optim.SGD):
    """Goes half of the way back to slow weights after every step (Zhang et al., 2019)."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, lr=lr)
        self.slow = [[parameter.detach().clone() for parameter in group["params"]] for group in self.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        with torch.no_grad():
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for parameter, old in zip(group["params"], slow, strict=True):
                    old.lerp_(parameter, 0.5)
                    parameter.copy_(old)


def layers() -> list[nn.Module]:
    """Two layers that are trained, of 32 and 64 weights."""
    return [nn.Linear(8, 4, bias=False), nn.Tanh(), nn.Linear(4, 16, bias=False)]


def test_what_an_optimizer_makes_at_once_is_counted() -> None:
    """Simulator, dry run and meter count slow weights from the beginning: 4 bytes a weight, beside what SGD takes."""
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
