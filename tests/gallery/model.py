"""A model of the gallery: a module, its batches, its loss, and one sentence on its speciality."""

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

# The reason for numbers rounded otherwise than in plain training
TIED = "gradients of a parameter with users on several stages are summed in another order"
SENT = (
    "values and gradients between layers are contiguous, and kernels sum in another order where they are not"
)
# The reason for simulated peaks that are too high
SHARED = "simulator too high: a shared parameter with two users on one stage"
IN_PLACE = "simulator too high: gradients that layers pass on are added to in place"
# Reasons for peaks of dry run and emulated devices above the allocator's
PASSED_ON = "under a meter, a gradient that a sum passed on unchanged is not added to in place"
HOUSEHOLDER = "under a meter, the backward of Householder reflections does not run in place"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A small model, and the known differences when a plan trains it.

    Numbers are equal bit by bit, or `rounded` is the reason for a tolerance. All peaks are equal, or a reason
    for unequal ones is named: the simulator's may be `above` the dry run's, and those of the dry run and the
    meter are above the allocator's if they are `metered`. The simulator's are never below.
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
        """Return the reasons for differences."""
        return tuple(filter(None, (self.rounded, self.above, self.metered)))

    def task(self) -> Task:
        """Return the task of training the model."""
        return Task(self.module, batch=self.batch, loss=self.loss, optimizer=self.optimizer, name=self.name)
