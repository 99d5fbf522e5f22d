"""Large models with few trained parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gallery.model import ADAM, TIED, Model

WORDS, LENGTH, WIDTH = 30, 8, 12


class LowRank(nn.Linear):
    """A frozen linear layer plus a product of two small trained matrices (Hu et al., 2022)."""

    def __init__(self, inward: int, outward: int) -> None:
        super().__init__(inward, outward)
        self.requires_grad_(False)
        self.narrow = nn.Parameter(torch.randn(2, inward) / 4)
        self.wide = nn.Parameter(torch.zeros(outward, 2))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(self.drop(x), self.narrow), self.wide) * 2.0


class Block(nn.Module):
    """A transformer block whose linear layers are of a given class; keys may begin with a prefix."""

    def __init__(self, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.up, self.down = linear(WIDTH, 24), linear(24, WIDTH)

    def forward(self, x: Tensor, prefix: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        if prefix is not None:
            before = prefix.expand(len(x), -1, -1, -1)
            k, v = torch.cat([before[:, 0], k], 1), torch.cat([before[:, 1], v], 1)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Base(nn.Module):
    """Words in and out around three blocks."""

    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LowRankBlock(Block):
    """A block of frozen layers with adapters."""

    def __init__(self) -> None:
        super().__init__(LowRank)


def only(model: nn.Module, *words: str) -> nn.Module:
    """Freeze `model` except for parameters with one of these words in their names."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(word in name for word in words))
    return model


class Prefixed(Base):
    """Trained keys and values before those of the words, in every block (Li and Liang, 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.prefixes = nn.Parameter(torch.randn(3, 2, 4, WIDTH))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block, prefix in zip(self.blocks, self.prefixes, strict=True):
            x = block(x, prefix)
        return self.head(x)


class Adapted(Block):
    """A block followed by a narrow trained layer (Houlsby et al., 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Sequential(nn.Linear(WIDTH, 3), nn.ReLU(), nn.Linear(3, WIDTH))

    def forward(self, x: Tensor, prefix: Tensor | None = None) -> Tensor:
        x = super().forward(x, prefix)
        return x + self.adapter(x)


class Prompted(Base):
    """Trained words before the given ones; the rest is frozen, the embedding is the head (Lester et al.,
    2021).
    """

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.prompt = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, words: Tensor) -> Tensor:
        x = torch.cat([self.prompt.expand(len(words), -1, -1), self.embed(words)], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 3:])


class Scaled(Block):
    """Trained factors of keys, values and inner features (Liu et al., 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.factors, self.inner = nn.Parameter(torch.ones(2 * WIDTH)), nn.Parameter(torch.ones(24))

    def forward(self, x: Tensor, prefix: Tensor | None = None) -> Tensor:
        q, kv = self.qkv(self.norm1(x)).split([WIDTH, 2 * WIDTH], -1)
        k, v = (kv * self.factors).chunk(2, -1)
        x = x + self.out((q @ k.mT / WIDTH**0.5).softmax(-1) @ v)
        return x + self.down(F.gelu(self.up(self.norm2(x))) * self.inner)


class Probed(nn.Module):
    """A frozen network in evaluation mode, whose batch norm keeps its statistics, and a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)),
            *(nn.Conv2d(8, 12, 3, 2, 1), nn.BatchNorm2d(12), nn.ReLU(inplace=True)),
        )
        self.body.requires_grad_(False).eval()
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(12 * 16, 16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def words(size: int) -> tuple[Tensor, Tensor]:
    """Draw words in and out."""
    return torch.randint(WORDS, (size, LENGTH)), torch.randint(WORDS, (size, LENGTH))


def next_words(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the cross entropy of every word."""
    return F.cross_entropy(outputs.mT, targets)


ADAPTERS = (
    Model(
        name="low rank", special="every linear layer is frozen and has an adapter with dropout",
        module=lambda: only(Base(LowRankBlock), "narrow", "wide"),
        batch=words, loss=next_words, optimizer=ADAM,
    ),
    Model(
        name="prefixes", special="keys and values of every block from one parameter of the model; the base is frozen",
        module=lambda: only(Prefixed(), "prefixes"), batch=words, loss=next_words, optimizer=ADAM, rounded=TIED,
    ),
    Model(
        name="bottlenecks", special="narrow layers behind frozen blocks",
        module=lambda: only(Base(Adapted), "adapter", "head"), batch=words, loss=next_words, optimizer=ADAM,
    ),
    Model(
        name="biases", special="nothing trains but biases and norms",
        module=lambda: only(Base(), "bias", "norm"), batch=words, loss=next_words, optimizer=ADAM,
    ),
    Model(
        name="prompt", special="a frozen embedding tied to the head, trained words before the given ones",
        module=lambda: only(Prompted(), "prompt"), batch=words, loss=next_words, optimizer=ADAM,
    ),
    Model(
        name="factors", special="trained factors of frozen features, eager attention",
        module=lambda: only(Base(Scaled), "factors", "inner"), batch=words, loss=next_words, optimizer=ADAM,
    ),
    Model(
        name="probe", special="a frozen part in evaluation mode, so that the first stages may have nothing to train",
        module=Probed, batch=lambda size: (torch.randn(size, 3, 16, 16), torch.randint(5, (size,))),
        loss=F.cross_entropy,
    ),
)  # fmt: skip
