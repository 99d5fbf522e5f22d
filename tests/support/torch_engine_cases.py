"""Random trainings for torch's engine: a model, and a plan with recomputation, moves to the host and replicas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gallery
from pipefit.capture import Task
from pipefit.models import build
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import SavedTensors
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.training import Precision, Training
from support.known_profiles import profile
from support.random_decisions import compacted
from support.random_layer_chains import odd_chain
from support.random_trainings import ROOM, random_model, random_plan
from support.replicated_models import MODELS, precise, replicated
from support.small_tasks import profile_of

PRECISIONS: tuple[Precision, ...] = (
    "bfloat16",
    "mixed-bfloat16",
    "mixed-float16",
    "master-bfloat16",
    "master-float16",
)
SCHEDULES = ("gpipe", "torchgpipe", "1f1b", "1f1b", "eager-1f1b")


def _zoo(rng: Random) -> Task:
    name, settings = random_model(rng)
    return build(name, **settings)


def _gallery(rng: Random) -> Task:
    return gallery.task(rng.choice((*gallery.CHAINS, *gallery.COMPARED)))


def _precise(rng: Random) -> Task:
    return precise(rng.choice(PRECISIONS))


def _replicated(rng: Random) -> Task:
    return replicated(rng.choice(sorted(MODELS)))


def _odd(rng: Random) -> Task:
    return odd_chain(rng, traced=rng.random() < 0.5)


MODELS_OF: dict[str, Callable[[Random], Task]] = {
    "zoo": _zoo,
    "gallery": _gallery,
    "precise": _precise,
    "replicated": _replicated,
    "odd": _odd,
}
_SHARES = ("zoo", "zoo", "zoo", "gallery", "gallery", "precise", "replicated", "odd")


def engine_task(seed: int) -> Task:
    """Return a random task."""
    rng = Random(seed)
    return MODELS_OF[rng.choice(_SHARES)](rng)


@cache
def engine_case(seed: int) -> tuple[Task, Plan]:
    """Return a random task, and a random plan that torch's engine can run.

    Raises:
        UsageError: the task or the plan cannot be made: some random models have no chain.
    """
    task, rng = engine_task(seed), Random(f"plan {seed}")
    if task.name in MODELS or (task.name == "precise" and rng.random() < 0.5):
        return task, _with_clipping(_replicas(task, rng), rng)
    plan = random_plan(profile_of(task, rng.choice([1, 2, 4])), rng, schedule=rng.choice(SCHEDULES))
    return task, _with_clipping(_to_hosts(plan, rng) if rng.random() < 0.4 else plan, rng)


def _with_clipping(plan: Plan, rng: Random) -> Plan:
    clip = rng.choice([None, None, 0.5])
    return replace(plan, training=replace(plan.training, clip_norm=clip))


def _to_hosts(plan: Plan, rng: Random) -> Plan:
    """Return the plan with random decisions that move tensors to the host only."""
    moved = compacted(plan, rng)
    decisions = [
        replace(d, place=parse_place("host")) if isinstance(d.subject, SavedTensors) else d
        for d in moved.decisions
    ]
    return replace(plan, decisions=tuple(decisions))


def _replicas(task: Task, rng: Random) -> Plan:
    """Return a plan of two stages with two replicas each, or of one with two or three."""
    data, ranks = rng.choice([(2, 2), (2, 1), (3, 1)])
    size, microbatches = rng.choice([1, 2]), rng.choice([1, 2, 3])
    found = profile(task, microbatch_size=(size, size * data), threads=torch.get_num_threads())
    layers = len(found.layers)
    cuts = [0, *sorted(rng.sample(range(1, layers), ranks - 1)), layers]
    return Plan(
        profile=found,
        cluster=Cluster.emulated((data * ranks, ROOM)),
        training=Training(
            batch_size=size * data * microbatches,
            microbatches=microbatches,
            schedule=rng.choice(["gpipe", "1f1b"]),
            precision=found.assumptions.precision,
        ),
        stages=tuple(
            Stage(
                start=start, stop=stop, grid=Grid(devices=tuple(range(data * n, data * n + data)), data=data)
            )
            for n, (start, stop) in enumerate(pairwise(cuts))
        ),
    )


# ---- Linear layers on inputs that are not contiguous


class Turning(nn.Module):
    """A product along features, and one along positions, whose input and output are views."""

    def __init__(self) -> None:
        super().__init__()
        self.along, self.across = nn.Linear(32, 32), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.across(self.along(x).transpose(1, 2)).transpose(1, 2)
        return result


def turning_task() -> Task:
    """Return a task of four such layers."""
    return Task(
        lambda: nn.Sequential(*(Turning() for _ in range(4))),
        batch=lambda size: (torch.randn(size, 12, 32), torch.randn(size, 12, 32)),
        loss=F.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        name="turning",
    )


# ---- Replicas that divide gradients or parameters

_OPTIMIZERS: tuple[Callable[..., torch.optim.Optimizer], ...] = (
    partial(torch.optim.SGD, lr=0.05),
    partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    partial(torch.optim.AdamW, lr=0.01),
    partial(torch.optim.RMSprop, lr=0.01),
)
_KINDS = ("zoo", "zoo", "precise", "replicated", "replicated", "odd")


def divided_task(seed: int) -> Task:
    """Return a random task for replicas that divide gradients or parameters."""
    rng = Random(f"divided {seed}")
    task = MODELS_OF[rng.choice(_KINDS)](rng)
    return replace(task, optimizer=rng.choice(_OPTIMIZERS))


@cache
def divided_case(seed: int) -> tuple[Task, Plan]:
    """Return a random task, and a random plan for stages whose replicas divide gradients or parameters.

    Raises:
        UsageError: the task or the plan cannot be made.
    """
    task, rng = divided_task(seed), Random(f"divided plan {seed}")
    plan = _replicas(task, rng)
    schedule, microbatches = rng.choice(SCHEDULES), rng.choice([1, 2, 3, 4])
    batch = plan.training.batch_size // plan.training.microbatches * microbatches
    training = replace(plan.training, schedule=schedule, microbatches=microbatches, batch_size=batch)
    shards = [rng.choice(["gradients", "parameters"]) for _ in plan.stages]
    stages = [
        replace(s, grid=replace(s.grid, shard=shard)) for s, shard in zip(plan.stages, shards, strict=True)
    ]
    plan = _with_clipping(replace(plan, training=training, stages=tuple(stages)), rng)
    return task, _to_hosts(plan, rng) if rng.random() < 0.5 else plan
