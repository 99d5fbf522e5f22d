"""What tracing, profiling and training start from: a batch as the task makes it, and its module as it trains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipefit.capture.caller import refuse_gradients
from pipefit.capture.records import opened
from pipefit.capture.task import Task
from pipefit.errors import UsageError

Sample = tuple[Any, Any]


def in_mode(module: nn.Module, training: bool) -> nn.Module:
    """`module` in the mode in which its owner trains it, which is the one it is in, or in evaluation."""
    return module if training else module.eval()


def sample(task: Task, size: int, *, seed: int = 0) -> Sample:
    """A real batch of `size` samples, as the task makes it: (inputs, targets). The caller's random state is left alone.

    Raises:
        UsageError: the task's batch function returns something else than a pair, or tensors that wait for a gradient.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        batch = task.batch(size)
    inputs, targets = pair(batch, f"the batch function of {task.name} must return")
    refuse_gradients((inputs, targets), task.name)
    return pytree.tree_map_only(Tensor, task.cast, inputs), pytree.tree_map_only(Tensor, task.cast, targets)


def pair(batch: Any, who: str) -> Sample:
    """`batch` as (inputs, targets), each a tree that torch knows.

    Raises:
        UsageError: it is something else; begins with `who`.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise UsageError(f"{who} a pair (inputs, targets), not {_describe(batch)}")
    return opened(batch[0]), opened(batch[1])


def _describe(batch: Any) -> str:
    return f"{len(batch)} of them" if isinstance(batch, (tuple, list)) else f"a {type(batch).__name__}"
