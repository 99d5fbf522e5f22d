"""What a model of the gallery is: a module, its batches, its loss, and one sentence on what is special about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.capture import Task

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = partial(torch.optim.AdamW, lr=1e-3)

TIED = "gradients of a parameter with users on several stages are summed in another order"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A small model, and what is known to differ when it is trained by a plan.

    `rounded` is the reason for which numbers are compared with a tolerance: without one they are compared bit by bit.
    `above` is the reason for which the simulator's peaks may be above the dry run's, and `metered` that for which those
    of the dry run and the meter may be above the allocator's: without one they are equal.
    """

    name: str
    special: str
    module: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor] | None
    optimizer: Callable[..., torch.optim.Optimizer] = SGD
    size: int = 2
    rounded: str = ""
    above: str = ""
    metered: str = ""
    is_large: bool = False  # one plan is enough

    def task(self) -> Task:
        """The task of training it."""
        return Task(self.module, batch=self.batch, loss=self.loss, optimizer=self.optimizer, name=self.name)
