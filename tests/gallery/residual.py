"""Residual, dense and U-shaped networks of convolutions, as torchvision writes them."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gallery.model import ADAM, Model


class Residual(nn.Module):
    """Two strided convolutions with batch norm, added to a projection of their input."""

    def __init__(self, inward: int, outward: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inward, outward, 3, stride=2, padding=1, bias=False)
        self.second = nn.Conv2d(outward, outward, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outward), nn.BatchNorm2d(outward)
        self.shortcut = nn.Conv2d(inward, outward, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.first(x)))
        return F.relu(self.norm2(self.second(inner)) + self.shortcut(x))


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut, activations in place (He et al., 2016)."""

    def __init__(self, inward: int, outward: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inward, outward, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outward)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outward, outward, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outward)
        self.downsample = None
        if stride != 1 or inward != outward:
            self.downsample = nn.Sequential(
                nn.Conv2d(inward, outward, 1, stride, bias=False), nn.BatchNorm2d(outward)
            )

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += kept
        return self.relu(out)


class ResNet(nn.Module):
    """A residual network as torchvision writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1, self.relu, self.maxpool = nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8))
        self.layer2 = nn.Sequential(BasicBlock(8, 16, 2), BasicBlock(16, 16))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layer2(self.layer1(x))), 1))


class DenseLayer(nn.Module):
    """Norm, activation and convolution of all earlier outputs."""

    def __init__(self, inward: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(inward), nn.Conv2d(inward, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.conv(F.relu(self.norm(torch.cat(features, 1)), inplace=True))


class DenseNet(nn.Module):
    """Blocks whose layers see the outputs of all layers before (Huang et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block = nn.ModuleDict({f"denselayer{n}": DenseLayer(8 + 4 * n, 4) for n in range(4)})
        self.norm, self.classifier = nn.BatchNorm2d(24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.block.values():
            features.append(layer(features))
        out = F.relu(self.norm(torch.cat(features, 1)), inplace=True)
        return self.classifier(F.adaptive_avg_pool2d(out, 1).flatten(1))


class Bottleneck(nn.Module):
    """A narrow convolution between two of size one, and a shortcut (He et al., 2016)."""

    def __init__(self, inward: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outward = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inward, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outward, 1, bias=False), nn.BatchNorm2d(outward)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inward != outward:
            self.downsample = nn.Sequential(
                nn.Conv2d(inward, outward, 1, stride, bias=False), nn.BatchNorm2d(outward)
            )

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))))
        out = self.bn3(self.conv3(out))
        out += kept
        return self.relu(out)


class ResNet50(nn.Module):
    """ResNet-50's blocks as torchvision arranges them, four channels wide."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1, self.relu, self.maxpool = (
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        inward = width
        for number, blocks in enumerate((3, 4, 6, 3)):
            parts = []
            for block in range(blocks):
                parts.append(Bottleneck(inward, width << number, 2 if number and not block else 1))
                inward = 4 * width << number
            self.add_module(f"layer{number + 1}", nn.Sequential(*parts))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(inward, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class DenseNet121Layer(nn.Module):
    """Norm, activation, convolution, twice, on all earlier outputs."""

    def __init__(self, inward: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inward), nn.Conv2d(inward, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = (
            nn.BatchNorm2d(4 * growth),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.conv2(self.relu(self.norm2(self.conv1(self.relu(self.norm1(torch.cat(features, 1)))))))


class DenseNet121Block(nn.ModuleDict):
    """A block whose layers take the outputs of all layers before."""

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseBlocks(nn.Module):
    """Dense blocks with transitions between them as torchvision arranges them, two channels of growth."""

    def __init__(self, blocks: tuple[int, ...], growth: int = 2) -> None:
        super().__init__()
        width = 2 * growth
        self.features = nn.Sequential()
        self.features.add_module("conv0", nn.Conv2d(3, width, 3, padding=1, bias=False))
        for number, layers in enumerate(blocks, 1):
            parts = {
                f"denselayer{n + 1}": DenseNet121Layer(width + n * growth, growth) for n in range(layers)
            }
            self.features.add_module(f"denseblock{number}", DenseNet121Block(parts))
            width += layers * growth
            if number < len(blocks):
                transition = nn.Sequential(
                    nn.BatchNorm2d(width),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(width, width // 2, 1),
                    nn.AvgPool2d(2),
                )
                self.features.add_module(f"transition{number}", transition)
                width //= 2
        self.norm, self.classifier = nn.BatchNorm2d(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm(self.features(x)), inplace=True)
        return self.classifier(F.adaptive_avg_pool2d(out, 1).flatten(1))


def _double(inward: int, outward: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inward, outward, 3, padding=1), nn.GroupNorm(2, outward), nn.SiLU(inplace=True)
    )


class UNet(nn.Module):
    """Long skips from the way down to the way up (Ronneberger et al., 2015)."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [3, 8, 16, 32]
        self.down = nn.ModuleList(_double(a, b) for a, b in itertools.pairwise(sizes))
        self.up = nn.ModuleList(_double(a, b) for a, b in ((32 + 16, 16), (16 + 8, 8)))
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for number, part in enumerate(self.down):
            x = part(F.max_pool2d(x, 2) if number else x)
            kept.append(x)
        for part, skip in zip(self.up, reversed(kept[:-1]), strict=True):
            x = part(torch.cat([F.interpolate(x, scale_factor=2), skip], 1))
        return self.head(x)


def images(size: int, side: int = 16) -> tuple[Tensor, Tensor]:
    """Draw noise, and one of ten classes."""
    return torch.randn(size, 3, side, side), torch.randint(10, (size,))


def strided() -> nn.Module:
    """Build a chain with batch and group norm."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), Residual(16, 24), Residual(24, 32)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1)),
    )


RESIDUAL = (
    Model(
        name="strided", special="residual blocks in a chain, batch and group norm, RMSprop",
        module=strided, batch=lambda size: (torch.randn(size, 3, 33, 33), torch.randn(size, 1)),
        loss=F.mse_loss, optimizer=torch.optim.RMSprop,
    ),
    Model(
        name="resnet", special="batch norm, activations and additions in place",
        module=ResNet, batch=images, loss=F.cross_entropy,
    ),
    Model(
        name="resnet50", special="sixteen bottlenecks",
        module=ResNet50, batch=partial(images, side=64), loss=F.cross_entropy, is_large=True,
    ),
    Model(
        name="densenet", special="many values cross at once",
        module=DenseNet, batch=images, loss=F.cross_entropy,
    ),
    Model(
        name="dense blocks", special="seven dense layers in three blocks",
        module=lambda: DenseBlocks((2, 3, 2)), batch=partial(images, side=64), loss=F.cross_entropy, optimizer=ADAM,
    ),
    Model(
        name="densenet121", special="fifty-eight dense layers",
        module=lambda: DenseBlocks((6, 12, 24, 16)), batch=partial(images, side=64), loss=F.cross_entropy,
        is_large=True,
    ),
    Model(
        name="unet", special="values travel past many layers",
        module=UNet, batch=lambda size: (torch.randn(size, 3, 16, 16), torch.randn(size, 1, 16, 16)), loss=F.mse_loss,
    ),
)  # fmt: skip
