"""Effects of parameter groups on an update: state of some parameters only, one group or several."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipefit.capture import Task
from support.random_trainings import accounts, plan_for

Options = Callable[[str, nn.Parameter], dict[str, Any]]


def _momentum_of_matrices(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    return {"momentum": 0.9} if parameter.ndim == 2 else {}


def _momentum_of_one_layer(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    return {"momentum": 0.9} if name.startswith("2.") else {}


def _decay_of_matrices(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    return {} if parameter.ndim == 2 else {"weight_decay": 0.0}


CASES: list[tuple[Callable[..., Any], Options]] = [
    (partial(torch.optim.SGD, lr=0.1), _momentum_of_matrices),
    (partial(torch.optim.SGD, lr=0.1), _momentum_of_one_layer),
    (torch.optim.AdamW, _decay_of_matrices),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("optimizer", "groups"), CASES)
def test_the_accounts_of_memory_agree(optimizer: Callable[..., Any], groups: Options) -> None:
    """The allocator, the dry run and the simulator count the same bytes in every step, for any groups'
    options.
    """

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))

    batch = lambda n: (torch.randn(n, 40), torch.randn(n, 1))  # noqa: E731
    task = Task(build, batch=batch, loss=F.mse_loss, optimizer=optimizer, groups=groups)
    for account in accounts(plan_for(task, Random(0))):
        assert account.dry_run_bytes == account.simulated_bytes == account.oracle_bytes, account
