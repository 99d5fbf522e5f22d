"""Newer convolutional classifiers of the published rows: EfficientNet, ConvNeXt, RegNet and DenseNet, as chains.

Sizes are those of the papers; blocks are timm's, and so is the ratio of squeeze and excitation, to a block's input.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Named = OrderedDict[str, nn.Module]


def convolved(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Return a convolution without bias and its batch norm."""
    return [
        nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class Excited(nn.Module):
    """Squeeze and excitation through `inner` channels."""

    def __init__(self, channels: int, inner: int, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.down, self.up, self.activation = (
            nn.Conv2d(channels, inner, 1),
            nn.Conv2d(inner, channels, 1),
            activation,
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map images to the same shape."""
        means = images.mean((2, 3), keepdim=True)
        return images * self.up(self.activation(self.down(means))).sigmoid()


class Summed(nn.Module):
    """The sum of a branch and its input, or of a shortcut of that, and maybe an activation."""

    def __init__(
        self, branch: nn.Module, shortcut: nn.Module | None = None, after: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, shortcut or nn.Identity()
        self.after = after or nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Map images to the shape of the branch."""
        return self.after(self.branch(images) + self.shortcut(images))


class Pooled(nn.Module):
    """Means of channels to logits, maybe normalised."""

    def __init__(self, channels: int, *, normed: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels) if normed else nn.Identity()
        self.linear = nn.Linear(channels, 1000)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to (batch, 1000)."""
        return self.linear(self.norm(F.adaptive_avg_pool2d(images, 1).flatten(1)))


# ---- EfficientNet (Tan and Le, 2019 and 2021): expansion, kernel, stride, outputs, blocks; V2's first are not divided

_FIRST = ((1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3),
          (6, 5, 2, 192, 4), (6, 3, 1, 320, 1))  # fmt: skip
_SMALL = ((0, 3, 1, 24, 2), (-4, 3, 2, 48, 4), (-4, 3, 2, 64, 4), (4, 3, 2, 128, 6), (6, 3, 1, 160, 9),
          (6, 3, 2, 256, 15))  # fmt: skip
_MIDDLE = ((0, 3, 1, 24, 3), (-4, 3, 2, 48, 5), (-4, 3, 2, 80, 5), (4, 3, 2, 160, 7), (6, 3, 1, 176, 14),
           (6, 3, 2, 304, 18), (6, 3, 1, 512, 5))  # fmt: skip
_SCALES = ((1.0, 1.0), (1.0, 1.1), (1.1, 1.2), (1.2, 1.4), (1.4, 1.8), (1.6, 2.2), (1.8, 2.6), (2.0, 3.1))


def rounded(channels: float) -> int:
    """Return a multiple of 8 that is not more than a tenth below."""
    result = max(8, int(channels + 4) // 8 * 8)
    return result + 8 * (result < 0.9 * channels)


def inverted(inputs: int, expansion: int, size: int, stride: int, outputs: int) -> nn.Module:
    """Return a block: expanded, convolved channel by channel, squeezed; or, if expansion is negative, at once."""
    inner = inputs * max(1, abs(expansion))
    if expansion == 0:
        parts = [*convolved(inputs, outputs, size, stride), nn.SiLU()]
    elif expansion < 0:
        parts = [*convolved(inputs, inner, size, stride), nn.SiLU(), *convolved(inner, outputs, 1)]
    else:
        parts = [*convolved(inputs, inner, 1), nn.SiLU()] if expansion > 1 else []
        parts += [
            *convolved(inner, inner, size, stride, inner),
            nn.SiLU(),
            Excited(inner, inputs // 4, F.silu),
        ]
        parts += convolved(inner, outputs, 1)
    branch = nn.Sequential(*parts)
    return Summed(branch) if stride == 1 and inputs == outputs else branch


def efficientnet(
    stages: Sequence[tuple[int, int, int, int, int]], width: float, depth: float, first: int
) -> nn.Sequential:
    """Return an EfficientNet, scaled in width and depth."""
    inputs, number = rounded(first * width), 0
    chain: Named = OrderedDict(stem=nn.Sequential(*convolved(3, inputs, 3, 2), nn.SiLU()))
    for expansion, size, stride, channels, blocks in stages:
        outputs = rounded(channels * width)
        for place in range(ceil(blocks * depth)):
            chain[f"block{number}"] = inverted(inputs, expansion, size, 1 if place else stride, outputs)
            inputs, number = outputs, number + 1
    features = rounded(1280 * max(1.0, width))
    chain["features"] = nn.Sequential(*convolved(inputs, features, 1), nn.SiLU())
    chain["classifier"] = Pooled(features)
    return nn.Sequential(chain)


# ---- ConvNeXt (Liu et al., 2022)

_NEXT = {"tiny": (96, 9), "small": (96, 27), "base": (128, 27), "large": (192, 27)}


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of images."""

    def forward(self, images: Tensor) -> Tensor:
        """Map images to the same shape."""
        return super().forward(images.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class NextBranch(nn.Module):
    """A convolution channel by channel, and an MLP on channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, images: Tensor) -> Tensor:
        """Map images to the same shape."""
        channels = self.norm(self.convolution(images).permute(0, 2, 3, 1))
        channels = self.down(F.gelu(self.up(channels))).permute(0, 3, 1, 2)
        return channels * self.scale.reshape(1, -1, 1, 1)


def convnext(width: int, third: int) -> nn.Sequential:
    """Return a ConvNeXt with `third` blocks in the third of its groups."""
    chain: Named = OrderedDict(stem=nn.Sequential(nn.Conv2d(3, width, 4, 4), ChannelNorm(width, eps=1e-6)))
    number = 0
    for group, count in enumerate((3, 3, third, 3)):
        if group:
            chain[f"down{group}"] = nn.Sequential(
                ChannelNorm(width, eps=1e-6), nn.Conv2d(width, 2 * width, 2, 2)
            )
            width *= 2
        for _ in range(count):
            chain[f"block{number}"] = Summed(NextBranch(width))
            number += 1
    chain["classifier"] = Pooled(width, normed=True)
    return nn.Sequential(chain)


# ---- RegNet (Radosavovic et al., 2020): channels of a group, widths, blocks; Y has squeeze and excitation

_REG = {
    "x_032": (48, (96, 192, 432, 1008), (2, 6, 15, 2)), "y_032": (24, (72, 216, 576, 1512), (2, 5, 13, 1)),
    "y_080": (56, (168, 448, 896, 2016), (2, 4, 10, 1)), "y_160": (112, (224, 448, 1232, 3024), (2, 4, 11, 1)),
    "y_320": (232, (232, 696, 1392, 3712), (2, 5, 12, 1)),
}  # fmt: skip


def regnet(each: int, widths: Sequence[int], depths: Sequence[int], squeezed: bool) -> nn.Sequential:
    """Return a RegNet whose grouped convolutions have `each` channels a group."""
    inputs, number = 32, 0
    chain: Named = OrderedDict(stem=nn.Sequential(*convolved(3, inputs, 3, 2), nn.ReLU(inplace=True)))
    for width, count in zip(widths, depths, strict=True):
        for place in range(count):
            stride = 1 if place else 2
            parts = [*convolved(inputs, width, 1), nn.ReLU(inplace=True)]
            parts += [*convolved(width, width, 3, stride, width // each), nn.ReLU(inplace=True)]
            parts += [Excited(width, inputs // 4, F.relu)] * squeezed
            branch = nn.Sequential(*parts, *convolved(width, width, 1))
            shortcut = nn.Sequential(*convolved(inputs, width, 1, stride)) if place == 0 else None
            chain[f"block{number}"] = Summed(branch, shortcut, nn.ReLU(inplace=True))
            inputs, number = width, number + 1
    chain["classifier"] = Pooled(inputs)
    return nn.Sequential(chain)


# ---- DenseNet (Huang et al., 2017)

_DENSE = {
    "121": (32, 64, (6, 12, 24, 16)),
    "161": (48, 96, (6, 12, 36, 24)),
    "201": (32, 64, (6, 12, 48, 32)),
}


class Dense(nn.Module):
    """Layers that each read the results of all before, joined anew."""

    def __init__(self, inputs: int, growth: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm2d(inputs + number * growth),
                nn.ReLU(inplace=True),
                *convolved(inputs + number * growth, 4 * growth, 1),
                nn.ReLU(inplace=True),
                nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
            )
            for number in range(layers)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Map images to the same height and width with more channels."""
        parts = [images]
        for layer in self.layers:
            parts.append(layer(torch.cat(parts, 1)))
        return torch.cat(parts, 1)


def densenet(growth: int, channels: int, blocks: Sequence[int]) -> nn.Sequential:
    """Return a DenseNet; each dense block is a layer of the chain."""
    stem = nn.Sequential(*convolved(3, channels, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    chain: Named = OrderedDict(stem=stem)
    for number, count in enumerate(blocks):
        chain[f"block{number}"] = Dense(channels, growth, count)
        channels += count * growth
        parts = [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        if number + 1 < len(blocks):
            parts += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2, 2)]
            channels //= 2
        chain[f"after{number}"] = nn.Sequential(*parts)
    chain["classifier"] = Pooled(channels)
    return nn.Sequential(chain)


def build(name: str) -> Callable[[], nn.Module] | None:
    """Return the function that builds a classifier by its name in timm; None if it is not built here."""
    if found := re.fullmatch(r"(?:tf_)?efficientnet_b([0-7])", name):
        return partial(efficientnet, _FIRST, *_SCALES[int(found[1])], 32)
    if found := re.fullmatch(r"(?:tf_)?efficientnetv2_([sm])", name):
        return partial(efficientnet, _SMALL if found[1] == "s" else _MIDDLE, 1.0, 1.0, 24)
    if found := re.fullmatch(r"convnext_(tiny|small|base|large)(_384_in22ft1k)?", name):
        return partial(convnext, *_NEXT[found[1]])
    if (found := re.fullmatch(r"regnet([xy]_\d+)", name)) and found[1] in _REG:
        return partial(regnet, *_REG[found[1]], found[1].startswith("y"))
    if (found := re.fullmatch(r"densenet(\d+)", name)) and found[1] in _DENSE:
        return partial(densenet, *_DENSE[found[1]])
    return None
