"""A captured model trained under any plan is the original model trained plainly on the same microbatches."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from captured_models import CAPTURED
from huggingface_models import TINY
from pipefit.capture import Task
from pipefit.profiler import profile
from pipefit.runtime import Trainer
from pipefit.zoo.huggingface import hf
from random_cases import accounts, plan_for, random_plan

STEPS, SIZE = 3, 2
TIED = ("tied", "repeated", "gpt2", "bert", "t5", "whisper", "albert", "bart")  # one parameter in two stages
LARGE = ("resnet50", "densenet121")  # of many operations: one plan is enough
NAMES = [*CAPTURED, *TINY]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums do not depend on the number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def task_of(name: str) -> Task:
    """The task of that name, with a module that exists."""
    task = CAPTURED[name]() if name in CAPTURED else hf(name, **TINY[name])
    torch.manual_seed(1)
    return replace(task, module=task.build(), optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9))


def call(module: nn.Module, inputs: Any) -> Any:
    """The module on inputs, as pipefit's Task documents it."""
    if isinstance(inputs, dict):
        return module(**inputs)
    return module(*inputs) if isinstance(inputs, tuple) else module(inputs)


def plain_training(task: Task, module: nn.Module, batches: list[Any], microbatches: int) -> list[float]:
    """Losses of plain gradient accumulation over the microbatches."""
    optimizer = task.optimizer([{"params": [p for p in module.parameters() if p.requires_grad]}])
    module.train()
    losses = []
    for batch in batches:
        total = torch.zeros(microbatches)
        for number in range(microbatches):
            inputs, targets = pytree.tree_map_only(Tensor, lambda t: t.split(SIZE)[number], batch)  # noqa: B023
            outputs = call(module, inputs)
            loss = (
                task.loss(outputs, targets) if task.loss else outputs if isinstance(outputs, Tensor) else outputs.loss
            )
            (loss / microbatches).backward()
            total[number] = loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.mean().item())
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_equals_plain_training(name: str) -> None:
    """Losses, parameters and buffers after three steps are those of the plain loop: to the bit, but for ties."""
    task, rng = task_of(name), Random(name)
    original = copy.deepcopy(task.module)
    found = profile(task, microbatch_size=SIZE)
    for _ in range(1 if name in LARGE else 2):
        plan = random_plan(found, rng, microbatches=rng.choice([2, 3]))
        count = plan.training.microbatches
        torch.manual_seed(5)
        batches = [task.batch(SIZE * count) for _ in range(STEPS)]
        ours, theirs = copy.deepcopy(original), copy.deepcopy(original)
        trainer = Trainer(replace(task, module=ours), plan)
        losses = [trainer.step(batch) for batch in batches]
        expected = plain_training(task, theirs, batches, count)
        exact = name not in TIED or len(plan.stages) == 1
        tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(
            losses, expected, rtol=1e-6 if exact else 1e-4, atol=0.0
        )  # a mean, rounded once more
        trained = trainer.state_dict()
        assert set(trained) == set(theirs.state_dict())
        for key, tensor in theirs.state_dict().items():
            torch.testing.assert_close(trained[key], tensor, **tolerance, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_plain_training(name: str) -> None:
    """Before any update, every gradient is the plain loop's, to the bit; tied ones are compared by their updates."""
    task, rng = task_of(name), Random(name)
    plan = random_plan(profile(task, microbatch_size=SIZE), rng, microbatches=2)
    ours, theirs = copy.deepcopy(task.module), copy.deepcopy(task.module)
    batch = task.batch(SIZE * 2)
    trainer = Trainer(replace(task, module=ours), plan, accumulate=2)
    trainer.step(batch)
    for number in range(2):
        inputs, targets = pytree.tree_map_only(Tensor, lambda t: t.split(SIZE)[number], batch)  # noqa: B023
        outputs = call(theirs.train(), inputs)
        loss = task.loss(outputs, targets) if task.loss else outputs if isinstance(outputs, Tensor) else outputs.loss
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
                    torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_exact(name: str) -> None:
    """The dry run's peaks are the allocator's own, to the byte, and predictions are within a hundredth."""
    found = list(accounts(plan_for(task_of(name), Random(name), name=name)))
    assert [account.dry_run_bytes for account in found] == [account.oracle_bytes for account in found], found[0].case
    assert max(abs(account.simulator_error) for account in found) <= 0.01
