"""Oracle for master weights: a plain loop that keeps the float32 copies of a half-precision module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

FIRST_SCALE = 2.0**16  # of the loss, in float16


class ByHand:
    """Plain training of a half-precision module with explicit float32 copies."""

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: Callable[..., torch.optim.Optimizer],
        *,
        groups: Callable[[str, Tensor], dict[str, Any]] = lambda name, parameter: {},
        clip_norm: float | None = None,
        microbatches: int = 2,
    ) -> None:
        self.module, self.dtype, self.loss = module.to(dtype), dtype, loss
        self.clip_norm, self.microbatches = clip_norm, microbatches
        self.names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        self.halves = {name: module.get_parameter(name) for name in self.names}
        self.copies = {
            name: half.detach().float().clone().requires_grad_() for name, half in self.halves.items()
        }
        self.optimizer = optimizer(
            [{"params": [copy], **groups(name, self.halves[name])} for name, copy in self.copies.items()]
        )
        self.scale = FIRST_SCALE if dtype is torch.float16 else 1.0
        self.norm = 0.0

    def step(self, batch: tuple[Tensor, Tensor]) -> bool:
        """Take one step; return whether it was skipped."""
        inputs, targets = (part.to(self.dtype) if part.is_floating_point() else part for part in batch)
        size = len(inputs) // self.microbatches
        for x, y in zip(inputs.split(size), targets.split(size), strict=True):
            loss = self.loss(self.module(x), y)
            loss.backward(torch.tensor(self.scale / self.microbatches, dtype=loss.dtype))
        gradients = {
            n: half.grad.float() / self.scale for n, half in self.halves.items() if half.grad is not None
        }
        self.module.zero_grad()
        if not all(gradient.isfinite().all() for gradient in gradients.values()):
            self.scale /= 2
            return True
        norms = [gradients[n].norm() if n in gradients else torch.zeros(()) for n in sorted(self.names)]
        norm = torch.stack(norms).norm()
        self.norm = norm.item()
        factor = 1.0 if self.clip_norm is None else (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        for name, gradient in gradients.items():
            self.copies[name].grad = gradient * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for name, copy in self.copies.items():
                self.halves[name].copy_(copy)
        return False
