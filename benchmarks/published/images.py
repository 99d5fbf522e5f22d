"""Image classifiers of the published rows: ResNets and their kin, VGG, and vision transformers, as chains.

Published as torchvision and timm build them: layers of a block are `nn` modules, activations work in place.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import convolutional
import torch
from rows import Inexpressible
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit import Task


class Residual(nn.Module):
    """A block of a ResNet: convolutions with batch norm, maybe squeeze and excitation, and the sum with its input."""

    def __init__(
        self, inputs: int, width: int, outputs: int, stride: int, groups: int, *, squeeze: bool
    ) -> None:
        super().__init__()
        basic = width == outputs and groups == 1
        kernels = ((3, inputs, width, stride), (3, width, outputs, 1))
        if not basic:
            kernels = ((1, inputs, width, 1), (3, width, width, stride), (1, width, outputs, 1))  # type: ignore[assignment]
        parts: list[nn.Module] = []
        for number, (size, before, after, step) in enumerate(kernels):
            grouped = groups if size == 3 else 1
            parts.append(nn.Conv2d(before, after, size, step, size // 2, groups=grouped, bias=False))
            parts.append(nn.BatchNorm2d(after))
            if number + 1 < len(kernels):
                parts.append(nn.ReLU(inplace=True))
        self.convolutions = nn.Sequential(*parts)
        self.squeeze = Squeeze(outputs) if squeeze else nn.Identity()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, inputs, height, width) to (batch, outputs, height / stride, width / stride)."""
        result = self.squeeze(self.convolutions(images))
        result = result + self.shortcut(images)
        return F.relu(result, inplace=True)


class Squeeze(nn.Module):
    """Squeeze and excitation: channels weighted by a small network on their means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, channels // 16, 1), nn.Conv2d(channels // 16, channels, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Map images to the same shape."""
        weights = self.up(F.relu(self.down(images.mean((2, 3), keepdim=True)), inplace=True))
        return images * weights.sigmoid()


class Classifier(nn.Module):
    """Means of channels to logits."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to (batch, classes)."""
        return self.linear(F.adaptive_avg_pool2d(images, 1).flatten(1))


def resnet(blocks: tuple[int, ...], basic: bool, width: float, groups: int, squeeze: bool) -> nn.Sequential:
    """Return a ResNet with these blocks in each group (He et al., 2016; Xie et al., 2017; Zagoruyko, 2016)."""
    chain: OrderedDict[str, nn.Module] = OrderedDict()
    chain["stem"] = nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    )
    inputs, number = 64, 0
    for group, count in enumerate(blocks):
        planes = 64 << group
        outputs = planes if basic else 4 * planes
        inner = planes if basic else int(planes * width) * groups
        for place in range(count):
            stride = 2 if place == 0 and group else 1
            chain[f"block{number}"] = Residual(inputs, inner, outputs, stride, groups, squeeze=squeeze)
            inputs, number = outputs, number + 1
    chain["classifier"] = Classifier(inputs, 1000)
    return nn.Sequential(chain)


_VGG = {"11": (1, 1, 2, 2, 2), "13": (2, 2, 2, 2, 2), "16": (2, 2, 3, 3, 3), "19": (2, 2, 4, 4, 4)}


def vgg(convolutions: tuple[int, ...], norm: bool) -> nn.Sequential:
    """Return a VGG (Simonyan and Zisserman, 2015), its classifier as convolutions, as timm has it."""
    chain: OrderedDict[str, nn.Module] = OrderedDict()
    inputs = 3
    for group, count in enumerate(convolutions):
        outputs = min(64 << group, 512)
        parts: list[nn.Module] = []
        for _ in range(count):
            parts.append(nn.Conv2d(inputs, outputs, 3, padding=1))
            parts += [nn.BatchNorm2d(outputs)] * norm
            parts.append(nn.ReLU(inplace=True))
            inputs = outputs
        chain[f"block{group}"] = nn.Sequential(*parts, nn.MaxPool2d(2, 2))
    chain["hidden"] = nn.Sequential(
        nn.Conv2d(512, 4096, 7), nn.ReLU(inplace=True), nn.Conv2d(4096, 4096, 1), nn.ReLU(inplace=True)
    )
    chain["classifier"] = Classifier(4096, 1000)
    return nn.Sequential(chain)


