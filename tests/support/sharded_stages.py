"""Models whose layers tensor shards divide, and plans of stages on grids, for
`tests/runtime/test_shards.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.layer_costs import KernelMemory
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from support.known_profiles import profile

WIDTH, WIDER, SIZE = 8, 64, 12  # the last is that of microbatches


class Wide(nn.Module):
    """Two products with a wider value between them, a part of it on every rank; a residual, a norm, and
    draws.
    """

    def __init__(self, *, dropout: float = 0.3) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDER), nn.Linear(WIDER, WIDTH)
        self.inner, self.outer = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.down(self.inner(self.up(self.norm(x)).tanh())))


class Normed(nn.Module):
    """The same with statistics of the samples for every channel, local to a rank, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(WIDTH, WIDER),
            nn.BatchNorm1d(WIDER),
            nn.Linear(WIDER, WIDTH),
        )
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDER), persistent=False)
        self.shift = torch.linspace(-0.1, 0.1, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(self.up(x)).relu() * self.scale) + self.shift


class Again(nn.Module):
    """A module that reuses the products of another layer, and adds one."""

    def __init__(self, tied: Wide) -> None:
        super().__init__()
        self.up, self.down, self.own = tied.up.weight, tied.down.weight, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(x) + F.linear(F.linear(x, self.up).sigmoid(), self.down)


def dropped() -> list[nn.Module]:
    """Build layers with draws, of divided values and of whole ones."""
    return [Wide(), Wide(), nn.Tanh(), Wide(dropout=0.1), Wide(), nn.Linear(WIDTH, 4)]


def still() -> list[nn.Module]:
    """Build layers without draws or statistics, whose numbers do not depend on the local batch."""
    return [
        Wide(dropout=0.0),
        Wide(dropout=0.0),
        nn.Tanh(),
        Wide(dropout=0.0),
        nn.Tanh(),
        nn.Linear(WIDTH, 4),
    ]


def normed() -> list[nn.Module]:
    """Build layers with statistics, buffers and constants."""
    return [Wide(dropout=0.0), Normed(), nn.Tanh(), Normed(), Wide(dropout=0.0), nn.Linear(WIDTH, 4)]


def tied() -> list[nn.Module]:
    """Build layers, the first and one of the last share two weights."""
    first = Wide(dropout=0.0)
    return [first, nn.Tanh(), Wide(), nn.Tanh(), Again(first), nn.Linear(WIDTH, 4)]


GRIDS = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 4), (2, 2)]  # of data and of tensor parallelism
MODELS: dict[str, Callable[[], Sequence[nn.Module]]] = {"dropped": dropped, "normed": normed, "tied": tied}


def divided(name: str, **settings: Any) -> Task:
    """Return a float64 task with one of the models."""
    chosen: dict[str, Any] = {"optimizer": partial(torch.optim.AdamW, lr=0.01)} | settings
    return Task(partial(_built, name), batch=batch, loss=F.mse_loss, name=name, **chosen)


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return made-up regression data in which every number counts."""
    return torch.randn(size, WIDTH, dtype=torch.float64), torch.randn(size, 4, dtype=torch.float64)


def _built(name: str) -> nn.Sequential:
    return nn.Sequential(*(MODELS | {"still": still})[name]()).double()


Degrees = tuple[int, int]  # of data and of tensor parallelism


def profiled(name: str, degrees: Iterable[Degrees]) -> ModelProfile:
    """Return the profile of a model with momentum for stages of these degrees, whole and divided."""
    chosen = [(1, 1), *degrees]
    sizes, ranks = sorted({SIZE // data for data, _ in chosen}, reverse=True), sorted({n for _, n in chosen})
    parts = [_measured(name, size, count) for size in sizes for count in ranks]
    measurements = dict.fromkeys(one for part in parts for one in part.measurements)
    kernels = dict.fromkeys(one for part in parts for one in part.kernels.kernels)
    return replace(parts[0], measurements=tuple(measurements), kernels=KernelMemory(kernels=tuple(kernels)))


@cache
def _measured(name: str, size: int, tensor: int) -> ModelProfile:
    task = divided(name, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    return profile(task, microbatch_size=size, tensor=(1, tensor))


def grid_plan(
    model: str | ModelProfile,
    edges: Sequence[int],
    degrees: Sequence[Degrees],
    *,
    microbatches: int = 2,
    rng: Random | None = None,
    **training: Any,
) -> Plan:
    """Return a plan with a stage between every two edges, on as many devices as its degrees require, in order
    or shuffled by `rng`. The first size of the model's profile is that of microbatches.
    """
    profile = profiled(model, degrees) if isinstance(model, str) else model
    size, counts = profile.measurements[0].microbatch_size, [data * tensor for data, tensor in degrees]
    devices = list(range(sum(counts)))
    if rng is not None:
        rng.shuffle(devices)
    places = [sum(counts[:number]) for number in range(len(counts) + 1)]
    return Plan(
        profile=profile,
        cluster=Cluster.emulated((len(devices), 1 << 30)),
        training=Training(
            batch_size=size * microbatches,
            microbatches=microbatches,
            precision=profile.assumptions.precision,
            **training,
        ),
        stages=tuple(
            Stage(
                start=start,
                stop=stop,
                grid=Grid(devices=tuple(devices[first:last]), data=data, tensor=tensor),
            )
            for (start, stop), (first, last), (data, tensor) in zip(
                pairwise(edges), pairwise(places), degrees, strict=True
            )
        ),
    )
