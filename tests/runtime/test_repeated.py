"""Dry runs of four of many equal layers tell the memory of all of them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from huggingface_models import TINY
from pipefit.capture import Task
from pipefit.cluster import Cluster
from pipefit.fake.chain import fake_chain
from pipefit.plans import Decision, Grid, Microbatches, Plan, Run, Stage, What
from pipefit.profiler import profile
from pipefit.profiles import ModelProfile
from pipefit.runtime import certify, dry_run
from pipefit.runtime.repeated import Shortened
from pipefit.schedule import SCHEDULES, lower
from pipefit.schedule.whole_stages import RECOMPUTE, whole_stages
from pipefit.trace import Trace
from pipefit.training import Training
from pipefit.zoo import build
from pipefit.zoo.huggingface import hf


class Residual(nn.Module):
    """x + f(x), with a factor that autograd keeps."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        """Of any shape."""
        passed: Tensor = x + self.parts(x) * 0.5
        return passed


class Carrying(nn.Module):
    """Passes a second value on to the next layer as it came, and uses it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Both (batch, width)."""
        x, carried = values
        return torch.tanh(self.linear(x)) * carried, carried


class Split(nn.Module):
    """Two values from one."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, width) twice."""
        return x * 2.0, torch.sigmoid(x)


class First(nn.Module):
    """One value from two."""

    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        """The first."""
        return values[0] + 1.0


class Shift(nn.Module):
    """Adds its parameter, which its backward does not touch."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 8)."""
        return x + self.bias


def stack(block: Callable[[], list[nn.Module]], count: int = 7) -> Callable[[], nn.Module]:
    """`count` times the layers of `block`, between others."""

    def build() -> nn.Module:
        middle = [layer for _ in range(count) for layer in block()]
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), *middle, nn.Linear(8, 4))

    return build


BLOCKS: dict[str, Callable[[], list[nn.Module]]] = {
    "residual": lambda: [Residual(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Dropout(0.1))],
    "buffers": lambda: [Residual(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))],
    "two by two": lambda: [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.ReLU(inplace=True)],
    "plain": lambda: [nn.Linear(8, 8)],
    "values passed on": lambda: [Carrying(8)],
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
}


def task_of(module: Callable[[], nn.Module], optimizer: str = "adamw", **settings: Any) -> Task:
    """A task of rows of 8 numbers."""

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, 8), torch.randn(size, 4)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output.float(), target.float())

    return Task(module, batch=batch, loss=loss, optimizer=OPTIMIZERS[optimizer], name="stack", **settings)


def carrying(count: int = 7) -> nn.Module:
    """Layers that pass a tuple on."""
    return nn.Sequential(nn.Linear(8, 8), Split(), *(Carrying(8) for _ in range(count)), First(), nn.Linear(8, 4))


@dataclass
class Folded:
    """A folded dry run, and whether all layers had to be run after all."""

    trace: Trace
    whole: bool


def folded(task: Task, plan: Plan, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Folded:
    """The folded dry run of a plan."""
    chains = []
    monkeypatch.setattr(dry_run, "fake_chain", lambda *args, **kw: chains.append(1) or fake_chain(*args, **kw))
    return Folded(certify(task, plan, **options), len(chains) > 1)


def drawn(found: ModelProfile, rng: Random, **training: Any) -> Plan:
    """Any split over up to two devices, any schedule, up to four microbatches, and any recomputation."""
    layers, count, number = len(found.layers), rng.choice([1, 1, 2]), rng.randint(1, 4)
    cuts = [0, *sorted(rng.sample(range(1, layers), count - 1)), layers]
    stages = tuple(
        Stage(start=start, stop=stop, grid=Grid.of(device))
        for device, (start, stop) in enumerate(itertools.pairwise(cuts))
    )
    schedule = rng.choice(sorted(SCHEDULES))
    size = found.measurements[0].microbatch_size
    decisions = whole_stages(stages, rng.choice(RECOMPUTE), schedule, number) if rng.random() < 0.4 else ()
    if rng.random() < 0.4:
        start = rng.randint(0, layers - 1)
        stage = next(n for n, s in enumerate(stages) if s.start <= start < s.stop)
        run = Run(start=start, stop=rng.randint(start + 1, stages[stage].stop))
        share = Microbatches(rng.randint(1, 3), 3, rng.randint(0, 2))
        decisions = (Decision(stage=stage, subject=run, what=What.RECOMPUTE, microbatches=share),)
    return Plan(
        profile=found,
        cluster=Cluster.emulated((2, 1 << 30)),
        training=Training(
            batch_size=size * number,
            microbatches=number,
            schedule=schedule,
            precision=found.assumptions.precision,
            **training,
        ),
        stages=stages,
        decisions=decisions,
    )
