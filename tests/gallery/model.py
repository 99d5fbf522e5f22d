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

# Why numbers may be rounded otherwise than in plain training
TIED = "gradients of a parameter with users on several stages are summed in another order"
SENT = (
    "values and gradients between layers are contiguous, and kernels sum in another order where they are not"
)
# Why the simulator's peaks may be too high
SHARED = "simulator too high: a shared parameter with two users on one stage"
# Why those of the dry run and of emulated devices may be above the allocator's
COPIED = "under a meter, backward of indexing and of several uses takes one copy more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A small model, and what is known to differ when it is trained by a plan.

    Numbers are equal bit by bit, or `rounded` is the reason for a tolerance. All peaks are equal, or a reason is named
    for which some are not: the simulator's may be `above` the dry run's, and those of the dry run and the meter are
    above the allocator's where they are `metered`. The simulator's are never below.
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

    @property
    def differences(self) -> tuple[str, ...]:
        """The reasons for what differs."""
        return tuple(filter(None, (self.rounded, self.above, self.metered)))

    def task(self) -> Task:
        """The task of training it."""
        return Task(self.module, batch=self.batch, loss=self.loss, optimizer=self.optimizer, name=self.name)