class Patches(nn.Module):
    """Images to tokens: patches, a class token, and positions."""

    def __init__(self, side: int, patch: int, hidden: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, hidden, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, hidden))
        self.positions = nn.Parameter(torch.zeros(1, (side // patch) ** 2 + 1, hidden))

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 3, side, side) to (batch, tokens, hidden)."""
        tokens = self.convolution(images).flatten(2).transpose(1, 2)
        return torch.cat((self.first.expand(len(tokens), -1, -1), tokens), dim=1) + self.positions


class VisionBlock(nn.Module):
    """A pre-norm block of timm's vision transformer of 2022; its attention keeps its scores."""

    def __init__(self, hidden: int, heads: int, ffn: int, *, scaled: bool) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)
        self.scales = nn.Parameter(torch.ones(2, hidden)) if scaled else None

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, tokens, hidden) to the same shape."""
        tokens = tokens + self.scale(self.attend(self.norm1(tokens)), 0)
        return tokens + self.scale(self.down(F.gelu(self.up(self.norm2(tokens)))), 1)

    def attend(self, tokens: Tensor) -> Tensor:
        """Attend to all tokens."""
        batch, length, hidden = tokens.shape
        joint = self.qkv(tokens).reshape(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = joint.permute(2, 0, 3, 1, 4).unbind(0)
        scores = (query @ key.transpose(-2, -1)) * (hidden // self.heads) ** -0.5
        return self.out((scores.softmax(dim=-1) @ value).transpose(1, 2).reshape(batch, length, hidden))

    def scale(self, tokens: Tensor, number: int) -> Tensor:
        """Scale a branch by learned numbers, if the model does."""
        return tokens if self.scales is None else tokens * self.scales[number]


class VisionHead(nn.Module):
    """The class token, normalised, to logits."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(hidden), nn.Linear(hidden, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (batch, tokens, hidden) to (batch, 1000)."""
        return self.linear(self.norm(tokens)[:, 0])


def vision_transformer(
    side: int, patch: int, layers: int, hidden: int, heads: int, ffn: int, scaled: bool
) -> nn.Sequential:
    """Return a vision transformer (Dosovitskiy et al., 2021); `scaled` as in DeiT III (Touvron et al., 2022)."""
    chain: OrderedDict[str, nn.Module] = OrderedDict()
    chain["patches"] = Patches(side, patch, hidden)
    for number in range(layers):
        chain[f"block{number}"] = VisionBlock(hidden, heads, ffn, scaled=scaled)
    chain["head"] = VisionHead(hidden)
    return nn.Sequential(chain)


_TRANSFORMERS = {
    "tiny": (12, 192, 3, 768), "small": (12, 384, 6, 1536), "base": (12, 768, 12, 3072),
    "large": (24, 1024, 16, 4096), "huge": (32, 1280, 16, 5120), "giant": (40, 1408, 16, 6144),
}  # fmt: skip
_RESNETS: dict[str, tuple[tuple[int, ...], bool]] = {
    "18": ((2, 2, 2, 2), True), "34": ((3, 4, 6, 3), True), "50": ((3, 4, 6, 3), False),
    "101": ((3, 4, 23, 3), False), "152": ((3, 8, 36, 3), False),
}  # fmt: skip


def build(name: str) -> Callable[[], nn.Module]:
    """Return the function that builds an image classifier by its name in timm.

    Raises:
        Inexpressible: a model that is not built here.
    """
    name = name.replace("-", "_").lower()
    if found := re.fullmatch(r"(vit|deit3?)_(tiny|small|base|large|huge|giant)_patch(\d+)_(\d+)", name):
        return partial(
            vision_transformer, int(found[4]), int(found[3]), *_TRANSFORMERS[found[2]], found[1] == "deit3"
        )
    found = re.fullmatch(r"(wide_)?(se_?)?(resnet|resnext)(\d+)(_2)?(_(\d+)x(\d+)d)?", name)
    if found and found[4] in _RESNETS:
        width = int(found[8]) / 64 if found[8] else 2.0 if found[1] else 1.0
        return partial(resnet, *_RESNETS[found[4]], width, int(found[7] or 1), bool(found[2]))
    if found := re.fullmatch(r"vgg(\d+)(_bn)?", name):
        return partial(vgg, _VGG[found[1]], bool(found[2]))
    if newer := convolutional.build(name):
        return newer
    raise Inexpressible("the architecture is not among those built here")


def batch(size: int, *, side: int, channels_last: bool) -> tuple[Tensor, Tensor]:
    """Return random images and classes."""
    images = torch.randn(size, 3, side, side)
    if channels_last:
        images = images.contiguous(memory_format=torch.channels_last)
    return images, torch.randint(1000, (size,))


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy."""
    return F.cross_entropy(logits, targets)


def task(name: str, notes: str, optimizer: Callable[..., torch.optim.Optimizer]) -> Task:
    """Return the task of an image classifier; `notes` say the side of images and the memory format.

    Raises:
        Inexpressible: a model that is not built here, or the size of images is not said.
    """
    side = re.search(r"images of (\d+)", notes)
    if side is None:
        raise Inexpressible("the size of images is not said")
    if other := re.search(rf"{name[-2:]}: (\d+)", notes):  # of one size of the model
        side = other
    last = "nhwc" in notes
    module = build(name)
    return Task(
        (lambda: module().to(memory_format=torch.channels_last)) if last else module,
        batch=partial(batch, side=int(side[1]), channels_last=last),
        loss=loss,
        optimizer=optimizer,
        name=name,
    )
