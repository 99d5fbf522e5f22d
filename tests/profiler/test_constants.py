"""Extra tensors of hand-written layers: plain attributes, and buffers that are replaced."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.capture.model import chain
from pipefit.errors import UsageError
from support.random_trainings import accounts, plan_for


class Table(nn.Module):
    """A layer that computes with a plain tensor, and with others in a list and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(10, 10), torch.linspace(0, 1, 10)
        self.shifts, self.named = [torch.ones(10)], {"factor": torch.full((10,), 2.0)}

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.scale + self.shifts[0]) * self.named["factor"]


class Replaced(nn.Module):
    """A layer that replaces a buffer after it has saved the old one for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)
        self.register_buffer("mean", torch.ones(10))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x) * self.mean)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y


class Cached(nn.Module):
    """A layer that computes a table in its first forward and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(10, 10), None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(10.0, device=x.device)
        return self.linear(x) + self.table


class Stashing(nn.Module):
    """A layer that stores an intermediate result in an attribute for inspection."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.linear(x)
        return self.seen.tanh()


def _task(part: Callable[[], nn.Module]) -> Task:
    def build() -> nn.Module:
        return chain([nn.Linear(10, 10), part(), part(), nn.Linear(10, 1)])

    return Task(build, batch=lambda n: (torch.randn(n, 10), torch.randn(n, 1)), loss=F.mse_loss)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("part", [Table, Replaced])
def test_the_accounts_of_memory_agree(part: Callable[[], nn.Module], seed: int) -> None:
    """The allocator, the dry run and the simulator count the same bytes, with plain tensors and replaced
    buffers.
    """
    case = plan_for(_task(part), Random(seed))
    case = replace(case, plan=replace(case.plan, decisions=())) if part is Replaced else case
    for account in accounts(case):
        assert account.dry_run_bytes == account.simulated_bytes == account.oracle_bytes, (str(case), account)


def _old_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        return nn.utils.weight_norm(nn.Linear(10, 10))


@pytest.mark.parametrize(
    ("part", "attribute"), [(Cached, "table"), (Stashing, "seen"), (_old_norm, "weight")]
)
def test_a_forward_that_puts_a_tensor_into_an_attribute_is_refused(
    part: Callable[[], nn.Module], attribute: str
) -> None:
    """The error names the layer, the attribute and the remedy."""
    with pytest.raises(
        UsageError, match=rf"layer 1 .* stores a tensor in the attribute '{attribute}'.*make it a buf"
    ):
        plan_for(_task(part), Random(0))
