"""Fake twins of a task's model and data: same shapes, no bytes."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from pipefit.capture import Chain, capture
from pipefit.capture.task import Task
from pipefit.errors import UsageError
from pipefit.runtime.target import FakeTarget

Sample = tuple[Any, Any]


def fake_chain(task: Task, fake: FakeTarget, sample: Sample, *, training: bool = True) -> Chain:
    """The task's chain for microbatches like `sample`, over fake tensors on `fake.device`; call it inside `fake`. An
    existing module stays as it is.
    """
    existing = task.module
    module = _twin(existing, fake) if isinstance(existing, nn.Module) else _built(task, fake)
    return capture(replace(task, module=in_mode(module, training)), *sample)


def in_mode(module: nn.Module, training: bool) -> nn.Module:
    """`module` in training mode, or in evaluation. Parts that its owner keeps in evaluation while it trains stay so."""
    return module if training and module.training else module.train(training)


def sample(task: Task, size: int, *, seed: int = 0) -> Sample:
    """A real batch of `size` samples, as the task makes it: (inputs, targets). The caller's random state is left alone.

    Raises:
        UsageError: the task's batch function returns something else than a pair.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        batch = task.batch(size)
    inputs, targets = pair(batch, f"the batch function of {task.name} must return")
    return pytree.tree_map_only(Tensor, task.cast, inputs), pytree.tree_map_only(Tensor, task.cast, targets)


def pair(batch: Any, who: str) -> Sample:
    """`batch` as (inputs, targets).

    Raises:
        UsageError: it is something else; begins with `who`.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise UsageError(f"{who} a pair (inputs, targets), not {_describe(batch)}")
    return batch[0], batch[1]


def _describe(batch: Any) -> str:
    return f"{len(batch)} of them" if isinstance(batch, (tuple, list)) else f"a {type(batch).__name__}"


def _built(task: Task, fake: FakeTarget) -> nn.Module:
    """What the task's factory builds, fake. One that reads numbers from a tensor builds on torch's `meta` device, where
    tensors without a model's size can stay real.
    """
    try:
        return task.build().to(fake.device)
    except DataDependentOutputException:
        with _disable_current_modes(), torch.device("meta"):
            built = task.build()
        return _twin(built, fake)


def _twin(module: nn.Module, fake: FakeTarget) -> nn.Module:
    """A deep copy of `module` whose parameters and buffers are fake."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(fake.fake(parameter), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = fake.fake(buffer)
    return copy.deepcopy(module, memo)
