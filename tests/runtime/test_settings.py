"""Options and schedulers as settings: every torch scheduler resumes at its step, also over other groups."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler

from pipefit.errors import FileError, UsageError
from pipefit.runtime.checkpoint.restoring import options_of, state_of, take_options, take_state

STEPS = 7


def made(optimizer: Optimizer) -> list[Any]:
    return [lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Rising:
    """A rule of a scheduler that is an object with state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1.0 + self.calls / 10


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 5]),
    "constant": lambda o: lr_scheduler.ConstantLR(o, total_iters=4),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.2, step_size_up=2),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "objects": lambda o: lr_scheduler.LambdaLR(o, [Rising() for _ in o.param_groups]),
    "sequential": lambda o: lr_scheduler.SequentialLR(o, made(o), milestones=[3]),
    "chained": lambda o: lr_scheduler.ChainedScheduler(made(o)),
}


def optimizer_of(groups: int, rates: Callable[[int], Any]) -> Optimizer:
    """Return an optimizer of `groups` one-parameter groups with different rates."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(groups)]
    return SGD([{"params": [p], "lr": rates(n)} for n, p in enumerate(parameters)], lr=0.1, momentum=0.9)


def rates_of(optimizer: Optimizer, scheduler: Any, steps: int) -> list[list[tuple[float, float]]]:
    """Return the rate and momentum of every group in the next steps."""
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found.append([(float(group["lr"]), float(group["momentum"])) for group in optimizer.param_groups])
    return found


def through_json(settings: Any) -> Any:
    """Return settings after a round trip through JSON, which makes lists of tuples."""

    def tuples(value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    return {key: tuples(value) for key, value in json.loads(json.dumps(settings)).items()}


@pytest.mark.sample(14)
@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on_over_other_groups(name: str, tensors: bool) -> None:
    """Two of five trained groups continue in another optimizer, at the rates they would have had."""

    def rate(number: int) -> Any:
        return torch.tensor(0.1 + number / 10) if tensors else 0.1 + number / 10

    first = optimizer_of(5, rate)
    scheduler = SCHEDULERS[name](first)
    rates_of(first, scheduler, 3)
    common, by_group = state_of(scheduler, 5)
    options = [options_of(group, "it") for group in first.param_groups]
    second = optimizer_of(2, rate)
    other = SCHEDULERS[name](second)
    for mine, theirs in enumerate((1, 4)):
        take_options(second.param_groups[mine], through_json(options[theirs]))
    take_state(other, through_json(common), [through_json(by_group[number]) for number in (1, 4)])
    expected = rates_of(first, scheduler, STEPS)
    assert rates_of(second, other, STEPS) == [[row[1], row[4]] for row in expected]


def test_another_scheduler_is_refused() -> None:
    """Another scheduler is refused; attributes that only one of the two has are named."""
    optimizer = optimizer_of(2, lambda n: 0.1)
    steps, several = (SCHEDULERS[name](optimizer) for name in ("step", "sequential"))
    common, by_group = state_of(steps, 2)
    with pytest.raises(
        FileError, match=r"does not store _milestones, but the task's scheduler does: use the same scheduler"
    ):
        take_state(several, common, by_group)
    with pytest.raises(
        FileError,
        match=r"stores _schedulers.0.gamma, but the task's scheduler does not: use the same scheduler",
    ):
        take_state(steps, common | {"_schedulers.0.gamma": 0.1}, by_group)


@pytest.mark.parametrize("value", [{1}, object(), float("nan"), float("inf"), torch.zeros(2), lambda: 0])
def test_what_json_cannot_hold_is_refused_by_name(value: Any) -> None:
    """An option that is neither a number nor text, or not finite, is refused by name."""
    with pytest.raises(UsageError, match=r"Muon's option odd is .*which cannot be saved"):
        options_of({"params": [], "lr": 0.1, "odd": value}, "Muon")


def test_options_keep_their_types() -> None:
    """Options keep their types: a tuple stays a tuple, and a tensor rate stays a tensor."""
    group = {"params": [], "betas": (0.9, 0.99), "lr": torch.tensor(0.1), "foreach": None}
    options = through_json(options_of(group | {"betas": (0.8, 0.9), "lr": torch.tensor(0.3)}, "it"))
    take_options(group, options)
    assert group["betas"] == (0.8, 0.9)
    assert isinstance(group["betas"], tuple)
    assert torch.equal(group["lr"], torch.tensor(0.3))
