"""A captured model trained under any plan is the original model trained plainly on the same microbatches."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from captured_models import CAPTURED, LARGE
from huggingface_models import TINY
from pipefit.capture import Task
from pipefit.plans import Plan
from pipefit.profiler import profile
from pipefit.profiles import ModelProfile
from pipefit.runtime import Trainer
from pipefit.zoo.huggingface import hf
from random_cases import accounts, plan_for, random_plan

STEPS, SIZE = 3, 2
TIED = ("tied", "repeated", "gpt2", "bert", "t5", "whisper", "albert", "bart")  # one parameter in two stages
LONG = ("resnet50", *LARGE)  # of many operations: one plan is enough
NAMES = [*CAPTURED, *TINY, *(pytest.param(name, marks=pytest.mark.gallery) for name in LARGE)]
# All tests of one model run one after the other, so that it is profiled once.
of_every_model = pytest.mark.parametrize("name", NAMES, scope="module")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums do not depend on the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def task_of(name: str) -> Task:
    """The task of that name, with a module that exists."""
    task = hf(name, **TINY[name]) if name in TINY else {**CAPTURED, **LARGE}[name]()
    torch.manual_seed(1)
    return replace(task, module=task.build(), optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9))


@lru_cache(maxsize=1)
def profiled(name: str) -> tuple[Task, ModelProfile]:
    """The task of that name, whose module tests copy before they train it, and what it costs."""
    task = task_of(name)
    return task, profile(task, microbatch_size=SIZE)


def call(module: nn.Module, inputs: Any) -> Any:
    """The module on inputs, as pipefit's Task documents it."""
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


ROUNDED = {"rtol": 1e-3, "atol": 1e-5}


def plain_training(task: Task, module: nn.Module, batches: list[Any], plan: Plan) -> list[float]:
    """Losses of plain gradient accumulation over the microbatches, in the order of the plan's schedule."""
    optimizer = task.optimizer([{"params": [p for p in module.parameters() if p.requires_grad]}])
    module.train()
    means = []
    for batch in batches:
        losses = plain_losses(task, module, batch, plan.training.microbatches)
        for loss in backwards(losses, plan):
            (loss / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
        means.append(torch.stack([loss.detach() for loss in losses]).mean().item())
    return means


def plain_losses(task: Task, module: nn.Module, batch: Any, microbatches: int) -> list[Tensor]:
    """The loss of every microbatch, with its graph."""
    losses = []
    for number in range(microbatches):
        inputs, targets = pytree.tree_map_only(Tensor, lambda t: t.split(SIZE)[number], batch)  # noqa: B023
        outputs = call(module, inputs)
        losses.append(
            task.loss(outputs, targets) if task.loss else outputs if isinstance(outputs, Tensor) else outputs.loss
        )
    return losses


EXACT = {"rtol": 0.0, "atol": 0.0}


def backwards(losses: list[Tensor], plan: Plan) -> list[Tensor]:
    """The losses in the order of the schedule's backwards: torchgpipe's begin with the last."""
    return losses[::-1] if plan.training.schedule == "torchgpipe" else losses


@of_every_model
def test_equals_plain_training(name: str) -> None:
    """Losses, parameters and buffers after three steps are those of the plain loop: to the bit, but for ties."""
    (task, found), rng = profiled(name), Random(name)
    for _ in range(1 if name in LONG else 2):
        plan = random_plan(found, rng, microbatches=rng.choice([2, 3]))
        count = plan.training.microbatches
        torch.manual_seed(5)
        batches = [task.batch(SIZE * count) for _ in range(STEPS)]
        ours, theirs = copy.deepcopy(task.module), copy.deepcopy(task.module)
        trainer = Trainer(replace(task, module=ours), plan)
        losses = [trainer.step(batch) for batch in batches]
        expected = plain_training(task, theirs, batches, plan)
        tolerance = EXACT if name not in TIED or len(plan.stages) == 1 else ROUNDED
        rounded_once = max(tolerance["rtol"], 1e-6)  # a mean is
        torch.testing.assert_close(losses, expected, rtol=rounded_once, atol=0.0)
        trained = trainer.state_dict()
        assert set(trained) == set(theirs.state_dict())
        for key, tensor in theirs.state_dict().items():
            torch.testing.assert_close(trained[key], tensor, **tolerance, msg=lambda text, key=key: f"{key}: {text}")


@of_every_model
def test_gradients_equal_plain_training(name: str) -> None:
    """Before any update, every gradient is the plain loop's, to the bit; tied ones are compared by their updates."""
    (task, found), rng = profiled(name), Random(name)
    plan = random_plan(found, rng, microbatches=2)
    ours, theirs = copy.deepcopy(task.module), copy.deepcopy(task.module)
    torch.manual_seed(5)
    batch = task.batch(SIZE * 2)
    trainer = Trainer(replace(task, module=ours), plan, accumulate=2)
    trainer.step(batch)
    for loss in backwards(plain_losses(task, theirs.train(), batch, 2), plan):
        (loss / 4).backward()
    expected = {name: p.grad for name, p in theirs.named_parameters(remove_duplicate=False)}
    for stage in trainer.stages:
        for layer in stage.layers:
            for local, parameter in layer.module.named_parameters():
                if any(parameter is tied for tied in stage.shared.values()):
                    continue  # summed over the stages only when an update follows
                wanted = expected[layer.originals[local]]
                assert (parameter.grad is None) == (wanted is None), layer.originals[local]
                if wanted is not None:
                    torch.testing.assert_close(parameter.grad, wanted, **EXACT)


@of_every_model
def test_memory_is_exact(name: str) -> None:
    """The dry run's peaks are the allocator's own, to the byte. Predictions are too, but where layers of a stage share
    a parameter or hand on gradients of another layout: there they are bounds, at most a sixteenth too high.
    """
    found = list(accounts(plan_for(task_of(name), Random(name), name=name)))
    assert [account.dry_run_bytes for account in found] == [account.oracle_bytes for account in found], found[0].case
    assert all(-0.001 <= account.simulator_error <= 1 / 16 for account in found)
