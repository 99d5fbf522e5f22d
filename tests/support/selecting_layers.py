"""Layers and losses that select elements or rows by their values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task

WIDTH = 8

SELECTING: dict[str, Callable[[nn.Module, Tensor, float], Tensor]] = {
    "elements": lambda linear, x, least: x * x[x > least].pow(2).sum(),
    "rows": lambda linear, x, least: x + linear(x[x[:, 0] > least]).sum(0),
    "indices": lambda linear, x, least: x + linear(x[(x[:, 0] > least).nonzero()[:, 0]]).sum(0),
    "selection": lambda linear, x, least: x + torch.masked_select(x, x > least).mean(),
    "assigned": lambda linear, x, least: _assigned(linear, x, x[:, 0] > least),
}


def _assigned(linear: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[mask] = linear(x[mask])
    return out


class Selects(nn.Module):
    """A layer that computes with the elements or rows above `least`."""

    def __init__(self, how: str, least: float) -> None:
        super().__init__()
        self.how, self.least, self.linear = how, least, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return SELECTING[self.how](self.linear, x, self.least)


def selecting(how: str, least: float) -> Task:
    """Return a task with such a layer, and a loss of the targets above `least`."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs[targets > least], targets[targets > least])

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, WIDTH), torch.randn(size, WIDTH)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Selects(how, least), nn.Linear(WIDTH, WIDTH))

    return Task(build, batch=batch, loss=loss, optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9))
