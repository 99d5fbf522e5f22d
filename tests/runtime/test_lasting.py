"""Tensors that custom functions keep on their contexts until a whole segment's backward ends; peaks include
them.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.capture.model import chain
from support.gallery_samples import seeds
from support.known_profiles import profile
from support.random_trainings import Case, accounts, plan_for
from support.small_tasks import plan_of

WIDTH = 32


class KeepsInput(torch.autograd.Function):
    """Swish, whose input is an attribute of the context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Compute values of any shape."""
        ctx.x = x
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Compute the gradient, of the input's shape."""
        gate = torch.sigmoid(ctx.x)
        return gradient * (gate + ctx.x * gate * (1 - gate))


class KeepsOwn(torch.autograd.Function):
    """A function that saves its input through autograd, and a new tensor in a separate dictionary."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Compute values of any shape."""
        ctx.save_for_backward(x)
        ctx.kept = {"signs": x.sign().repeat(2, 1)}
        return x.abs()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Compute the gradient, of the input's shape."""
        (x,) = ctx.saved_tensors
        return gradient * ctx.kept["signs"][: len(x)]


class Layer(nn.Module):
    """A linear layer and one of these functions, or the function alone."""

    def __init__(self, function: type[torch.autograd.Function], *, linear: bool) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(WIDTH, WIDTH) if linear else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Compute values of shape (batch, width)."""
        out: Tensor = self.function.apply(self.linear(x))
        return out


class Traced(nn.Module):
    """The same layers outside a chain: custom functions stay whole in traces."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Layer(KeepsInput, linear=True) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Compute values of shape (batch, width)."""
        for part in self.parts:
            x = part(x)
        out: Tensor = self.head(x)
        return out


def by_hand(function: type[torch.autograd.Function], *, linear: bool) -> nn.Module:
    """Return a chain of six such layers, with a linear one between any two and at the end."""
    parts = (part for _ in range(3) for part in (nn.Linear(WIDTH, WIDTH), Layer(function, linear=linear)))
    return chain([*parts, nn.Linear(WIDTH, WIDTH)])


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return made-up values and targets."""
    return torch.randn(size, WIDTH), torch.randn(size, WIDTH)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", seeds(1, of=3))
@pytest.mark.parametrize(
    "module",
    [
        lambda: by_hand(KeepsInput, linear=True),
        lambda: by_hand(KeepsInput, linear=False),
        lambda: by_hand(KeepsOwn, linear=True),
        lambda: by_hand(KeepsOwn, linear=False),
        Traced,
    ],
    ids=["own value", "input", "own tensor", "input and own tensor", "traced"],
)
def test_peaks_count_what_lasts(module: Any, seed: int) -> None:
    """Peaks count tensors on contexts: simulator, dry run and allocator agree to the byte, under any plan."""
    task = Task(module, batch=batch, loss=F.mse_loss, name="lasting")
    for account in accounts(plan_for(task, Random(seed))):
        assert account.simulated_bytes == account.dry_run_bytes == account.oracle_bytes, str(account.case)


def test_what_lasts_is_there_when_the_last_gradients_are_made() -> None:
    """Tensors on contexts live until the last gradients: eight layers in one stage, whose gradients are as
    large as the kept tensors, peak at the backward's end.
    """

    def wide() -> nn.Module:
        parts = (
            part
            for _ in range(8)
            for part in (nn.Linear(WIDTH, WIDTH, bias=False), Layer(KeepsInput, linear=False))
        )
        return chain(list(parts))

    task = Task(wide, batch=batch, loss=F.mse_loss, optimizer=torch.optim.SGD, name="lasting")
    costs = profile(task, microbatch_size=WIDTH // 2, threads=torch.get_num_threads())
    plan = plan_of(task, [16], size=WIDTH // 2, microbatches=1, profiled=costs)
    for account in accounts(Case(name="lasting", settings={}, task=task, plan=plan)):
        assert account.simulated_bytes == account.dry_run_bytes == account.oracle_bytes, str(account.case)


@pytest.mark.parametrize("kept", [KeepsInput, KeepsOwn])
def test_what_lasts_is_named(kept: type[torch.autograd.Function]) -> None:
    """A profile names the function that keeps a tensor on its context."""
    costs = profile(Task(lambda: by_hand(kept, linear=True), batch=batch, loss=F.mse_loss), microbatch_size=8)
    lasting = [
        tensor.operation for cost in costs.measurements[0].costs for tensor in cost.saved if tensor.lasting
    ]
    assert lasting == [kept.__name__] * 3
