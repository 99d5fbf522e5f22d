"""U-Net, whose long skips cross every cut.

Each layer passes on its result and all skips that later layers need.

Depth D, B convolutions a block: (2 D + 1) (B + 1) layers, each a convolution with dropout, instance norm and
leaky ReLU, or a step down, or up, or the head. An encoder's result waits from its step down to its decoder's
step up, the largest longest. U-Net (B, C) of the torchgpipe paper is `convolutions=B, width=C`, with 362.2
million parameters for (6, 72) and 2.21 billion for (11, 128). (Ronneberger et al., "U-Net: Convolutional
Networks for Biomedical Image Segmentation", 2015; Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism
for Training Giant Models", 2020.)
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.models.settings import (
    OptimizerName,
    Rate,
    Share,
    Size,
    checked,
    class_loss,
    initialise,
    multiple_of,
    optimizer_of,
    patched_batch,
)

Values = Tensor | tuple[Tensor, ...]  # an image, alone or with the remaining skips, the deepest last

_SGD_RATE = 0.1
_SLOPE = 0.01


@checked
def unet(
    *,
    depth: Size = 5,
    width: Annotated[int, multiple_of(2, least=2)] = 64,
    convolutions: Size = 5,
    num_classes: Size = 2,
    channels: Size = 3,
    image_size: Size = 192,
    dropout: Share = 0.1,
    optimizer: OptimizerName = "sgd",
    lr: Rate | None = None,
) -> Task:
    """U-Net on images (batch, channels, image_size, image_size): logits (batch, num_classes, image_size,
    image_size).

    `width` is the first encoder's channel count, which every level doubles; each of the `depth` levels halves
    the image and has a block of `convolutions` on either side. `dropout` drops whole channels. `lr` None
    means the optimizer's usual rate.

    Raises:
        UsageError: a setting has a wrong value, or the image cannot be halved that often.
    """
    _check_image(image_size, depth)
    return Task(
        partial(
            _chain,
            depth=depth,
            width=width,
            convolutions=convolutions,
            num_classes=num_classes,
            channels=channels,
            dropout=dropout,
        ),
        batch=partial(patched_batch, channels=channels, side=image_size, patch=2**depth, classes=num_classes),
        loss=class_loss,
        optimizer=optimizer_of(optimizer, lr, sgd_rate=_SGD_RATE),
        name="unet",
    )


class Convolution(nn.Module):
    """A 3 x 3 convolution, channel dropout, instance norm and leaky ReLU; the skips pass unchanged."""

    def __init__(self, inward: int, outward: int, dropout: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inward, outward, kernel_size=3, padding=1, bias=False)
        self.dropout = nn.Dropout2d(dropout)
        self.norm = nn.InstanceNorm2d(outward)
        self.relu = nn.LeakyReLU(_SLOPE)

    def forward(self, values: Values) -> Values:
        """Map (batch, inward, side, side) to (batch, outward, side, side)."""
        images, skips = _apart(values)
        return _together(self.relu(self.norm(self.dropout(self.conv(images)))), skips)


class Down(nn.Module):
    """Halving of the images; the full images are added to the skips."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(kernel_size=2)

    def forward(self, values: Values) -> Values:
        """Map (batch, channels, side, side) to (batch, channels, side / 2, side / 2) and the images
        themselves.
        """
        images, skips = _apart(values)
        return _together(self.pool(images), (*skips, images))


class Up(nn.Module):
    """Doubling of the images; the last skip's channels are appended to theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.upsample = nn.Upsample(scale_factor=2)

    def forward(self, values: Values) -> Values:
        """Map (batch, channels, side, side) and a skip to (batch, the sum of channels, 2 side, 2 side)."""
        images, (*others, skip) = _apart(values)
        return _together(torch.cat((self.upsample(images), skip), dim=1), tuple(others))


def _apart(values: Values) -> tuple[Tensor, tuple[Tensor, ...]]:
    return (values[0], values[1:]) if isinstance(values, tuple) else (values, ())


def _together(images: Tensor, skips: tuple[Tensor, ...]) -> Values:
    return (images, *skips) if skips else images


def _check_image(image_size: int, depth: int) -> None:
    """Check that the deepest images are whole and more than a pixel, on which instance norm cannot train."""
    step = 2**depth
    if image_size % step or image_size < 2 * step:
        below, above = max(image_size // step, 2) * step, max(image_size // step + 1, 2) * step
        near = f"{below}" if below == above else f"{below} or {above}"
        raise UsageError(
            f"unet: image_size={image_size} cannot be halved depth={depth} times to 2 x 2 pixels or more: "
            f"use a multiple of {step} such as {near}"
        )


def _chain(
    *, depth: int, width: int, convolutions: int, num_classes: int, channels: int, dropout: float
) -> nn.Sequential:
    def block(name: str, inward: int, inner: int, outward: int) -> OrderedDict[str, nn.Module]:
        sizes = [inward, *[inner] * (convolutions - 1), outward]
        return OrderedDict(
            (f"{name}_{place}", Convolution(before, after, dropout))
            for place, (before, after) in enumerate(pairwise(sizes), start=1)
        )

    widths = [width * 2**level for level in range(depth)]  # of each level's skip
    chain: OrderedDict[str, nn.Module] = OrderedDict()
    for level, (inward, outward) in enumerate(zip((channels, *widths), widths, strict=False), start=1):
        chain |= block(f"encode{level}", inward, outward, outward)
        chain[f"down{level}"] = Down()
    chain |= block("bottom", widths[-1], 2 * widths[-1], widths[-1])
    for level, skip in reversed(list(enumerate(widths, start=1))):
        chain[f"up{level}"] = Up()
        chain |= block(f"decode{level}", 2 * skip, skip // 2, skip // 2)
    chain["head"] = nn.Conv2d(width // 2, num_classes, kernel_size=1, bias=False)
    model = nn.Sequential(chain)
    model.apply(initialise)
    return model
