"""Small models for loops of their users: a module, a batch, a loss, and an optimizer each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
ADAM = partial(torch.optim.AdamW, lr=1e-3)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model in a plain loop. `batch()` returns (inputs, targets)."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor] | None
    optimizer: Callable[..., torch.optim.Optimizer] = ADAM
    above: str = ""  # why certified peaks may be above the allocator's


def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets)


def classes(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def vectors(width: int = 32, rows: int = 512) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, width), torch.randn(rows, width)


def sequences(width: int = 32, length: int = 32, rows: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, length, width), torch.randn(rows, length, width)


def tokens(length: int = 32, rows: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randint(50, (rows, length)), torch.randint(50, (rows, length))


def images(rows: int = 16) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, 16, 16), torch.randint(10, (rows,))


def mlp(dropout: float = 0.0, inplace: bool = False) -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(
            nn.Linear(32, 64), nn.ReLU(inplace=inplace), nn.Dropout(dropout), nn.Linear(64, 32), nn.Tanh()
        )

    return nn.Sequential(*[block() for _ in range(4)])


class Block(nn.Module):
    def __init__(self, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.n1(x)
        x = x + self.attention(h, h, h, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.n2(x))


class Language(nn.Module):
    """Blocks over tokens; `tied` shares the embedding with the head, `shared` is one block for all layers."""

    def __init__(
        self,
        *,
        tied: bool = False,
        shared: bool = False,
        dropout: float = 0.0,
        masked: bool = False,
        layers: int = 2,
    ):
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        one = Block(dropout=dropout)
        self.blocks = nn.ModuleList([one if shared else Block(dropout=dropout) for _ in range(layers)])
        self.head = nn.Linear(32, 50, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.masked = masked

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        length = ids.shape[1]
        mask = torch.full((length, length), float("-inf"), device=x.device).triu(1) if self.masked else None
        for block in self.blocks:
            x = block(x, mask=mask) if self.masked else block(x)
        return self.head(x)


class Residual(nn.Module):
    def __init__(self, channels: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.c2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.n1, self.n2 = norm(channels), norm(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.n1(self.c1(x)))
        out = self.n2(self.c2(out))
        out += x
        return self.relu(out)


def convolutional(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        Residual(8, norm),
        Residual(8, norm),
        Residual(8, norm),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def block(a: int, b: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(2, b), nn.SiLU())

        self.d1, self.d2, self.middle = block(3, 8), block(8, 16), block(16, 16)
        self.u2, self.u1 = block(32, 8), block(16, 8)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.d1(x)
        b = self.d2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        u = self.u2(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        return self.out(self.u1(torch.cat([F.interpolate(u, scale_factor=2), a], 1)))


def pictures(rows: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 3, 16, 16), torch.randn(rows, 3, 16, 16)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.first, self.second = kind(32, 32, batch_first=True), kind(32, 32, batch_first=True)
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.second(self.first(x)[0])[0])


class Pair(nn.Module):
    """Blocks that take and return a pair of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([PairBlock() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        pair = (x, torch.zeros_like(x))
        for block in self.blocks:
            pair = block(pair)
        return pair[0] + pair[1]


class PairBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, y = pair
        return y + self.a(x).sigmoid(), x * self.b(y).cos()


class Siamese(nn.Module):
    """One encoder, called for each of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.encoder(x) * self.encoder(y)).exp()


class Experts(nn.Module):
    """A dense mixture of experts with an auxiliary loss that a layer leaves in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mixture() for _ in range(2)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(x, y) + sum(layer.balance for layer in self.layers)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 3)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
        )

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        self.balance = weights.mean(0).square().sum()
        return sum(weights[:, n : n + 1] * expert(x) for n, expert in enumerate(self.experts))


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * (s + x * s * (1 - s))


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return Swish.apply(self.linear(x))


