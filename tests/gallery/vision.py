"""Models of images, videos and point clouds."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gallery.model import ADAM, PASSED_ON, Model


def images(size: int, side: int = 16) -> tuple[Tensor, Tensor]:
    """Draw noise, and one of ten classes."""
    return torch.randn(size, 3, side, side), torch.randint(10, (size,))


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, 0.1, F.gelu, batch_first=True, norm_first=True)
            for _ in range(3)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class ConvNextBlock(nn.Module):
    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 7, padding=3, groups=width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale, self.drop = nn.Parameter(torch.full((width,), 0.1)), drop

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        inner = (self.scale * self.down(F.gelu(self.up(inner)))).permute(0, 3, 1, 2)
        if self.training and self.drop:
            kept = torch.rand(len(x), 1, 1, 1) >= self.drop
            inner = inner * kept / (1 - self.drop)
        return x + inner


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 2, stride=2)
        self.first = nn.Sequential(ConvNextBlock(8, 0.0), ConvNextBlock(8, 0.2))
        self.down = nn.Conv2d(8, 12, 2, stride=2)
        self.second = nn.Sequential(ConvNextBlock(12, 0.2), ConvNextBlock(12, 0.3))
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.down(self.first(self.stem(x)))).mean((-2, -1)))


class InvertedResidual(nn.Module):
    def __init__(self, inward: int, outward: int, stride: int) -> None:
        super().__init__()
        wide = 3 * inward
        self.expand = nn.Sequential(
            nn.Conv2d(inward, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish(True)
        )
        self.depthwise = nn.Sequential(
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.Hardswish(True),
        )
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(wide, 4, 1),
            nn.ReLU(True),
            nn.Conv2d(4, wide, 1),
            nn.Hardsigmoid(True),
        )
        self.project = nn.Sequential(nn.Conv2d(wide, outward, 1, bias=False), nn.BatchNorm2d(outward))
        self.adds = stride == 1 and inward == outward

    def forward(self, x: Tensor) -> Tensor:
        inner = self.depthwise(self.expand(x))
        inner = self.project(inner * self.squeeze(inner))
        return x + inner if self.adds else inner


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish(True))
        self.blocks = nn.Sequential(
            InvertedResidual(8, 8, 1), InvertedResidual(8, 12, 2), InvertedResidual(12, 12, 1)
        )
        self.head = nn.Sequential(nn.Linear(12, 20), nn.Hardswish(True), nn.Dropout(0.2), nn.Linear(20, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1).flatten(1))


class ShuffleBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.branch = nn.Sequential(
            *(nn.Conv2d(half, half, 1), nn.BatchNorm2d(half), nn.ReLU(True)),
            *(nn.Conv2d(half, half, 3, padding=1, groups=half), nn.BatchNorm2d(half)),
        )

    def forward(self, x: Tensor) -> Tensor:
        kept, changed = x.chunk(2, 1)
        x = torch.cat([kept, self.branch(changed)], 1)
        return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


class ShuffleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, 2, 1)
        self.blocks = nn.ModuleList(ShuffleBlock(12) for _ in range(3))
        self.head = nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.amax((2, 3)))


class WindowAttention(nn.Module):
    """Attention in windows of 4 x 4, every other time shifted by half a window (Liu et al., 2021)."""

    def __init__(self, width: int, shift: int) -> None:
        super().__init__()
        self.shift, self.norm = shift, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(0.02 * torch.randn(49, 2))
        place = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        away = place[:, :, None] - place[:, None] + 3
        self.register_buffer("index", away[0] * 7 + away[1])

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2))
        b, h, w, c = inner.shape
        inner = inner.view(b, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
        q, k, v = self.qkv(inner).unflatten(-1, (3, 2, c // 2)).permute(2, 0, 3, 1, 4)
        bias = self.bias[self.index].permute(2, 0, 1)
        weights = (q @ k.transpose(-1, -2) / (c // 2) ** 0.5 + bias).softmax(-1)
        inner = self.out((weights @ v).transpose(1, 2).flatten(2))
        inner = inner.view(b, h // 4, w // 4, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
        return x + torch.roll(inner, (self.shift, self.shift), (1, 2))


class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 2, stride=2)
        self.blocks = nn.ModuleList(WindowAttention(16, shift) for shift in (0, 2, 0, 2))
        self.merge, self.head = nn.Linear(64, 24, bias=False), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x)
        x = torch.cat([x[:, a::2, b::2] for a, b in itertools.product((0, 1), repeat=2)], -1)
        return self.head(self.merge(x).mean((1, 2)))


class Mixer(nn.Module):
    def __init__(self, tokens: int = 16, width: int = 12) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(tokens, 8), nn.GELU(), nn.Linear(8, tokens))
        self.within = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm2(x))


class Patches(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(2).mT


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def mixer() -> nn.Module:
    """Build a chain of mixers."""
    return nn.Sequential(
        Patches(12), *(Mixer() for _ in range(3)), nn.LayerNorm(12), Mean(), nn.Linear(12, 10)
    )


class Inception(nn.Module):
    def __init__(self, inward: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inward, 4, 1)
        self.three = nn.Sequential(nn.Conv2d(inward, 4, 1), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1))
        self.five = nn.Sequential(nn.Conv2d(inward, 2, 1), nn.ReLU(), nn.Conv2d(2, 4, 5, padding=2))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(
            torch.cat([self.one(x), self.three(x), self.five(x), F.max_pool2d(x, 3, 1, 1)], 1), inplace=True
        )


class GoogLeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, 2, 1)
        self.norm = nn.LocalResponseNorm(3)
        self.blocks = nn.ModuleList(Inception(6 + 14 * n) for n in range(3))
        self.aside, self.head = nn.Linear(20, 10), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.blocks[0](self.norm(self.stem(x)))
        aside = self.aside(x.mean((2, 3)))
        return self.head(self.blocks[2](self.blocks[1](x)).mean((2, 3))), aside


class Video(nn.Module):
    """Convolutions in space and in time by turns (Tran et al., 2018)."""

    def __init__(self, inward: int, outward: int) -> None:
        super().__init__()
        self.space = nn.Conv3d(inward, outward, (1, 3, 3), padding=(0, 1, 1), bias=False)
        self.time = nn.Conv3d(outward, outward, (3, 1, 1), padding=(1, 0, 0), bias=False)
        self.norm1, self.norm2 = nn.BatchNorm3d(outward), nn.InstanceNorm3d(outward, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.time(F.relu(self.norm1(self.space(x))))))


def video() -> nn.Module:
    """Build a chain of video blocks."""
    ends = (nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(8, 5))
    return nn.Sequential(Video(3, 6), nn.MaxPool3d(2), Video(6, 8), nn.AvgPool3d(2), Video(8, 8), *ends)


class PointNet(nn.Module):
    """A learned transformation of the points, kept nearly orthogonal by the loss (Qi et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Sequential(nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8), nn.ReLU())
        self.turn = nn.Linear(8, 9)
        self.points = nn.Sequential(nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 24, 1))
        self.head = nn.Sequential(
            nn.Linear(24, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4)
        )

    def forward(self, points: Tensor) -> dict[str, Tensor]:
        turn = self.turn(self.look(points.mT).amax(2)).view(-1, 3, 3) + torch.eye(3)
        features = self.points((points @ turn).mT)
        return {"logits": self.head(features.max(2).values), "turn": turn}


