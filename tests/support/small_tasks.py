"""Tasks and plans of a few layers, for tests of the runtime."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.lowering.passes.recomputation import Recompute, recompute_decisions
from pipefit.runtime import Trainer
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from support.known_profiles import profile

SGD = partial(torch.optim.SGD, lr=0.1)


@dataclass(frozen=True)
class Layers:
    """A factory of a chain; equal for equal functions, so that tasks of the same layers are equal."""

    layers: Callable[[], Sequence[nn.Module]]

    def __call__(self) -> nn.Sequential:
        return nn.Sequential(*self.layers())


@dataclass(frozen=True)
class Rows:
    """Random batches, from rows of `inputs` numbers to rows of `outputs`."""

    inputs: int
    outputs: int

    def __call__(self, size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, self.inputs), torch.randn(size, self.outputs)


def task_of(
    layers: Callable[[], Sequence[nn.Module]],
    *,
    inputs: int = 8,
    outputs: int = 4,
    loss: Callable[[Any, Any], Any] = F.mse_loss,
    optimizer: Callable[..., torch.optim.Optimizer] = SGD,
) -> Task:
    """Return a task of these layers, from rows of `inputs` numbers to rows of `outputs`."""
    return Task(Layers(layers), batch=Rows(inputs, outputs), loss=loss, optimizer=optimizer, name="tiny")


def profile_of(task: Task, size: int) -> ModelProfile:
    """Return the profile of a task at one size, for this process's number of threads."""
    return profile(task, microbatch_size=size, threads=torch.get_num_threads())


def plan_of(
    task: Task,
    split: Sequence[int | EllipsisType],
    *,
    size: int = 2,
    microbatches: int = 2,
    schedule: str = "1f1b",
    recompute: Recompute = "never",
    memory_bytes: int = 1 << 30,
    devices: int | None = None,
    profiled: ModelProfile | None = None,
) -> Plan:
    """Build a plan: stage s holds `split[s]` layers on device s, or s modulo `devices`; each device has
    `memory_bytes`. One stage may hold all other layers, as `...`.

    The task is profiled, unless it is `profiled` already.
    """
    found = profiled or profile_of(task, size)
    rest = len(found.layers) - sum(count for count in split if count is not ...)
    cuts = [0, *itertools.accumulate(rest if count is ... else count for count in split)]
    devices = devices or len(split)
    stages = tuple(
        Stage(start=start, stop=stop, grid=Grid.of(number % devices))
        for number, (start, stop) in enumerate(itertools.pairwise(cuts))
    )
    return Plan(
        profile=found,
        cluster=Cluster.emulated((devices, memory_bytes)),
        training=Training(
            batch_size=size * microbatches,
            microbatches=microbatches,
            schedule=schedule,
            precision=found.assumptions.precision,
        ),
        stages=stages,
        decisions=recompute_decisions(stages, found.edges, recompute, schedule, microbatches),
    )


def trainer_of(task: Task, split: Sequence[int], **training: Any) -> Trainer:
    """Return a trainer for `plan_of` with the same arguments."""
    return Trainer(task, plan_of(task, split, **training))


def batch_of(task: Task, plan: Plan, seed: int = 0) -> tuple[Any, Any]:
    """Return a batch of the plan's size, equal for equal seeds."""
    torch.manual_seed(seed)
    return task.batch(plan.training.batch_size)


def alone(task: Task, plan: Plan, steps: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    """Train plainly without draws; return the losses of the steps, and the final state."""
    torch.manual_seed(0)
    chain = task.build()
    trained = [p for p in chain.parameters() if p.requires_grad]
    optimizer, size = task.optimizer(trained) if trained else None, plan.training.microbatch_size
    losses = []
    for step in range(steps):
        inputs, targets = batch_of(task, plan, step)
        parts = [
            task.loss(chain(x.clone()), y)
            for x, y in zip(torch.split(inputs, size), torch.split(targets, size), strict=True)
        ]
        for loss in parts:
            if loss.requires_grad:
                (loss / len(parts)).backward()
        losses.append(torch.stack([loss.detach() for loss in parts]).mean().item())
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return losses, dict(chain.state_dict())


def in_one_process(
    task: Task, plan: Plan, steps: int, *, numbers: bool = True
) -> tuple[Trainer, list[float]]:
    """Run all stages in this process with the workers' batches; return their losses."""
    trainer, losses = Trainer(task, plan, numbers=numbers), []
    for step in range(steps):
        torch.manual_seed(step)
        losses.append(trainer.step(task.batch(plan.training.batch_size)))
    return trainer, losses


def goes_on(task: Task, plans: Sequence[Plan], data: Sequence[Any], folder: Path) -> None:
    """Train a step by each plan, resumed from the previous plan's checkpoint, whose whole state is restored
    bit by bit.
    """
    before = Trainer(task, plans[0])
    before.step(data[0])
    for number, plan in enumerate(plans[1:], start=1):
        before.save(folder)
        before.finish()
        after = Trainer(task, plan)
        assert after.load(folder) == number
        taken, had = after.state_dict(optimizer=True), before.state_dict(optimizer=True)
        assert taken.keys() == had.keys()
        assert all(torch.equal(taken[name], tensor) for name, tensor in had.items())
        after.step(data[number])
        before = after
