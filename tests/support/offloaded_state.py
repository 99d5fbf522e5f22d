"""A task with offloaded state or host updates, plans for it, and its training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from pipefit.capture import Task
from pipefit.runtime import Trainer
from pipefit.runtime.state import StageState
from pipefit.schema.decisions import Decision, State, StateKind, What
from pipefit.schema.devices import parse_place
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.trace import Trace
from support.known_profiles import profile
from support.small_tasks import batch_of, plan_of, task_of

STEPS = 3


def layers() -> list[nn.Module]:
    """Build layers with parameters of several kinds, and without."""
    norm = nn.BatchNorm1d(16), nn.Dropout(0.2), nn.LayerNorm(16)
    return [
        nn.Linear(8, 16),
        nn.Sigmoid(),
        *norm,
        nn.Linear(16, 16),
        nn.GELU(),
        nn.Linear(16, 16),
        nn.Linear(16, 4),
    ]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
}
KINDS = (*OPTIMIZERS, "clipped", "copies", "scaled", "scheduled")


def task_named(kind: str) -> Task:
    """Return the layers' task with that kind of update."""
    plain = task_of(layers, optimizer=OPTIMIZERS.get(kind, OPTIMIZERS["adamw"]))
    if kind == "copies":
        return replace(plain, precision="master-bfloat16", loss=squares)
    if kind == "scaled":
        return replace(plain, precision="master-float16", loss=small_squares)
    if kind == "overflowing":
        return replace(plain, precision="master-float16", loss=squares)
    return replace(plain, scheduler=partial(ExponentialLR, gamma=0.5)) if kind == "scheduled" else plain


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean of squares in float32."""
    return nn.functional.mse_loss(outputs.float(), targets.float())


def small_squares(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute a loss whose gradients do not overflow float16."""
    return squares(outputs, targets) * 1e-3


@functools.cache
def found(kind: str) -> ModelProfile:
    """Return the profile of its layers."""
    return profile(task_named(kind), microbatch_size=2, threads=torch.get_num_threads())


def clipping(plan: Plan, kind: str) -> Plan:
    """Return the plan with gradients clipped, if the kind requires it."""
    clip_norm = 0.05 if kind in ("clipped", "copies") else None
    return replace(plan, training=replace(plan.training, clip_norm=clip_norm))


def trained(task: Task, plan: Plan, steps: int = STEPS) -> tuple[list[float], StageState, Trace]:
    """Return the losses of some steps, the final state, and the trace."""
    trainer = Trainer(task, plan)
    losses = [trainer.step(batch_of(task, plan, step)) for step in range(steps)]
    assert all(not runner.mover.borrowed.in_use for runner in trainer.runners)
    return losses, trainer.state, trainer.trace


def tensors(state: StageState) -> Iterator[tuple[str, Tensor]]:
    """Return all tensors of a state, with names."""
    yield from state.tensors.items()
    yield from ((f"copy of {name}", tensor) for name, tensor in state.master_weights.items())
    yield from (
        (f"{name} {key}", tensor) for name, of in state.optimizer.items() for key, tensor in of.items()
    )


def assert_same(one: StageState, other: StageState) -> None:
    """Assert that two states are bitwise equal."""
    mine, theirs = dict(tensors(one)), dict(tensors(other))
    assert mine.keys() == theirs.keys()
    assert [name for name, tensor in theirs.items() if not torch.equal(mine[name], tensor)] == []


def away(
    stage: int,
    start: int,
    stop: int,
    what: What = What.OFFLOAD,
    place: str = "host",
    kind: StateKind = "optimizer",
    **when: int,
) -> Decision:
    """Return whether state of some layers is offloaded, or the host updates them."""
    subject = State(start=start, stop=stop, kind=kind)
    return Decision(stage=stage, subject=subject, what=what, place=parse_place(place), **when)


def one_stage(*decisions: Decision, kind: str = "adamw", **settings: Any) -> Plan:
    """Place all layers on one device of two, with these decisions."""
    plan, costs = (
        plan_of(task_named("adamw"), [9], profiled=found("adamw"), devices=2, **settings),
        found(kind),
    )
    training = replace(plan.training, precision=costs.assumptions.precision)
    return replace(plan, profile=costs, training=training, decisions=decisions)


SWAPPED = away(0, 0, 3, ahead=1), away(0, 5, 6, place="device1", ahead=1, behind=0), away(0, 7, 9)
UPDATED = away(0, 0, 3, What.UPDATE), away(0, 5, 6, What.UPDATE), away(0, 7, 9)
PARAMETERS = tuple(away(0, n, n + 1, kind="parameters", ahead=1) for n in (0, 5, 7, 8))
GRADIENTS = tuple(away(0, n, n + 1, kind="gradients", ahead=1) for n in (0, 5, 7, 8))
EACH = pytest.mark.parametrize(
    "decisions",
    [SWAPPED, UPDATED, PARAMETERS, GRADIENTS, (*SWAPPED, *PARAMETERS, *GRADIENTS)],
    ids=["swapped", "updated", "parameters", "gradients", "all"],
)
