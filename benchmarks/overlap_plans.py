"""What `bench_overlap.py` trains: a model whose layers take milliseconds, and plans that compact its memory.

Each of two stages has three wide layers, which compute for long beside what they keep, between narrow ones, so that
messages are small. Wide layers either multiply matrices or sleep. Sleeping is what the links of emulated devices do: it
takes no core, so that plans can be told apart on a machine on which other programs run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from pipefit.capture import Task
from pipefit.lowering import SCHEDULES
from pipefit.profiler import profile
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Run, SavedTensors, What
from pipefit.schema.devices import Link, parse_place
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.training import Training
from support.random_decisions import compacted

WIDTH, ROWS, PRODUCTS = 512, 64, 30  # so that the forward of a wide layer takes some 12 ms
PAUSE = 0.012  # seconds that one sleeps instead, in its forward; twice that in its backward
NARROW = 4
LAYERS = 5  # of a stage: in, three wide ones, out
COPY_SECONDS = 0.012  # of what one wide layer keeps, to the host or to the other device
MICROBATCHES = 6


class Pause(torch.autograd.Function):
    """The identity, which takes its time."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, seconds: float) -> Tensor:
        """Sleeps."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None]:
        """Sleeps twice as long."""
        time.sleep(2 * ctx.seconds)
        return gradients, None


class Sleeping(nn.Module):
    """Keeps what a sigmoid returns, and sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, values: Tensor) -> Tensor:
        """Element by element."""
        return torch.sigmoid(Pause.apply(values * self.scale, PAUSE))


class Products(nn.Module):
    """Multiplies by a fixed matrix several times, and keeps what a sigmoid returns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mix", torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, values: Tensor) -> Tensor:
        """A linear map, for which autograd keeps nothing but the matrix, and a sigmoid."""
        values = values * self.scale
        for _ in range(PRODUCTS):
            values = values @ self.mix
        return torch.sigmoid(values)


def make_task(compute: str) -> Task:
    """Two stages' layers, whose wide ones compute by `kernels` or by `sleeping`."""
    wide = Sleeping if compute == "sleeping" else Products

    def stage() -> tuple[nn.Module, ...]:
        return nn.Linear(NARROW, WIDTH), wide(), wide(), wide(), nn.Linear(WIDTH, NARROW)

    def layers() -> nn.Module:
        return nn.Sequential(*stage(), *stage())

    return Task(
        layers, batch=make_batch, loss=nn.functional.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.01)
    )


def make_batch(size: int) -> tuple[Tensor, Tensor]:
    """Noise."""
    return torch.randn(size, NARROW), torch.randn(size, NARROW)


def make_plan(compute: str) -> Plan:
    """Two stages on two emulated devices that keep everything, in a profile measured on this machine.

    The links have the rate at which what a wide layer keeps takes COPY_SECONDS; messages are narrow.
    """
    found = profile(make_task(compute), microbatch_size=ROWS, device="cpu")
    link = Link.between("device0", "device1", "host0", bytes_per_second=4 * ROWS * WIDTH / COPY_SECONDS)
    return Plan(
        profile=found,
        cluster=replace(Cluster.emulated((2, 1 << 30)), links=(link,)),
        training=Training(batch_size=ROWS * MICROBATCHES, microbatches=MICROBATCHES, schedule="gpipe"),
        stages=tuple(Stage(start=LAYERS * n, stop=LAYERS * (n + 1), grid=Grid.of(n)) for n in range(2)),
    )


def named_plans(still: Plan) -> Iterator[tuple[str, Plan]]:
    """What is compared by name: each frees two of the storages that wide layers of a stage keep."""
    yield "keep", still
    yield "recompute", replace(still, decisions=tuple(map(_recomputed, range(2))))
    for place in ("host", "peer"):
        for name, gap in (("at once", 0), ("beside computing", 1)):
            decisions = tuple(_moved(still, stage, place, gap) for stage in range(2))
            yield f"{place}, {name}", replace(still, decisions=decisions)


def random_plans(still: Plan, count: int, seed: int = 0) -> Iterator[tuple[str, Plan]]:
    """Random decisions under random schedules, for three microbatches or more."""
    rng = Random(seed)
    for number in range(count):
        microbatches, schedule = rng.randint(3, MICROBATCHES), rng.choice(list(SCHEDULES))
        training = replace(
            still.training, batch_size=ROWS * microbatches, microbatches=microbatches, schedule=schedule
        )
        yield f"random {number}", compacted(replace(still, training=training), rng)


def _recomputed(stage: int) -> Decision:
    """All wide layers, of which the first two's results are kept by no other."""
    first = LAYERS * stage + 1
    return Decision(stage=stage, subject=Run(start=first, stop=first + 3), what=What.RECOMPUTE)


def _moved(still: Plan, stage: int, place: str, gap: int) -> Decision:
    """The results of the first two wide layers, joined `gap` computations behind, and back as many ahead."""
    costs, layers = still.measurement.costs, (LAYERS * stage + 1, LAYERS * stage + 2)
    results = tuple((n, next(t.index for t in costs[n].saved if t.origin.kind == "own")) for n in layers)
    where = parse_place(place if place == "host" else f"device{1 - stage}")
    return Decision(
        stage=stage,
        subject=SavedTensors(tensors=results),
        what=What.OFFLOAD,
        place=where,
        behind=gap,
        ahead=gap,
    )