def upright(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    """Compute the cross entropy, and the transformation's distance from orthogonal."""
    turn = outputs["turn"]
    off = turn @ turn.mT - torch.eye(3)
    return F.cross_entropy(outputs["logits"], targets) + 0.01 * off.square().sum((1, 2)).mean()


class Sine(nn.Module):
    def __init__(self, inward: int, outward: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inward, outward)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30 * self.linear(x))


class Field(nn.Module):
    """A radiance field: frequencies of the position, which a later layer takes again (Mildenhall et al.,
    2020).
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", 2.0 ** torch.arange(4))
        self.first, self.second = (
            nn.Sequential(Sine(24, 16), Sine(16, 16)),
            nn.Sequential(Sine(40, 16), Sine(16, 16)),
        )
        self.density, self.colour = nn.Linear(16, 1), nn.Linear(16, 3)

    def forward(self, places: Tensor) -> Tensor:
        angles = (places[..., None] * self.frequencies).flatten(-2)
        encoded = torch.cat([angles.sin(), angles.cos()], -1)
        x = self.second(torch.cat([self.first(encoded), encoded], -1))
        through = torch.exp(-F.softplus(self.density(x)) / 8)
        before = torch.cumprod(through, 1) / through
        return (before * (1 - through) * self.colour(x).sigmoid()).sum(1)


class Scales(nn.Module):
    """Maps of fewer and fewer pixels, the last with a single one, each as a sequence and back, joined in a
    head (SegFormer: Xie et al., 2021). For one pixel only strides show channels last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shrinks = nn.ModuleList(nn.Conv2d(inward, 8, 3, stride=4, padding=1) for inward in (3, 8))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.mixed, self.norm, self.head = (
            nn.Conv2d(16, 12, 1, bias=False),
            nn.BatchNorm2d(12),
            nn.Conv2d(12, 4, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        maps = []
        for shrink, norm in zip(self.shrinks, self.norms, strict=True):
            x = shrink(x)
            pixels = norm(x.flatten(2).transpose(1, 2))
            x = pixels.reshape(len(x), *x.shape[2:], -1).permute(0, 3, 1, 2).contiguous()
            last = pixels.permute(0, 2, 1).reshape(len(x), -1, *x.shape[2:])
            maps.append(
                F.interpolate(
                    last, size=maps[0].shape[2:] if maps else None, scale_factor=None if maps else 1
                )
            )
        return self.head(
            F.dropout(torch.relu(self.norm(self.mixed(torch.cat(maps[::-1], 1)))), 0.3, self.training)
        )


VISION = (
    Model(
        name="vit",
        special="a class token and positions that are parameters of the model itself, dropout in every block",
        module=VisionTransformer, batch=images, loss=F.cross_entropy, optimizer=ADAM,
    ),
    Model(
        name="convnext",
        special="depthwise convolutions, norms in channels-last order, whole samples dropped at random",
        module=ConvNext, batch=images, loss=F.cross_entropy, optimizer=ADAM,
    ),
    Model(
        name="mobilenet",
        special="inverted residuals with squeeze and excitation, all activations in place",
        module=MobileNet, batch=images, loss=F.cross_entropy, metered=PASSED_ON,
    ),
    Model(
        name="shufflenet", special="halves of channels pass by, channels are shuffled by views",
        module=ShuffleNet, batch=images, loss=F.cross_entropy,
    ),
    Model(
        name="scales", special="dropout of maps whose layout a map of a single pixel decides",
        module=Scales, batch=lambda size: (torch.randn(size, 3, 16, 16), torch.randint(4, (size, 4, 4))),
        loss=F.cross_entropy, optimizer=ADAM,
    ),
    Model(
        name="swin", special="shifted windows by rolling, position biases picked by a buffer of indices",
        module=Swin, batch=images, loss=F.cross_entropy, optimizer=ADAM,
    ),
    Model(
        name="mixer", special="transposes between layers that are written as a chain",
        module=mixer, batch=images, loss=F.cross_entropy,
    ),
    Model(
        name="googlenet", special="parallel branches, local response norm, a second output half-way",
        module=GoogLeNet, batch=images,
        loss=lambda outputs, targets: F.cross_entropy(outputs[0], targets) + 0.3 * F.cross_entropy(outputs[1], targets),
    ),
    Model(
        name="video", special="convolutions in space and time, batch and instance norm in three dimensions",
        module=video, batch=lambda size: (torch.randn(size, 3, 4, 12, 12), torch.randint(5, (size,))),
        loss=F.cross_entropy,
    ),
    Model(
        name="pointnet", special="a transformation that the model predicts, a maximum over points, dictionaries out",
        module=PointNet, batch=lambda size: (torch.randn(size, 20, 3), torch.randint(4, (size,))), loss=upright,
    ),
    Model(
        name="radiance field", special="sines, cumulative products, an encoding that a later layer takes again",
        module=Field, batch=lambda size: (torch.randn(size, 8, 3), torch.rand(size, 3)), loss=F.mse_loss,
        optimizer=ADAM,
    ),
)  # fmt: skip