class Counting(nn.Module):
    """Changes buffers that it computes with: a second forward would see other values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("level", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) + self.level
        with torch.no_grad():
            self.level.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x.tanh()


class Checkpointed(nn.Module):
    """Recomputes one of its blocks already."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([mlp() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](checkpoint(self.blocks[0], x, use_reentrant=False))


class Named(nn.Module):
    """Takes keyword arguments, and returns a dictionary with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Language(dropout=0.1)

    def forward(self, *, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.body(ids)
        return {"loss": classes(logits, labels), "logits": logits}


def named() -> tuple[Any, Any]:
    ids, labels = tokens()
    return {"ids": ids, "labels": labels}, None


def two() -> tuple[Any, Any]:
    x, y = vectors()
    return (x, y), torch.randn(512, 32)


def encoder(*, first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True, norm_first=first)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def frozen() -> nn.Module:
    module = mlp()
    for parameter in module[:2].parameters():
        parameter.requires_grad_(False)
    return module


MODELS = [
    Model(name="mlp", build=mlp, batch=vectors, loss=mean_square),
    Model(name="mlp, dropout", build=partial(mlp, 0.2), batch=vectors, loss=mean_square, optimizer=SGD),
    Model(name="mlp, in place", build=partial(mlp, 0.0, True), batch=vectors, loss=mean_square),
    Model(name="frozen half", build=frozen, batch=vectors, loss=mean_square),
    Model(name="language", build=Language, batch=tokens, loss=classes),
    Model(name="language, dropout", build=partial(Language, dropout=0.1), batch=tokens, loss=classes),
    Model(name="language, tied", build=partial(Language, tied=True), batch=tokens, loss=classes),
    Model(
        name="language, one block",
        build=partial(Language, shared=True),
        batch=tokens,
        loss=classes,
        above="under a meter, a recomputed call of a block with several calls holds a tensor longer",
    ),
    Model(name="language, mask by name", build=partial(Language, masked=True), batch=tokens, loss=classes),
    Model(name="keywords and own loss", build=Named, batch=named, loss=None),
    Model(name="encoder", build=partial(encoder, first=False), batch=sequences, loss=mean_square),
    Model(name="encoder, norm first", build=partial(encoder, first=True), batch=sequences, loss=mean_square),
    Model(name="batch norm", build=convolutional, batch=images, loss=classes, optimizer=SGD),
    Model(
        name="group norm",
        build=partial(convolutional, partial(nn.GroupNorm, 2)),
        batch=images,
        loss=classes,
    ),
    Model(
        name="cumulative batch norm",
        build=partial(convolutional, partial(nn.BatchNorm2d, momentum=None)),
        batch=images,
        loss=classes,
    ),
    Model(name="u-net", build=UNet, batch=pictures, loss=mean_square),
    Model(name="lstm", build=partial(Recurrent, nn.LSTM), batch=sequences, loss=mean_square),
    Model(name="gru", build=partial(Recurrent, nn.GRU), batch=sequences, loss=mean_square),
    Model(name="pairs", build=Pair, batch=vectors, loss=mean_square),
    Model(name="siamese", build=Siamese, batch=two, loss=mean_square),
    Model(name="experts", build=Experts, batch=lambda: (vectors(), None), loss=None),
    Model(
        name="custom function",
        build=lambda: nn.Sequential(*[Custom() for _ in range(4)]),
        batch=vectors,
        loss=mean_square,
    ),
    Model(
        name="buffers in use",
        build=lambda: nn.Sequential(*[Counting() for _ in range(4)]),
        batch=vectors,
        loss=mean_square,
    ),
    Model(name="checkpointed", build=Checkpointed, batch=vectors, loss=mean_square),
    Model(
        name="spectral norm",
        build=lambda: nn.Sequential(
            *[
                nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32)), nn.SiLU())
                for _ in range(3)
            ]
        ),
        batch=vectors,
        loss=mean_square,
    ),
    Model(
        name="weight norm",
        build=lambda: nn.Sequential(
            *[
                nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), nn.SiLU())
                for _ in range(3)
            ]
        ),
        batch=vectors,
        loss=mean_square,
    ),
]
