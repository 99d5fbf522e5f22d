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
        precision: the dtype that floating-point parameters, buffers and data are cast to; None leaves them as they are.
        name: for people, and for files.
    """

    module: nn.Module | Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, Any]] = field(kw_only=True)
    loss: Callable[[Any, Any], Tensor] = field(kw_only=True)
    optimizer: Callable[..., Optimizer] = field(kw_only=True, default=torch.optim.AdamW)
    precision: torch.dtype | None = field(kw_only=True, default=None)
    name: str = field(kw_only=True, default="model")

    def build(self) -> nn.Module:
        """The module itself, in the task's precision; a factory is called."""
        module = self.module if isinstance(self.module, nn.Module) else self.module()
        return module if self.precision is None else module.to(self.precision)

    def cast(self, tensor: Tensor) -> Tensor:
        """`tensor` in the task's precision, if it holds floating-point numbers."""
        return tensor.to(self.precision) if self.precision is not None and tensor.is_floating_point() else tensor
