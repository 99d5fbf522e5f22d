"""Numbers under any plan: equal to plain training of the same microbatches, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gallery
from gallery import CHAINS
from pipefit.capture import Task
from pipefit.models import build
from pipefit.runtime import Trainer, train
from pipefit.runtime.engine.forward_backward import seed_layer
from pipefit.runtime.engine.stage import StageRunner
from pipefit.schema.actions import Action
from pipefit.schema.plan import Plan
from support.gallery_samples import seeds
from support.known_profiles import profile
from support.random_trainings import random_plan
from support.small_tasks import plan_of, profile_of

STEPS, SEED, CPU = 3, 7, torch.device("cpu")
SMALL: Mapping[str, Mapping[str, Any]] = {
    "mlp": {"widths": (64, 200, 16, 96)},
    "gpt": {"layers": 2, "hidden": 32, "heads": 4, "vocabulary": 64, "sequence": 16},
    "gpt-stdlib": {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16},
    "bert": {"layers": 2, "hidden": 32, "heads": 4, "vocabulary": 64, "sequence": 16},
    "vgg11": {"width": 3, "image_size": 32, "num_classes": 10},
}


class Numbers(NamedTuple):
    """All results of training: losses of microbatches and gradients of every step, final parameters and
    buffers.
    """

    losses: list[list[float]]
    gradients: list[list[Tensor]]
    state: dict[str, Tensor]


# Sums over threads may be taken in another order
pytestmark = pytest.mark.usefixtures("one_thread")


def normed() -> Task:
    """Build a small CNN with dropout and batch norm, which has buffers."""
    return Task(
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.3)),
            *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 64, 5)),
        ),
        batch=lambda size: (torch.randn(size, 3, 12, 12), torch.randint(0, 5, (size,))),
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        name="normed",
    )


@cache
def make(name: str, dropout: float) -> Task:
    """Build a small model by name."""
    if name in SMALL:
        return build(name, **SMALL[name], dropout=dropout)
    return normed() if name == "normed" else gallery.task(name)


def batches(task: Task, size: int) -> list[tuple[Any, Any]]:
    """Return the batches of all steps."""
    found = []
    for step in range(STEPS):
        torch.manual_seed(SEED + step)
        found.append(task.batch(size))
    return found


def split(part: Any, size: int) -> list[Any]:
    """Split `part` of a batch into microbatches."""
    if isinstance(part, Tensor):
        return list(torch.split(part, size))
    return list(zip(*(torch.split(tensor, size) for tensor in part), strict=True))


def seeded(chain: nn.Sequential, x: Any, step: int, microbatch: int) -> Any:
    """Run the layers in order, each with its own random draws."""
    for number, layer in enumerate(chain):
        seed_layer(CPU, SEED, step, microbatch, number)
        x = layer(x)
    return x


def plainly(task: Task, plan: Plan, forward: Callable[[nn.Sequential, Any, int, int], Any]) -> Numbers:
    """Train without pipefit: accumulate the gradients of microbatches in the order of the plan's schedule,
    and update once a step.
    """
    torch.manual_seed(SEED)
    chain = task.build()
    assert isinstance(chain, nn.Sequential)
    optimizer, training = task.optimizer(chain.parameters()), plan.training
    losses, gradients = [], []
    for step, (inputs, targets) in enumerate(batches(task, training.batch_size)):
        parts = zip(
            split(inputs, training.microbatch_size), split(targets, training.microbatch_size), strict=True
        )
        found = [task.loss(forward(chain, x, step, microbatch), y) for microbatch, (x, y) in enumerate(parts)]
        own = torch.stack([loss.detach() for loss in found])
        for loss in reversed(found) if backwards_from_the_last(plan) else found:
            (loss / training.microbatches).backward()
        gradients.append([p.grad.clone() for p in chain.parameters() if p.grad is not None])
        losses.append(own.tolist())
        optimizer.step()
        optimizer.zero_grad()
    return Numbers(losses, gradients, dict(chain.state_dict()))


def backwards_from_the_last(plan: Plan) -> bool:
    """Return whether the schedule accumulates gradients from the last microbatch to the first."""
    return plan.training.schedule == "torchgpipe"


def planned(task: Task, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> Numbers:
    """Train by a plan, all devices in this process."""
    trainer, gradients = Trainer(task, plan, seed=SEED), []
    update = StageRunner.step

    def watched(runner: StageRunner, action: Action) -> None:
        seen[runner.start] = [p.grad.clone() for p in runner.parameters if p.grad is not None]
        update(runner, action)

    monkeypatch.setattr(StageRunner, "step", watched)
    losses = []
    for batch in batches(task, plan.training.batch_size):
        seen: dict[int, list[Tensor]] = {}
        mean, (own,) = (
            trainer.step(batch),
            [stage.losses for stage in trainer.stages if stage.losses is not None],
        )
        losses.append(own.tolist())
        assert mean == pytest.approx(own.mean().item(), rel=1e-6)
        gradients.append([gradient for start in sorted(seen) for gradient in seen[start]])
    return Numbers(losses, gradients, trainer.state_dict())


def differences(ours: Numbers, plain: Numbers) -> list[str]:
    """Return the names of results that differ in any bit."""
    assert ours.state.keys() == plain.state.keys()
    assert [len(step) for step in ours.gradients] == [len(step) for step in plain.gradients]
    found = [] if ours.losses == plain.losses else [f"losses {ours.losses} {plain.losses}"]
    found += [name for name, tensor in plain.state.items() if not torch.equal(ours.state[name], tensor)]
    for step, pair in enumerate(zip(ours.gradients, plain.gradients, strict=True)):
        equal = [torch.equal(a, b) for a, b in zip(*pair, strict=True)]
        found += [f"gradient {number} of step {step}" for number, same in enumerate(equal) if not same]
    return found


def any_plan(task: Task, seed: str, *, size: int = 2, microbatches: int | None = None) -> Plan:
    """Draw a random plan for `task`."""
    return random_plan(profile_of(task, size), Random(seed), microbatches=microbatches)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", seeds(1, of=2))
@pytest.mark.parametrize("name", [*SMALL, "normed", *CHAINS])
def test_numbers_are_those_of_plain_training(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, gradients, parameters and buffers equal plain training bit by bit, with dropout and batch norm
    too.
    """
    task = make(name, dropout=0.2)
    plan = any_plan(task, f"{name} {seed}", size=2 + seed)
    ours = planned(task, plan, monkeypatch)
    assert differences(ours, plainly(task, plan, seeded)) == [], plan.split


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SMALL)
def test_without_draws_no_seed_is_needed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout, the reference is `module(x)` without a seed."""
    task = make(name, dropout=0.0)
    plan = any_plan(task, f"plain {name}")
    ours = planned(task, plan, monkeypatch)
    assert differences(ours, plainly(task, plan, lambda chain, x, step, microbatch: chain(x))) == []


def test_every_microbatch_draws_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference that draws the same numbers for every step and microbatch has other losses: dropout is not
    frozen.
    """
    task = make("mlp", dropout=0.5)
    plan = any_plan(task, "draws", microbatches=3)
    ours = planned(task, plan, monkeypatch)
    frozen = plainly(task, plan, lambda chain, x, step, microbatch: seeded(chain, x, 0, 0))
    assert ours.losses[0] != frozen.losses[0]


