"""Models as the world has them, no chains: residual and dense convolutions, long skips, masks, ties, frozen parts.

Small enough to train in milliseconds, without dropout, so that pipelines can be held to plain training.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task


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
            self.downsample = nn.Sequential(nn.Conv2d(inward, outward, 1, stride, bias=False), nn.BatchNorm2d(outward))

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
    """Norm, activation and convolution of all that came before."""

    def __init__(self, inward: int, growth: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(inward), nn.Conv2d(inward, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.conv(F.relu(self.norm(torch.cat(features, 1)), inplace=True))


class DenseNet(nn.Module):
    """Every layer of a block sees the outputs of all layers before it (Huang et al., 2017)."""

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
            self.downsample = nn.Sequential(nn.Conv2d(inward, outward, 1, stride, bias=False), nn.BatchNorm2d(outward))

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
        self.bn1, self.relu, self.maxpool = nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
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
    """Norm, activation, convolution, twice: of all that came before."""

    def __init__(self, inward: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inward), nn.Conv2d(inward, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.conv2(self.relu(self.norm2(self.conv1(self.relu(self.norm1(torch.cat(features, 1)))))))


class DenseNet121Block(nn.ModuleDict):
    """Every layer takes the outputs of all before it."""

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseBlocks(nn.Module):
    """Blocks of dense layers with transitions between them as torchvision arranges them, two channels of growth."""

    def __init__(self, blocks: tuple[int, ...], growth: int = 2) -> None:
        super().__init__()
        width = 2 * growth
        self.features = nn.Sequential()
        self.features.add_module("conv0", nn.Conv2d(3, width, 3, padding=1, bias=False))
        for number, layers in enumerate(blocks, 1):
            parts = {f"denselayer{n + 1}": DenseNet121Layer(width + n * growth, growth) for n in range(layers)}
            self.features.add_module(f"denseblock{number}", DenseNet121Block(parts))
            width += layers * growth
            if number < len(blocks):
                transition = nn.Sequential(
                    nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, width // 2, 1), nn.AvgPool2d(2)
                )
                self.features.add_module(f"transition{number}", transition)
                width //= 2
        self.norm, self.classifier = nn.BatchNorm2d(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm(self.features(x)), inplace=True)
        return self.classifier(F.adaptive_avg_pool2d(out, 1).flatten(1))


def _double(inward: int, outward: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inward, outward, 3, padding=1), nn.GroupNorm(2, outward), nn.SiLU(inplace=True))


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


class Block(nn.Module):
    """A transformer block with its own attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Masked(nn.Module):
    """Takes a dictionary with a padding mask; returns one, its loss outside. `tied` reuses the embedding at the end."""

    def __init__(self, *, tied: bool = False, blocks: int = 3, width: int = 16, words: int = 40) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, mask: Tensor, scale: float = 1.0) -> dict[str, Any]:
        x = self.embed(tokens) * scale
        length = tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        wide = causal & mask.bool()[:, None, None, :]
        for block in self.blocks:
            x = block(x, wide)
        return {"logits": self.head(x), "scale": scale}


class TwoLosses(nn.Module):
    """Two heads, two losses, summed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.kind, self.size = nn.Linear(12, 5), nn.Linear(12, 1)

    def forward(self, x: Tensor, kind: Tensor, size: Tensor) -> Tensor:
        for part in self.body:
            x = torch.tanh(part(x))
        return F.cross_entropy(self.kind(x), kind) + 0.5 * F.mse_loss(self.size(x), size)


class Repeated(nn.Module):
    """One block, run three times (as ALBERT shares its layers), and a running mean of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.block, self.outward = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 3)
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        for _ in range(3):
            x = torch.relu(self.block(x))
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.outward(x - self.mean)


def _images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 16, 16), torch.randint(10, (size,))


def _larger_images(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 64, 64), torch.randint(0, 10, (size,))


