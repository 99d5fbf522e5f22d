"""Device of an optimizer's scalar state, found by a trial step; the meta device stands for a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from pipefit.runtime.optim.updates import Updates, kept_beside
from pipefit.runtime.trainer import Trainer
from support.small_tasks import plan_of, task_of

SHAPES = [(3, 4), (5,), ()]


class Counting(Optimizer):
    """An optimizer with a moment, a scalar on the host, and one on the parameter's device if `beside`."""

    def __init__(self, groups: Any, *, beside: bool = True, draws: bool = False) -> None:
        super().__init__(groups, {"beside": beside, "draws": draws})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Create the state."""
        for group in self.param_groups:
            for parameter in group["params"]:
                there = parameter.device if group["beside"] else "cpu"
                found = {"here": torch.zeros(()), "number": torch.zeros((), device=there), "said": 1.0}
                if group["draws"]:
                    torch.rand(1)
                self.state[parameter] = found | {"moment": torch.zeros_like(parameter)}


def like(shape: tuple[int, ...]) -> Tensor:
    """Return a parameter on a device."""
    return torch.empty(shape, device="meta")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_lies_beside_a_parameter_is_told(shape: tuple[int, ...]) -> None:
    """Scalars on the parameter's device are found; the moment of a scalar parameter is one of them."""
    expected = {"number", "moment"} if shape == () else {"number"}
    assert kept_beside(Counting, {"beside": True}, like(shape)) == expected
    assert kept_beside(Counting, {"beside": False}, like(shape)) == expected - {"number"}


def test_an_optimizer_that_cannot_be_asked_keeps_numbers_on_the_host() -> None:
    """An optimizer that fails on small parameters, or accepts none, counts as with scalars on the host."""

    def fails(groups: Any) -> Optimizer:
        raise ValueError("no parameters")

    assert kept_beside(fails, {}, like((3,))) == frozenset()
    assert kept_beside(lambda groups: Counting([torch.zeros(1)]), {}, like((3,))) == frozenset()


def test_asking_leaves_draws_alone() -> None:
    """The trial step does not advance torch's generators."""
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    kept_beside(Counting, {"draws": True}, like((3,)))
    assert torch.equal(torch.rand(1), expected)


def test_every_group_is_asked_with_its_own_options() -> None:
    """Every group is tried with its own options, because a stage's groups may differ; on the host there is no
    trial.
    """
    task = task_of(lambda: [torch.nn.Linear(8, 4)], optimizer=partial(Counting, beside=True))
    (stage,) = Trainer(task, plan_of(task, [1])).stages
    for parameter in stage.parameters:
        assert Updates(task, stage.layers, 0, None, {}).numbers_beside(parameter) == frozenset()
    layer = stage.layers[0].module.to("meta")
    updates = Updates(task, stage.layers, 0, None, {})
    assert updates.optimizer is not None
    (group,) = updates.optimizer.param_groups
    weight, bias = group["params"]
    updates.optimizer.param_groups[:] = [
        {**group, "params": [weight]},
        {**group, "params": [bias], "beside": False},
    ]
    assert [updates.numbers_beside(parameter) for parameter in layer.parameters()] == [
        {"number"},
        frozenset(),
    ]
