"""What the classifiers share: made-up inputs whose class can be learned, and the loss.

The batches need no data set and no download, and a model that trains on them visibly learns: the mean of an input tells
its class. A batch costs its own bytes and milliseconds.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def noise_batch(size: int, *, shape: tuple[int, ...], classes: int) -> tuple[Tensor, Tensor]:
    """`size` inputs of `shape` (default float type), brighter the higher their class, and the classes (int64)."""
    targets = torch.randint(classes, (size,))
    brightness = 2 * (targets + 0.5) / classes - 1
    return torch.randn(size, *shape) + brightness.reshape(size, *(1 for _ in shape)), targets


def class_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of logits (batch, classes), taken in float32 also for a model in half precision."""
    return F.cross_entropy(output.float(), targets)
