"""Model of two dtypes: frozen bfloat16 layers, each with a trained low-rank adapter."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipefit.capture import Task


class Adapted(nn.Module):
    """A frozen linear layer plus a product of two narrow ones."""

    def __init__(self, adapters: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.down = nn.Linear(64, 4, bias=False, dtype=adapters)
        self.up = nn.Linear(4, 64, bias=False, dtype=adapters)

    def forward(self, inputs: Tensor) -> Tensor:
        """Add the outputs of both."""
        found: Tensor = self.base(inputs) + self.up(self.down(inputs.to(self.up.weight.dtype))).to(
            inputs.dtype
        )
        return found


def adapted(adapters: torch.dtype = torch.float32) -> Task:
    """Build two such layers, with adapters of a dtype."""
    return Task(
        lambda: nn.Sequential(Adapted(adapters), Adapted(adapters)),
        batch=lambda size: (torch.ones(size, 64, dtype=torch.bfloat16), None),
        loss=lambda outputs, _: outputs.mean(),
        name="adapted",
    )