@pytest.mark.parametrize("name", ["gpt", pytest.param("normed", marks=pytest.mark.gallery)])
def test_no_plan_changes_the_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other splits, devices, schedules and recomputation with the same order of backwards give the same
    losses, gradients and parameters.
    """
    task = make(name, dropout=0.2)
    plans = [any_plan(task, f"any {seed}", microbatches=4) for seed in range(4)]
    assert len({(plan.split, plan.training.schedule) for plan in plans}) > 1
    runs = []
    for plan in plans:
        with monkeypatch.context() as patch:
            runs.append(planned(task, plan, patch))
    first = {
        backwards_from_the_last(plan): run for plan, run in reversed(list(zip(plans, runs, strict=True)))
    }
    compared = [
        differences(run, first[backwards_from_the_last(plan)]) for plan, run in zip(plans, runs, strict=True)
    ]
    assert compared == [[]] * len(runs)
    assert all(run.losses[0] == runs[0].losses[0] for run in runs)


@pytest.mark.gallery
def test_worker_processes_compute_the_same() -> None:
    """Three worker processes return the same losses and hold the same bytes as one process."""
    factory = partial(build, "gpt", **SMALL["gpt"], dropout=0.2)
    task = factory()
    found = profile(task, microbatch_size=2)
    plan = next(
        plan
        for seed in range(1000)
        if len((plan := random_plan(found, Random(seed), microbatches=4)).ranks) == 3
    )
    trainer = Trainer(task, plan, seed=SEED)
    here = [trainer.step(batch) for batch in batches(task, plan.training.batch_size)]
    losses, trace = train(factory, plan, steps=STEPS, seed=SEED)
    assert losses == here
    assert trace.peak_bytes == trainer.trace.peak_bytes


def test_a_longer_warm_up_changes_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager 1F1B adds gradients up in the order of plain training, with more microbatches in flight."""
    task = make("normed", dropout=0.2)
    plan = plan_of(task, [2, 3, 3], microbatches=6, schedule="eager-1f1b")
    assert differences(planned(task, plan, monkeypatch), plainly(task, plan, seeded)) == []
