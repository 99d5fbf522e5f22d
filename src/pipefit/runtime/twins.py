"""Fake twins of a task's model and data: same shapes, no bytes."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.capture.chain import Chain, capture
from pipefit.capture.task import Task
from pipefit.errors import UsageError
from pipefit.runtime.target import FakeTarget

Sample = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


def fake_chain(task: Task, fake: FakeTarget) -> Chain:
    """The task's chain over fake tensors on `fake.device`; call it inside `fake`. An existing module stays as it is."""
    existing = task.module
    module = _twin(existing, fake) if isinstance(existing, nn.Module) else task.build().to(fake.device)
    return capture(replace(task, module=module))


def sample(task: Task, size: int, *, seed: int = 0) -> Sample:
    """A real batch of `size` samples, as (inputs, targets) tuples of tensors. The caller's random state is left alone.

    Raises:
        UsageError: the task's batch function returns something else than a pair of tensors or tuples of tensors.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        batch = task.batch(size)
    inputs, targets = pair(batch, f"the batch function of {task.name} must return")
    return tuple(map(task.cast, inputs)), tuple(map(task.cast, targets))


def pair(batch: Any, who: str) -> Sample:
    """`batch` as (inputs, targets), each a tuple of tensors.

    Raises:
        UsageError: it is something else; begins with `who`.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise UsageError(f"{who} a pair (inputs, targets), not {_describe(batch)}")
    return tensors(batch[0], "the inputs"), tensors(batch[1], "the targets")


def _describe(batch: Any) -> str:
    return f"{len(batch)} of them" if isinstance(batch, (tuple, list)) else f"a {type(batch).__name__}"


def tensors(part: Any, what: str) -> tuple[Tensor, ...]:
    """`part` as a tuple of tensors.

    Raises:
        UsageError: it is neither a tensor nor a tuple or list of tensors.
    """
    values = tuple(part) if isinstance(part, (tuple, list)) else (part,)
    strange = next((value for value in values if not isinstance(value, Tensor)), None)
    if strange is not None or not values:
        raise UsageError(f"{what} of a batch must be a tensor or a tuple of tensors, not a {type(strange).__name__}")
    return values


def _twin(module: nn.Module, fake: FakeTarget) -> nn.Module:
    """A deep copy of `module` whose parameters and buffers are fake."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(fake.fake(parameter), requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = fake.fake(buffer)
    return copy.deepcopy(module, memo)
