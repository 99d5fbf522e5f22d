"""Random chains of small layers with unusual operations: views, in-place changes, several values, unused
values.

Each value has shape (samples, 8, 8). A layer applies one operation to the first value, or the first two, and
passes on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from support.small_tasks import SGD

WIDTH, MOST_VALUES = 8, 4
Values = tuple[Tensor, ...]
Make = Callable[[], nn.Module]


class Part(nn.Module):
    """A function of values as a layer; `module`, which it may call, has its parameters."""

    def __init__(self, function: Callable[..., Values], module: nn.Module) -> None:
        super().__init__()
        self.function, self.module = function, module

    def forward(self, values: Any) -> Any:
        values = values if isinstance(values, tuple) else (values,)
        found = self.function(self.module, *values)
        return found if len(found) > 1 else found[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of layer: the number of its inputs, the number of additional outputs, and its operation."""

    function: Callable[..., Values]
    needs: int = 1
    more: int = 0
    module: Make = nn.Identity


def one(function: Callable[[nn.Module, Tensor], Tensor], module: Make = nn.Identity) -> Kind:
    """Return a kind that changes the first value."""
    return Kind(function=lambda m, x, *rest: (function(m, x), *rest), module=module)


def fork(function: Callable[[nn.Module, Tensor], Values], module: Make = nn.Identity) -> Kind:
    """Return a kind that makes two values of the first."""
    return Kind(function=lambda m, x, *rest: (*function(m, x), *rest), more=1, module=module)


def join(function: Callable[[nn.Module, Tensor, Tensor], Tensor], module: Make = nn.Identity) -> Kind:
    """Return a kind that makes one value of the first two."""
    return Kind(function=lambda m, x, y, *rest: (function(m, x, y), *rest), needs=2, more=-1, module=module)


def linear(width: int = WIDTH, inputs: int = WIDTH) -> nn.Module:
    """Return a linear layer, which returns a view, as its input has three dimensions."""
    return nn.Linear(inputs, width)


KINDS: dict[str, Kind] = {
    "linear": one(lambda m, x: m(x), linear),
    "frozen": one(lambda m, x: m(x), lambda: linear().requires_grad_(False)),
    "norm": one(lambda m, x: m(x), lambda: nn.LayerNorm(WIDTH)),
    "batch norm": one(lambda m, x: m(x), lambda: nn.BatchNorm1d(WIDTH)),
    "convolution": one(lambda m, x: m(x), lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "relu in place": one(lambda m, x: F.relu_(x)),
    "dropout in place": one(lambda m, x: F.dropout(x, 0.5, inplace=True)),
    "relu": one(lambda m, x: F.relu(x)),
    "dropout": one(lambda m, x: F.dropout(x, 0.5)),
    "number before a product": one(lambda m, x: m(x * 2), linear),
    "number": one(lambda m, x: x / 2.0),
    "gelu": one(lambda m, x: F.gelu(x)),
    "tanh": one(lambda m, x: torch.tanh(x)),
    "softmax": one(lambda m, x: x.softmax(-1)),
    "flat": one(lambda m, x: x.reshape(len(x), -1).view(x.shape)),
    "view": one(lambda m, x: x.unsqueeze(1).squeeze(1)),
    "flip": one(lambda m, x: x.flip(1)),
    "transposed": one(lambda m, x: x.transpose(1, 2).contiguous()),
    "turned": one(lambda m, x: x.transpose(1, 2)),
    "slice": one(lambda m, x: m(x)[:, :, :WIDTH], lambda: linear(2 * WIDTH)),
    "every other": one(lambda m, x: m(x)[:, :, ::2], lambda: linear(2 * WIDTH)),
    "expanded": one(lambda m, x: x[:, :1].expand(x.shape)),
    "fork": fork(lambda m, x: (x, m(x)), linear),
    "twice": fork(lambda m, x: (x, x)),
    "two views": fork(lambda m, x: (x, x.view(x.shape))),
    "bent": fork(lambda m, x: (torch.tanh(x), x)),
    "halves": fork(lambda m, x: tuple(m(x).chunk(2, -1)), lambda: linear(2 * WIDTH)),
    "copied halves": fork(
        lambda m, x: tuple(h.contiguous() for h in m(x).chunk(2, -1)), lambda: linear(2 * WIDTH)
    ),
    "mask": fork(lambda m, x: (x, (x.detach() > 0).float())),
    "detached": fork(lambda m, x: (x, x.detach().clone())),
    "sum": join(lambda m, x, y: x + y),
    "sum in place": join(lambda m, x, y: x.add_(y)),
    "second in place": join(lambda m, x, y: y.add_(x)),
    "product": join(lambda m, x, y: x * y),
    "joined": join(lambda m, x, y: m(torch.cat([x, y], -1)), lambda: linear(inputs=2 * WIDTH)),
    "mean": join(lambda m, x, y: torch.stack([x, y], 1).mean(1)),
    "matrices": join(lambda m, x, y: x @ y.transpose(1, 2)),
    "dropped": join(lambda m, x, y: x),
    "swapped": Kind(function=lambda m, x, y, *rest: (y, x, *rest), needs=2),
    "both": Kind(function=lambda m, x, y, *rest: (x + y, x * y, *rest), needs=2),
}


class Whole(nn.Module):
    """The parts as one traced module."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


def first(outputs: Any) -> Tensor:
    """Return the first value."""
    found: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
    return found


def mean_of_all(outputs: Any, target: Tensor) -> Tensor:
    """Compute a loss that depends on every value."""
    values = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.stack([F.mse_loss(value, target) for value in values]).mean()


LOSSES: tuple[Callable[[Any, Tensor], Tensor], ...] = (
    mean_of_all,
    lambda outputs, target: F.mse_loss(first(outputs), target),
    lambda outputs, target: first(outputs).sum(),
)


def names_of(rng: Random) -> list[str]:
    """Draw kinds of three to eight layers between two linear ones, ordered so that each has enough inputs."""
    found, values, count = ["linear"], 1, rng.randint(4, 9)
    while len(found) < count:
        name = rng.choice(list(KINDS))
        if KINDS[name].needs <= values and values + KINDS[name].more <= MOST_VALUES:
            found.append(name)
            values += KINDS[name].more
    return [*found, "linear"]


def odd_chain(rng: Random, *, traced: bool) -> Task:
    """Build a task of such layers, named after them: a chain, or one traced module."""
    names, loss = names_of(rng), rng.choice(LOSSES)

    def build() -> nn.Module:
        parts = [Part(KINDS[name].function, KINDS[name].module()) for name in names]
        return Whole(parts) if traced else nn.Sequential(*parts)

    def batch(size: int) -> Values:
        return torch.randn(size, WIDTH, WIDTH), torch.randn(size, WIDTH, WIDTH)

    return Task(build, batch=batch, loss=loss, optimizer=SGD, name=", ".join(names))
