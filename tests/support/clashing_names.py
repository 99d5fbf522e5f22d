"""A model whose parts have names that layers and generated code also use internally."""

from __future__ import annotations

import torch
from torch import Tensor, nn

CODE = "code", "operations", "functions", "wholes", "rewrite", "run", "generated_code"
GROUP = "group", "rank", "ranks"
LOCAL = "entered", "place", "value0", "constant0", "whole", "enter", "leave", "torch"
NAMES = (*CODE, *GROUP, *LOCAL)


class Weights(nn.Module):
    """Parameters of these names, all used in the result."""

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            setattr(self, name, nn.Parameter(torch.rand(8)))

    def forward(self, x: Tensor) -> Tensor:
        for number, name in enumerate(NAMES):
            x = x * getattr(self, name) + number
        return x.tanh() + torch.arange(8)


class Named(nn.Module):
    """Modules of these names, in sequence, and parameters."""

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            setattr(self, name, nn.Linear(8, 8))
        self.weights = Weights()

    def forward(self, x: Tensor) -> Tensor:
        for name in NAMES:
            x = x + getattr(self, name)(x).tanh()
        return x + self.weights(x)
