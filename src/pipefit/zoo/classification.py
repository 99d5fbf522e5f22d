"""What the classifiers of images and of pixels share: made-up inputs whose class can be learned, weights, the loss.

The batches need no data set and no download, and a model that trains on them visibly learns: the mean of an input, or
the brightness around a pixel, tells its class. A batch costs its own bytes and milliseconds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def noise_batch(size: int, *, shape: tuple[int, ...], classes: int) -> tuple[Tensor, Tensor]:
    """`size` inputs of `shape` (default float type), brighter the higher their class, and the classes (int64)."""
    targets = torch.randint(classes, (size,))
    return torch.randn(size, *shape) + _brightness(targets, classes).reshape(size, *(1 for _ in shape)), targets


def patched_batch(size: int, *, channels: int, side: int, patch: int, classes: int) -> tuple[Tensor, Tensor]:
    """`size` square images of patches of random classes, brighter the higher, and each pixel's class (int64).

    The images are (size, channels, side, side) in the default float type, the classes (size, side, side). `patch`, the
    side of a patch, divides `side`.
    """
    count = side // patch
    patches = torch.randint(classes, (size, count, 1, count, 1))
    targets = patches.expand(size, count, patch, count, patch).reshape(size, side, side)
    return torch.randn(size, channels, side, side) + _brightness(targets, classes)[:, None], targets


def _brightness(targets: Tensor, classes: int) -> Tensor:
    """From above -1 for the first class to below 1 for the last, in even steps."""
    return 2 * (targets + 0.5) / classes - 1


def class_loss(output: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of logits (batch, classes, ...), taken in float32 also for a model in half precision."""
    return F.cross_entropy(output.float(), targets)


def initialise(layer: nn.Module) -> None:
    """He et al. (2015) for what a ReLU follows, biases zero: any width trains, also without batch norm."""
    if isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(layer, nn.Linear):
        nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")
    if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
        nn.init.zeros_(layer.bias)
