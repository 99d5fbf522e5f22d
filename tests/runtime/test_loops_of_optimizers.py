"""Hand-written optimizers: loops over parameters, whose variables hold tensors of the previous one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from pipefit.capture import Task
from support.small_tasks import plan_of, task_of
from support.step_peaks import step_peaks, too_low


class Orthogonal(Optimizer):
    """Muon in its textbook form: momentum, with matrices replaced by the nearest orthogonal ones."""

    def __init__(self, groups: Any, lr: float = 1e-3) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                mean = state["mean"].lerp_(parameter.grad, 0.1)
                if mean.ndim == 2:
                    left, _, right = torch.linalg.svd(mean, full_matrices=False)
                    mean = left @ right
                parameter.add_(mean, alpha=-group["lr"])


def made(*widths: int) -> Task:
    """Return a chain of linear layers of these widths."""
    pairs = list(pairwise(widths))
    return task_of(
        lambda: [nn.Linear(*pair) for pair in pairs],
        inputs=widths[0],
        outputs=widths[-1],
        optimizer=Orthogonal,
    )


WIDTHS = {
    "alike": (48, 48, 48, 48),
    "smaller": (64, 56, 48, 8),
    "larger": (8, 48, 56, 64),
    "in turn": (64, 8, 64, 8),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("split", [[3], [1, 2]])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
def test_no_peak_is_predicted_too_low(widths: Sequence[int], split: list[int]) -> None:
    """Tensors held from one layer count during the next layer's update; the dry run and the allocator agree
    to the byte.
    """
    task = made(*widths)
    plan = plan_of(task, split)
    assert not too_low(task, plan)
    found = step_peaks(task, plan)
    assert found.dry == found.metered == found.allocated


def test_bounds_are_no_higher_than_what_is_held() -> None:
    """A predicted peak exceeds the dry run's by less than the largest layer's leftovers; in later steps it is
    exact.
    """
    task = made(48, 48, 48, 48)
    plan = plan_of(task, [3])
    found, left = step_peaks(task, plan), max(cost.update_left_bytes for cost in plan.measurement.kinds)
    ((first, later),), ((held, held_later),) = found.simulated, found.dry
    assert 0 <= first - held < left
    assert later == held_later
