"""What to train: a module, its batches, its loss and its optimizer, as the user has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class Task:
    """A training task.

    Args:
        module: an `nn.Sequential` whose layers pass a tensor or a tuple of tensors, or a function that builds one. A
            function is called under the reader's own mode, so that a model too large for this machine is never
            allocated.
        batch: batch size -> (inputs, targets), tensors or tuples of tensors with the samples along dimension 0. Draws
        from
            torch's default generator, so that a seed before the call fixes the batch.
        loss: (outputs, targets) -> mean loss over the samples, a scalar.
        optimizer: parameters or parameter groups -> `torch.optim` optimizer.
        name: for people, and for files.
    """

    module: nn.Module | Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, Any]] = field(kw_only=True)
    loss: Callable[[Any, Any], Tensor] = field(kw_only=True)
    optimizer: Callable[..., Optimizer] = field(kw_only=True, default=torch.optim.AdamW)
    name: str = field(kw_only=True, default="model")

    def build(self) -> nn.Module:
        """The module itself; a factory is called."""
        return self.module if isinstance(self.module, nn.Module) else self.module()
