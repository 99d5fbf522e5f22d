"""Plain training in local batches: the oracle for stages with several replicas.

Every stage of a plain `nn.Sequential` is mapped over the local batches of a microbatch, and the results are
concatenated before the next stage, all in one autograd graph. It shares only the seeds of random draws with
the tested code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.runtime.engine.forward_backward import seed_layer
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Sharding, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from support.small_tasks import batch_of

CPU = torch.device("cpu")


def random_grids(rng: Random, counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Draw the edges of the stages of six layers, and their degrees: some replicas, and at most eight
    devices.

    The number of stages is one of `counts`.
    """
    count = rng.choice(counts)
    degrees = [9]
    while sum(degrees) > 8 or max(degrees) == 1:
        degrees = [rng.choice([1, 2, 3, 4]) for _ in range(count)]
    return [0, *sorted(rng.sample(range(1, 6), count - 1)), 6], degrees


def parameters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of a state; buffers are separate in every replica."""
    return {
        name: tensor for name, tensor in state.items() if "running" not in name and "num_batches" not in name
    }


def sliced_plan(
    profiled: ModelProfile,
    edges: Sequence[int],
    degrees: Sequence[int],
    *,
    microbatches: int = 2,
    rng: Random | None = None,
    memory_bytes: int = 1 << 30,
    shard: Sequence[Sharding] = (),
    buckets: Sequence[int] = (),
    **training: Any,
) -> Plan:
    """Return a plan with a stage between every two edges, on as many devices as its degree, in order or
    shuffled by `rng`. The profile's first size is that of microbatches. `shard` lists the sharded state of
    each stage, `buckets` the number of runs of layers for the all-reduce of gradients.
    """
    size, count = profiled.measurements[0].microbatch_size, sum(degrees)
    devices = list(range(count))
    if rng is not None:
        rng.shuffle(devices)
    places = [sum(degrees[:number]) for number in range(len(degrees) + 1)]
    return Plan(
        profile=profiled,
        cluster=Cluster.emulated((count, memory_bytes)),
        training=Training(
            batch_size=size * microbatches,
            microbatches=microbatches,
            precision=profiled.assumptions.precision,
            **training,
        ),
        stages=tuple(
            Stage(
                start=start,
                stop=stop,
                grid=_grid(devices[first:last], divided, runs),
            )
            for (start, stop), (first, last), divided, runs in zip(
                pairwise(edges),
                pairwise(places),
                shard or ("none",) * len(degrees),
                buckets or (1,) * len(degrees),
                strict=True,
            )
        ),
    )


def _grid(devices: Sequence[int], shard: Sharding, buckets: int) -> Grid:
    """Return the grid of some replicas; a single replica shards nothing."""
    if len(devices) == 1:
        return Grid.of(devices[0])
    return Grid(devices=tuple(devices), data=len(devices), shard=shard, buckets=buckets)


class Plain:
    """The plain module of a task, trained in the local batches of a plan."""

    def __init__(self, task: Task, plan: Plan, *, seed: int = 0) -> None:
        self.task, self.plan, self.seed, self.steps = task, plan, seed, 0
        torch.manual_seed(seed)
        self.module = task.build()
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        self.optimizer = task.optimizer(trained)

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """Take one step on a batch; return the mean loss over its samples."""
        loss = self.backward(inputs, targets)
        clip = self.plan.training.clip_norm
        if clip is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return loss

    def backward(self, inputs: Tensor, targets: Tensor, share: float = 1.0) -> float:
        """Return the mean loss of a batch, and accumulate its gradients."""
        size, total, losses = self.plan.training.microbatch_size, len(inputs), 0.0
        for number, (x, y) in enumerate(zip(inputs.split(size), targets.split(size), strict=True)):
            values = x.clone()
            for stage in self.plan.stages:
                values = self._mapped(stage, values, number)
            data = self.plan.stages[-1].grid.data
            slices = zip(values.chunk(data), y.chunk(data), strict=True)
            loss = sum((self.task.loss(one, other) for one, other in slices), torch.zeros(())) / data
            (loss * (len(x) / total * share)).backward()
            losses += loss.item() * len(x) / total
        return losses

    def _mapped(self, stage: Stage, values: Tensor, microbatch: int) -> Tensor:
        """Map a stage over its local batches, each with its own draws."""
        data = stage.grid.data
        parts = values.chunk(data) if data > 1 else [values]
        return torch.cat([self._run(stage, part, microbatch * data + n) for n, part in enumerate(parts)])

    def _run(self, stage: Stage, values: Tensor, number: int) -> Tensor:
        layers: Any = self.module
        for layer in range(stage.start, stage.stop):
            seed_layer(CPU, self.seed, self.steps, number, layer)
            values = layers[layer](values)
        return values


def equal(one: dict[str, Tensor], other: dict[str, Tensor], *, relative: float) -> bool:
    """Return whether two states are equal, relative to their largest number."""
    return one.keys() == other.keys() and all(
        (one[name] - tensor).abs().max() <= relative * tensor.abs().max() for name, tensor in other.items()
    )


def batches(task: Task, plan: Plan, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Return some batches of the plan's size."""
    return [batch_of(task, plan, step) for step in range(steps)]


Layers = Callable[[], Sequence[nn.Module]]
