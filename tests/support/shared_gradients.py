"""Layers whose parameters get gradients in one memory: with each other, with values, or as parts of larger
tensors.

Values are of shape (samples, 8, 8), parameters of shape (8, 8).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from support.random_layer_chains import Whole

Batch = tuple[Tensor, Tensor]

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "adagrad": torch.optim.Adagrad,
}


def _attention_bias(p: nn.ParameterList, x: Tensor) -> Tensor:
    """Build an attention bias as in EVA, BEiT and Swin v2: queries, zeros, values."""
    bias = torch.cat((p[0][0], torch.zeros_like(p[0][0]), p[1][0]))
    return F.linear(x, torch.cat((p[0], p[1], p[2])), bias)[..., 8:16] + x


MIXES: dict[str, Callable[[nn.ParameterList, Tensor], Tensor]] = {
    "attention bias": _attention_bias,
    "cat": lambda p, x: x @ torch.cat(tuple(p))[4:12],
    "cat with the value": lambda p, x: torch.cat(
        (p[0].expand(len(x), 8, 8), x, p[1].expand(len(x), 8, 8)), 1
    )[:, 5:13],
    "cat of columns": lambda p, x: x @ torch.cat(tuple(p), 1)[:, 7:15],
    "stack": lambda p, x: x @ torch.stack(tuple(p)).sum(0),
    "stack of flat ones": lambda p, x: x * torch.stack([one.view(64) for one in p]).mean(0).view(8, 8),
    "sum": lambda p, x: x + (p[0] + p[1]) + p[2],
    "sum of views": lambda p, x: x + p[0].view(64).view(8, 8) + p[1].view(1, 8, 8) + p[2].unsqueeze(0),
    "difference": lambda p, x: x - (p[0] - p[1].view(1, 8, 8)),
    "rows": lambda p, x: x + p[0][:1] + p[1][3:4],
    "split": lambda p, x: (
        x * p[0].split(4)[0].sum() + torch.tanh(p[0].split(4)[1]).sum() + p[1].chunk(2)[1].mean()
    ),
    "unbind": lambda p, x: x * p[0].unbind()[0] + p[0].unbind()[1] + torch.stack(p[1].unbind()[::-1]),
    "expand": lambda p, x: x + p[0].expand(len(x), 8, 8) + p[1][:1].expand(8, 8),
    "transposed": lambda p, x: x @ p[0].t() + p[1].t(),
    "permuted": lambda p, x: x + p[0].view(8, 2, 4).permute(0, 2, 1).reshape(8, 8),
    "flat": lambda p, x: F.linear(x, p[0].view(64).view(8, 8), p[1].view(64)[8:16]),
    "twice": lambda p, x: (x @ p[0] + p[1]) @ p[0] + p[1].view(1, 8, 8),
    "norm and shift": lambda p, x: F.layer_norm(x, (8,), p[0][0], p[1][0]) + p[2].reshape(1, 8, 8),
    "halves": lambda p, x: x + torch.cat((p[0][:, :4], p[1][:, 4:]), 1).unsqueeze(0),
    "left out": lambda p, x: x + torch.cat((p[0], p[1]))[:8],
}


class Entwined(nn.Module):
    """A value and three parameters, mixed by name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.parts = nn.ParameterList(
            nn.Parameter(torch.randn(8, 8, dtype=torch.float64) / 4) for _ in range(3)
        )

    def forward(self, x: Any) -> Any:
        return MIXES[self.name](self.parts, x)


def entwined(names: Sequence[str], *, optimizer: str = "momentum", traced: bool = False) -> Task:
    """Return a task with such layers between linear ones: a chain, or one traced module."""

    def build() -> nn.Module:
        layers = [part for name in names for part in (nn.Linear(8, 8).double(), Entwined(name))]
        whole = [*layers, nn.Linear(8, 8).double()]
        return Whole(whole) if traced else nn.Sequential(*whole)

    def batch(size: int) -> Batch:
        return torch.randn(size, 8, 8, dtype=torch.float64), torch.randn(size, 8, 8, dtype=torch.float64)

    return Task(build, batch=batch, loss=F.mse_loss, optimizer=OPTIMIZERS[optimizer], name=", ".join(names))


def plain(task: Task, data: Sequence[Batch], *, clip_norm: float | None = None) -> dict[str, Tensor]:
    """Train plainly from seed 0 with whole batches, without gradient accumulation by autograd."""
    torch.manual_seed(0)
    module = task.build()
    parameters = list(module.parameters())
    optimizer = task.optimizer(parameters)
    for inputs, targets in data:
        loss = task.loss(module(inputs), targets)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        optimizer.step()
    return dict(module.state_dict())
