"""Training under asynchronous schedules, by pipefit and by a replay that keeps old weights, compared bit by
bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.memory.states import Layers
from pipefit.runtime import Trainer
from pipefit.runtime.engine.forward_backward import Passes
from pipefit.runtime.optim import updates as updating
from pipefit.runtime.optim.updates import Updates
from pipefit.schema.plan import Plan
from support.asynchronous_replay import Numbers
from support.random_offloads import Attention
from support.small_tasks import task_of

SEED = 3
ADAMW = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Recurrent(nn.Module):
    """An LSTM, which keeps a list of its parameters in addition to its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.unflatten(1, (2, 4)))[0].flatten(1)


@cache
def convolutions() -> Task:
    """Build convolutions, batch norm, dropout and in-place layers."""
    return Task(
        lambda: nn.Sequential(
            *(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3)),
            *(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(64, 3)),
        ),
        batch=lambda size: (torch.randn(size, 2, 8, 8), torch.randint(0, 3, (size,))),
        loss=F.cross_entropy,
        optimizer=MOMENTUM,
        name="convolutions",
    )


def tied() -> list[nn.Module]:
    """Build two linear layers with one weight, and others."""
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)
    last.weight = first.weight
    return [first, nn.Tanh(), last, nn.LayerNorm(8), nn.Dropout(0.2), nn.Linear(8, 4)]


def perceptrons() -> list[nn.Module]:
    """Build layers with and without parameters, one of them frozen."""
    frozen = nn.Linear(8, 8).requires_grad_(False)
    return [nn.Linear(8, 8), nn.Tanh(), frozen, nn.LayerNorm(8), Recurrent(), nn.Linear(8, 4)]


def attention() -> list[nn.Module]:
    """Build attention, views, and in-place activations."""
    head = nn.Unflatten(1, (4, 4)), nn.Conv1d(4, 4, 3, padding=1), nn.Flatten(), nn.Linear(16, 4)
    return [nn.Linear(8, 16), nn.LayerNorm(16), Attention(16), nn.SiLU(inplace=True), *head]


class Skipping(nn.Module):
    """Convolutions with batch norm and skips across them, which cannot be a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4 * 36, 3)
        self.blocks = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + F.relu(norm(block(x)))
        return self.head(x.flatten(1))


@cache
def skipping() -> Task:
    """Build a traced model."""
    return Task(
        Skipping,
        batch=lambda size: (torch.randn(size, 2, 6, 6), torch.randint(0, 3, (size,))),
        loss=F.cross_entropy,
        optimizer=MOMENTUM,
        name="skipping",
    )


TASKS: dict[str, Callable[[], Task]] = {
    "convolutions": convolutions,
    "tied": cache(lambda: task_of(tied, optimizer=ADAMW)),
    "attention": cache(lambda: task_of(attention, optimizer=ADAMW)),
    "perceptrons": cache(lambda: replace(task_of(perceptrons, optimizer=ADAMW), scheduler=halving)),
}


def halving(optimizer: torch.optim.Optimizer) -> Any:
    """Return a learning rate that halves with every update."""
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


class Gradients:
    """Gradients of every update of every stage of a trainer, whole or per run, on the device or on the
    host.
    """

    def __init__(self, trainer: Trainer, patch: pytest.MonkeyPatch) -> None:
        self.found: dict[int, list[list[Tensor]]] = {stage.start: [] for stage in trainer.stages}
        self._stages = {id(stage.updates): stage for stage in trainer.stages}
        self._met: dict[int, dict[int, Tensor]] = {start: {} for start in self.found}
        self._updated: dict[int, set[int]] = {start: set() for start in self.found}
        step, elsewhere = Updates.step, Updates.start_elsewhere

        def watched(updates: Updates, layers: Layers) -> None:
            own = {p: p.grad for p in updates.parameters(layers) if p.grad is not None}
            self._note(updates, layers, own)
            step(updates, layers)

        def watched_elsewhere(
            updates: Updates, layers: Layers, gradients: updating.SentGradients, seconds: float
        ) -> Any:
            gradients.arrive()
            self._note(updates, layers, gradients.there)
            return elsewhere(updates, layers, gradients, seconds)

        patch.setattr(Updates, "step", watched)
        patch.setattr(Updates, "start_elsewhere", watched_elsewhere)

    def _note(self, updates: Updates, layers: Layers, own: Mapping[nn.Parameter, Tensor]) -> None:
        stage = self._stages[id(updates)]
        met, updated = self._met[stage.start], self._updated[stage.start]
        met.update((id(parameter), gradient.clone()) for parameter, gradient in own.items())
        updated.update(range(*layers))
        if len(updated) == stage.stop - stage.start:
            order = dict.fromkeys(map(id, stage.parameters))
            self.found[stage.start].append([met[key] for key in order if key in met])
            met.clear()
            updated.clear()


def trained(
    task: Task,
    plan: Plan,
    batches: Sequence[tuple[Any, Any]],
    drains: Sequence[int],
    patch: pytest.MonkeyPatch,
) -> Numbers:
    """Train by pipefit, with all devices in this process."""
    trainer = Trainer(task, plan, seed=SEED)
    watch = Gradients(trainer, patch)
    losses: dict[tuple[int, int], float] = {}
    loss = Passes._loss

    def noted(passes: Passes, flight: Any, values: Any, targets: Any) -> Any:
        found = loss(passes, flight, values, targets)
        losses.setdefault((flight.batch_number, flight.microbatch), found[0].item())
        return found

    patch.setattr(Passes, "_loss", noted)
    for step, batch in enumerate(batches):
        trainer.step(batch)
        if step in drains:
            trainer.finish()
    return Numbers(list(losses.values()), list(watch.found.values()), trainer.state_dict())


def batches_of(task: Task, sizes: Sequence[int]) -> list[tuple[Any, Any]]:
    """Return batches of these sizes."""
    found = []
    for step, size in enumerate(sizes):
        torch.manual_seed(100 + step)
        found.append(task.batch(size))
    return found


def differences(ours: Numbers, plain: Numbers) -> list[str]:
    """Return all differences, bit by bit."""
    found = [] if ours.losses == plain.losses else [f"losses {ours.losses} and {plain.losses}"]
    for stage, (one, other) in enumerate(zip(ours.gradients, plain.gradients, strict=True)):
        if len(one) != len(other):
            found.append(f"stage {stage}: {len(one)} updates, not {len(other)}")
        for number, (a, b) in enumerate(zip(one, other, strict=False)):
            if not all(map(torch.equal, a, b)) or len(a) != len(b):
                found.append(f"stage {stage}: gradients of update {number}")
    for name, tensor in plain.state.items():
        if not torch.equal(ours.state[name], tensor):
            found.append(f"{name} after all")
    return found
