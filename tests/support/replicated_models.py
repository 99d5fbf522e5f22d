"""Models for stages with several replicas, trained by `tests/runtime/test_replicas.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.schema.training import Precision

WIDTH = 8


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return made-up regression data in which every number counts."""
    return torch.randn(size, WIDTH, dtype=torch.float64), torch.randn(size, 4, dtype=torch.float64)


def dropped() -> list[nn.Module]:
    """Build layers with random draws."""
    return [
        *(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.3)),
        *(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)),
    ]


def normed() -> list[nn.Module]:
    """Build layers with statistics of the samples, which every replica computes from its local batch."""
    return [
        *(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()),
        *(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4)),
    ]


class Head(nn.Module):
    """A head that multiplies by another layer's transposed weight, and by a second weight."""

    def __init__(self, tied: nn.Linear) -> None:
        super().__init__()
        self.tied, self.own = tied.weight, nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(F.linear(x, self.tied.T))


class Table(nn.Module):
    """A table of positions that is added and passed on, for a later layer to add again."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.table = None if last else nn.Parameter(torch.randn(3, 8, dtype=torch.float64))
        self.linear = nn.Linear(8, 8).double()

    def forward(self, given: Any) -> Any:
        if self.table is None:
            x, table = given
            return self.linear(x) + table.tanh()
        return self.linear(given + self.table), self.table * 2


def tied() -> list[nn.Module]:
    """Build layers; the first and one of the last share a weight."""
    first = nn.Linear(WIDTH, WIDTH)
    return [first, nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), Head(first)]


MODELS: dict[str, Callable[[], Sequence[nn.Module]]] = {"dropped": dropped, "normed": normed, "tied": tied}


def replicated(name: str, **settings: Any) -> Task:
    """Return a float64 task with one of the models."""
    chosen: dict[str, Any] = {"optimizer": partial(torch.optim.AdamW, lr=0.01)} | settings
    return Task(partial(_built, name), batch=batch, loss=F.mse_loss, name=name, **chosen)


def _built(name: str) -> nn.Sequential:
    return nn.Sequential(*MODELS[name]()).double()


def precise(precision: Precision) -> Task:
    """Return a task in some precision."""
    return Task(
        lambda: nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
        ),
        batch=lambda size: (torch.randn(size, WIDTH), torch.randn(size, 4)),
        loss=lambda outputs, targets: F.mse_loss(outputs.float(), targets.float()),
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        precision=precision,
        name="precise",
    )


def plain_layers() -> nn.Sequential:
    """Build layers in float64 without draws or statistics."""
    return nn.Sequential(
        *(
            nn.Linear(WIDTH, WIDTH),
            nn.Tanh(),
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 4),
        )
    ).double()


def plain_task() -> Task:
    """Return a task of these layers that can be passed to other processes."""
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    return Task(plain_layers, batch=batch, loss=F.mse_loss, optimizer=momentum, name="plain")
