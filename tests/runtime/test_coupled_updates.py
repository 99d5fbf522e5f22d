"""An optimizer that computes with several parameters at once is refused, because every stage has one of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from pipefit.capture.model import build_chain
from pipefit.errors import UsageError
from pipefit.profiler import profile
from pipefit.runtime.coupled_updates import check_updates
from tiny import task_of


class Normed(torch.optim.SGD):
    """Divides by the norm of all gradients: of its groups, or of each."""

    def __init__(self, groups: Any, *, each: bool) -> None:
        super().__init__(groups, lr=0.1)
        self.each = each

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        of_groups = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        for own in of_groups if self.each else [[p for of_group in of_groups for p in of_group]]:
            norm = torch.stack([p.grad.norm() for p in own]).norm()  # type: ignore[union-attr]
            for parameter in own:
                parameter.sub_(0.1 * parameter.grad / norm)  # type: ignore[operator]


class Langevin(torch.optim.SGD):
    """Adds noise to every weight."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)


def layers() -> list[nn.Module]:
    """Vectors and matrices that are trained."""
    return [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)]


@pytest.mark.parametrize("each", [True, False])
def test_a_common_number_is_refused(each: bool) -> None:
    """By a profile, which belongs to no other optimizer. In plain training all parameters are in one group, unless
    groups are asked for.
    """
    task = task_of(layers, optimizer=partial(Normed, each=each))
    with pytest.raises(UsageError, match=r"computes with several parameters at once.*clip_norm"):
        profile(task, microbatch_size=2)


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.AdamW,
        torch.optim.Adafactor,
        torch.optim.Rprop,
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
        Langevin,
    ],
)
def test_an_optimizer_of_single_parameters_is_not(optimizer: Callable[..., Optimizer]) -> None:
    """Neither is one that draws at random, nor any with a number of one parameter; random numbers stay as they are."""
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    assert profile(task_of(layers, optimizer=optimizer), microbatch_size=2).layers
    assert torch.rand(1) == expected


def test_parameters_of_others_stay_as_they_are() -> None:
    """An optimizer that takes those of the module, whatever it is given, makes no step."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    task = replace(
        task_of(layers, optimizer=lambda groups: torch.optim.SGD(module.parameters(), lr=0.1)), module=module
    )
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [parameter.tolist() for parameter in module.parameters()]
    check_updates(task, build_chain(task, 2).layers)
    assert [parameter.tolist() for parameter in module.parameters()] == before