def _tokens(size: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tokens = torch.randint(40, (size, 8))
    mask = (torch.arange(8) < torch.randint(4, 9, (size, 1))).long()
    return {"tokens": tokens, "mask": mask, "scale": 2.0}, {"next": tokens.roll(-1, 1)}


def _token_loss(outputs: dict[str, Any], targets: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(outputs["logits"].flatten(0, 1), targets["next"].flatten())


def resnet() -> Task:
    """Batch norm, in-place activations and additions."""
    return Task(ResNet, batch=_images, loss=F.cross_entropy, name="resnet")


def densenet() -> Task:
    """Many values cross at once."""
    return Task(DenseNet, batch=_images, loss=F.cross_entropy, name="densenet")


def resnet50() -> Task:
    """Sixteen bottlenecks."""
    return Task(ResNet50, batch=_larger_images, loss=F.cross_entropy, name="resnet50")


def dense_blocks() -> Task:
    """Seven dense layers in three blocks."""
    return Task(lambda: DenseBlocks((2, 3, 2)), batch=_larger_images, loss=F.cross_entropy, name="dense blocks")


def densenet121() -> Task:
    """The fifty-eight dense layers of DenseNet-121."""
    return Task(lambda: DenseBlocks((6, 12, 24, 16)), batch=_larger_images, loss=F.cross_entropy, name="densenet121")


def unet() -> Task:
    """Values travel past many layers."""
    return Task(
        UNet,
        batch=lambda size: (torch.randn(size, 3, 16, 16), torch.randn(size, 1, 16, 16)),
        loss=F.mse_loss,
        name="unet",
    )


class Reversed(torch.autograd.Function):
    """The identity, with a gradient of the other sign (Ganin et al., 2016)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradient, None


class StraightThrough(torch.autograd.Function):
    """Rounds, and passes the gradient on (Bengio et al., 2013); also returns how far it rounded, and None."""

    @staticmethod
    def forward(x: Tensor, scale: float = 1.0) -> tuple[Tensor, None, Tensor]:
        rounded = torch.round(x * scale) / scale
        return rounded, None, (rounded - x).abs()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output[2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None, far: Tensor) -> tuple[Tensor, None]:
        return gradient + far * ctx.saved_tensors[0], None


reverse = Reversed.apply  # a name of its own, as models often give it


class Centred(nn.Linear):
    """A linear layer that subtracts a running mean of its own, which it replaces in each forward."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Quantised(nn.Module):
    """Blocks that round, and one whose gradient is reversed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head, self.adversary = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x, _, far = StraightThrough.apply(block(x), 8.0 + number)
            x = x + far
        return self.head(x) + self.adversary(reverse(x, 0.5))


def quantised() -> Task:
    """Custom functions: straight-through estimators and a reversed gradient."""
    return Task(
        Quantised,
        batch=lambda size: (torch.randn(size, 6), torch.randint(3, (size,))),
        loss=F.cross_entropy,
        name="quantised",
    )


class Centring(nn.Module):
    """Two layers that subtract running means; one runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.head = Centred(6), Centred(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.again(self.first(x))))


def centring() -> Task:
    """Buffers of parts that are replaced in each forward, and feed back."""
    return Task(
        Centring,
        batch=lambda size: (torch.randn(size, 6), torch.randint(3, (size,))),
        loss=F.cross_entropy,
        name="centring",
    )


def masked() -> Task:
    """Dictionaries in and out, a mask, a number among the inputs."""
    return Task(Masked, batch=_tokens, loss=_token_loss, name="masked")


def tied() -> Task:
    """The same with the embedding reused at the end."""
    return Task(lambda: Masked(tied=True), batch=_tokens, loss=_token_loss, name="tied")


def frozen() -> Task:
    """The embedding and the first block do not train."""

    def build() -> nn.Module:
        model = Masked()
        for part in (model.embed, model.blocks[0]):
            part.requires_grad_(False)
        return model

    return Task(build, batch=_tokens, loss=_token_loss, name="frozen")


def two_losses() -> Task:
    """The loss inside, of two; labels travel along."""
    return Task(
        TwoLosses,
        batch=lambda size: ((torch.randn(size, 12), torch.randint(5, (size,)), torch.randn(size, 1)), None),
        loss=None,
        name="two losses",
    )


def repeated() -> Task:
    """One module run three times, a buffer that is replaced in each forward."""
    return Task(
        Repeated,
        batch=lambda size: (torch.randn(size, 6), torch.randint(3, (size,))),
        loss=F.cross_entropy,
        name="repeated",
    )


CAPTURED = {
    "resnet": resnet,
    "densenet": densenet,
    "resnet50": resnet50,
    "dense blocks": dense_blocks,
    "unet": unet,
    "masked": masked,
    "tied": tied,
    "frozen": frozen,
    "two losses": two_losses,
    "repeated": repeated,
    "quantised": quantised,
    "centring": centring,
}
LARGE = {"densenet121": densenet121}  # for the gallery
