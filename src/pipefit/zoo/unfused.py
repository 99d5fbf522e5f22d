"""Layer norm and GELU of plain operations, as models were written before PyTorch 1.2 had kernels for them.

Every operation saves what its own backward needs. Of an input of n bytes, GELU saves 3 n where `nn.GELU` saves n, and
layer norm 3 n and a number a row where `nn.LayerNorm` saves n and two. The numbers are the same up to rounding.
(Hugging Face's first PyTorch BERT, 2018, and NVIDIA's and PipeDream's models made from it.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class UnfusedGELU(nn.Module):
    """x / 2 times 1 + erf(x / sqrt 2), operation by operation."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Any shape to the same shape."""
        return hidden * 0.5 * (1.0 + torch.erf(hidden / math.sqrt(2.0)))


class UnfusedLayerNorm(nn.Module):
    """Layer norm over the last dimension, with the parameters and the numbers of `nn.LayerNorm`."""

    def __init__(self, hidden: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden))
        self.bias = nn.Parameter(torch.zeros(hidden))

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., hidden) to the same shape."""
        mean = hidden.mean(-1, keepdim=True)
        variance = (hidden - mean).pow(2).mean(-1, keepdim=True)
        normal = (hidden - mean) / torch.sqrt(variance + self.eps)
        return self.weight * normal + self.bias
