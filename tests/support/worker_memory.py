"""Tasks whose workers write down their memory at start, trained by
`tests/runtime/test_initial_weights.py`.
"""

from __future__ import annotations

import functools
import multiprocessing as mp
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipefit.capture import Task
from support import sharded_stages

WIDE = 2048  # features of a large layer, of 16 MiB
WIDTH = 6


def still(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer that changes nothing, so that a checkpoint has the first weights."""
    return torch.optim.SGD(parameters, lr=0.0)


def batch(width: int, samples: int) -> tuple[Tensor, Tensor]:
    """Return made-up regression data."""
    return torch.randn(samples, width), torch.randn(samples, width)


# -------------------------------------------------------------------- large


class Stack(nn.Module):
    """Large layers in a traced module."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(frozen, range(8)))

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = torch.tanh(block(values))
        return values


def frozen(number: int) -> nn.Linear:
    """Build a layer with a frozen weight, so that training needs little memory in addition to the weights."""
    made = nn.Linear(WIDE, WIDE)
    made.weight.requires_grad_(requires_grad=False)
    return made


def by_hand() -> nn.Sequential:
    """Build the same large layers as a manual chain."""
    return nn.Sequential(*map(frozen, range(8)))


def watched(build: Callable[[], nn.Module], folder: str) -> Task:
    """Return a task of large layers; each worker writes down its memory growth after building its layers."""
    before = _highest_bytes()

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        worker = os.environ.get("RANK", "alone")
        Path(folder, worker).write_text(str(_highest_bytes() - before))
        return still(parameters)

    return Task(build, batch=partial(batch, WIDE), loss=F.mse_loss, optimizer=optimizer)


def _highest_bytes() -> int:
    """Return the highest memory of this process so far."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


# -------------------------------------------------------------------- odd


class Odd(nn.Module):
    """A layer that holds random tensors in all possible ways."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
        self.register_buffer("shift", torch.randn(WIDTH))
        self.register_buffer("hidden", torch.randn(WIDTH), persistent=False)
        self.register_buffer("same", torch.randn(1).expand(WIDTH))
        self.register_buffer("count", torch.randint(1000, ()))
        self.plain = [torch.randn(WIDTH)]
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        moved = self.fc(values) @ self.turned + self.shift + self.hidden * self.same + self.count
        return self.norm(moved) * self.plain[0]


class Tied(nn.Module):
    """A model whose first and last layers share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Odd(), Odd()])
        self.last.weight = self.first.weight

    def forward(self, values: Tensor) -> Tensor:
        values = self.first(values)
        for block in self.blocks:
            values = block(values)
        return self.last(values)


class Closed(nn.Linear):
    """A layer with a random tensor reachable only from a C function."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.add = functools.partial(torch.add, torch.randn(WIDTH))

    def forward(self, values: Tensor) -> Tensor:
        return self.add(super().forward(values))


class Aliased(nn.Linear):
    """A layer whose buffer lies in its weight."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("seen", self.weight.detach()[0])

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values) + self.seen


def sequence_of(kind: Callable[[], nn.Module]) -> nn.Sequential:
    """Build a manual chain of a few layers of one kind."""
    return nn.Sequential(*(kind() for _ in range(4)))


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "odd": partial(sequence_of, Odd),
    "tied": Tied,
    "closed": partial(sequence_of, Closed),
}


def odd(name: str) -> Task:
    """Return a task with one of the odd models."""
    return Task(BUILDERS[name], batch=partial(batch, WIDTH), loss=F.mse_loss, optimizer=still)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer that changes weights in place."""
    return torch.optim.SGD(parameters, lr=0.5)


def aliased() -> Task:
    """Return a task of layers that have a buffer in their weight."""
    return Task(partial(sequence_of, Aliased), batch=partial(batch, WIDTH), loss=F.mse_loss, optimizer=sgd)


# -------------------------------------------------------------------- existing modules


def tied() -> list[nn.Module]:
    """Build layers; the first shares two weights with another one."""
    first = sharded_stages.Wide(dropout=0.0)
    return [first, nn.Tanh(), sharded_stages.Again(first), nn.Linear(sharded_stages.WIDTH, 4)]


def existing(layers: Callable[[], list[nn.Module]], *, seeded: bool = False) -> Task:
    """Return a task with an existing module of random weights; other weights in each worker if `seeded` by
    its number.
    """
    if seeded:
        name = mp.current_process().name
        torch.manual_seed(int(name.rpartition("-")[2]) if name.startswith("pipefit-worker") else 0)
    return Task(
        nn.Sequential(*layers()).double(), batch=sharded_stages.batch, loss=F.mse_loss, optimizer=slow
    )


def slow(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer with which no model diverges."""
    return torch.optim.SGD(parameters, lr=0.02)
