"""Models by an author who does not know pipefit, for grids of stages: grouped convolutions, recurrent layers,
experts with dropped tokens, relative positions, weights shared between distant layers, dictionaries between
modules.

None draws at random, and except for batch norm a sample's result does not depend on the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task

WORDS, LENGTH, WIDTH, CLASSES = 24, 8, 32, 10


# -------------------------------------------------------------------- grouped convolutions


class Squeezed(nn.Module):
    """A depthwise convolution between two grouped pointwise ones, with a gate for every channel."""

    def __init__(self, width: int, stride: int, groups: int) -> None:
        super().__init__()
        inner = 2 * width
        self.enter = nn.Conv2d(width, inner, 1, groups=groups, bias=False)
        self.norm = nn.GroupNorm(groups, inner)
        self.depth = nn.Conv2d(inner, inner, 3, stride=stride, padding=1, groups=inner)
        self.less, self.more = nn.Conv2d(inner, 8, 1), nn.Conv2d(8, inner, 1)
        self.leave = nn.Conv2d(inner, width, 1, groups=groups)
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.depth(F.silu(self.norm(self.enter(x)))))
        gate = torch.sigmoid(self.more(F.relu(self.less(y.mean(dim=(2, 3), keepdim=True)))))
        skip = F.avg_pool2d(x, 2) if self.stride == 2 else x
        b, c, h, w = (y := self.leave(y * gate)).shape
        mixed = (
            y.view(b, 4, c // 4, h, w).transpose(1, 2).reshape(b, c, h, w)
        )  # ShuffleNet's exchange of groups
        return mixed + skip


class Grouped(nn.Module):
    """Two results in a dictionary: one from the middle of the net, one from its end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, stride=2, padding=1), nn.BatchNorm2d(WIDTH), nn.Hardswish()
        )
        self.first = nn.ModuleList([Squeezed(WIDTH, 1, 4), Squeezed(WIDTH, 2, 4)])
        self.second = nn.ModuleList([Squeezed(WIDTH, 1, 8), Squeezed(WIDTH, 2, 2)])
        self.early, self.late = nn.Linear(WIDTH, CLASSES), nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        x = self.stem(images)
        for block in self.first:
            x = block(x)
        early = self.early(x.flatten(2).mean(-1))
        for block in self.second:
            x = block(x)
        pooled = torch.cat([F.adaptive_avg_pool2d(x, 1), F.adaptive_max_pool2d(x, 1)], dim=1).flatten(1)
        return {"early": early, "late": self.late(pooled)}


def both_answers(found: dict[str, Tensor], wanted: Tensor) -> Tensor:
    return F.cross_entropy(found["late"], wanted) + 0.3 * F.cross_entropy(found["early"], wanted)


def pictures(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 32, 32), torch.randint(CLASSES, (size,))


# -------------------------------------------------------------------- recurrent layers


class Recurrent(nn.Module):
    """Embedded words, read in both directions, then a cell that is called position by position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.reader = nn.GRU(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True)
        self.squeeze = nn.Linear(2 * WIDTH, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        inner = 4 * WIDTH
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, inner), nn.GELU(), nn.Linear(inner, WIDTH)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        x, last = self.reader(self.embed(words))
        x, state, told = self.squeeze(x), last.mean(0), []
        for position in range(x.shape[1]):
            state = self.cell(x[:, position], state)
            told.append(state + self.mlp(state))
        return self.head(torch.stack(told, dim=1)), state


def words_and_size(found: tuple[Tensor, Tensor], wanted: Tensor) -> Tensor:
    logits, state = found
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten()) + 1e-2 * state.square().mean()


def sentences(size: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(WORDS, (size, LENGTH + 1))
    return words[:, :-1], words[:, 1:]


# -------------------------------------------------------------------- experts


class Experts(nn.Module):
    """Experts with two out of four per token, unless an expert has reached its limit for the sentence."""

    def __init__(self, experts: int = 4, room: int = 3) -> None:
        super().__init__()
        self.experts, self.room = experts, room
        self.router = nn.Linear(WIDTH, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / math.sqrt(WIDTH))
        self.gate = nn.Parameter(torch.randn(experts, WIDTH, 2 * WIDTH) / math.sqrt(WIDTH))
        self.down = nn.Parameter(torch.randn(experts, 2 * WIDTH, WIDTH) / math.sqrt(2 * WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        odds = self.router(x).softmax(-1)  # (batch, length, experts)
        weights, chosen = odds.topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        marks = F.one_hot(chosen, self.experts).to(x.dtype)  # (batch, length, 2, experts)
        first, second = marks.unbind(2)
        place = torch.cat([first, second], dim=1).cumsum(1) - 1  # first choices go before second ones
        place = place.view(x.shape[0], 2, x.shape[1], self.experts).transpose(1, 2)
        kept = marks * (place < self.room)
        slots = F.one_hot(place.clamp(0, self.room - 1).long(), self.room).to(x.dtype) * kept.unsqueeze(-1)
        combine = torch.einsum("blk,blkec->blec", weights, slots)
        given = torch.einsum("blec,bld->becd", (combine > 0).to(x.dtype), x)
        inner = F.silu(torch.einsum("becd,edf->becf", given, self.gate))
        inner = inner * torch.einsum("becd,edf->becf", given, self.up)
        made = torch.einsum("becf,efd->becd", inner, self.down)
        load = (odds.mean(1) * first.mean(1)).sum(-1) * self.experts  # a number for each sentence
        return torch.einsum("blec,becd->bld", combine, made), load


class Expert(nn.Module):
    """A language model with experts as feedforward layers; also returns the imbalance of their load."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2 * layers))
        self.experts = nn.ModuleList(Experts() for _ in range(layers))
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        x, loads = self.embed(words), torch.zeros(words.shape[0], dtype=self.embed.weight.dtype)
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        for number, (attention, experts) in enumerate(zip(self.attention, self.experts, strict=True)):
            y = self.norms[2 * number](x)
            x = x + attention(y, y, y, attn_mask=mask, need_weights=False)[0]
            made, load = experts(self.norms[2 * number + 1](x))
            x, loads = x + made, loads + load
        return self.head(x), loads


def words_and_loads(found: tuple[Tensor, Tensor], wanted: Tensor) -> Tensor:
    logits, loads = found
    return F.cross_entropy(logits.transpose(1, 2), wanted) + 1e-2 * loads.mean()


# -------------------------------------------------------------------- relative positions


class Relative(nn.Module):
    """Attention with a vector for every distance (Shaw), a number for every head and bucket, and slopes
    (ALiBi).
    """

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.size = heads, WIDTH // heads
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.distances = nn.Parameter(torch.randn(2 * LENGTH - 1, self.size) * 0.1)
        self.bias = nn.Embedding(4, heads)
        steps = torch.arange(LENGTH)[None] - torch.arange(LENGTH)[:, None]
        self.register_buffer("steps", steps + LENGTH - 1)
        self.register_buffer("buckets", steps.abs().clamp(max=7) // 2)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2)
        scores = scores + torch.einsum("bhqd,qkd->bhqk", q, self.distances[self.steps])
        scores = scores / math.sqrt(self.size) + self.bias(self.buckets).permute(2, 0, 1)
        scores = scores - self.slopes[:, None, None].to(x.dtype) * (self.steps - LENGTH + 1).abs()
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Positions(nn.Module):
    """Layers of attention by distances, with parallel feedforward layers (as in GPT-J)."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        self.attention = nn.ModuleList(Relative() for _ in range(layers))
        self.gated = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(layers))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for norm, attention, gated, down in zip(
            self.norms, self.attention, self.gated, self.down, strict=True
        ):
            y = norm(x)
            one, other = gated(y).chunk(2, dim=-1)
            x = x + attention(y) + down(F.gelu(one) * other)
        return self.head(x)


def next_words(logits: Tensor, wanted: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), label_smoothing=0.1)


# -------------------------------------------------------------------- weights in several places


class Reused(nn.Module):
    """A model whose first block is also the last, with a weight used plain and transposed, and one norm
    everywhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.middle = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.there = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words) * self.scale
        x = x + self.block(self.norm(x))
        inner = self.there(x)
        for block in self.middle:
            x = x + block(self.norm(x))
        x = x + F.linear(inner.relu(), self.there.weight.T)
        x = x + self.block(self.norm(x))
        return F.linear(x * self.scale, self.embed.weight)


# -------------------------------------------------------------------- dictionaries and tuples


class Encoder(nn.Module):
    """Features of three sizes, by name, each with its mean."""

    def __init__(self) -> None:
        super().__init__()
        channels = {"fine": (3, 16), "middle": (16, 32), "coarse": (32, 64)}
        self.convolutions = nn.ModuleDict(
            {name: nn.Conv2d(*both, 3, 2, 1) for name, both in channels.items()}
        )

    def forward(self, images: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        found, x = {}, images
        for name, convolution in self.convolutions.items():
            x = F.leaky_relu(convolution(x), 0.1)
            found[name] = (x, x.mean((2, 3)))
        return found


class Pyramid(nn.Module):
    """A feature pyramid from coarse to fine that returns a map, classes and a list of means."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        channels = {"fine": 16, "middle": 32, "coarse": 64}
        self.across = nn.ModuleDict({name: nn.Conv2d(count, 32, 1) for name, count in channels.items()})
        self.up = nn.ConvTranspose2d(32, 32, 2, stride=2, groups=2)
        self.smooth, self.map = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 2, 1)
        self.classes = nn.Bilinear(64, 32, CLASSES)

    def forward(self, images: Tensor, *, weights: Tensor) -> dict[str, Any]:
        levels = self.encoder(images)
        x = self.across["coarse"](levels["coarse"][0])
        for name in ("middle", "fine"):
            x = (
                F.interpolate(x, scale_factor=2, mode="nearest")
                + self.across[name](levels[name][0])
                + self.up(x)
            )
        x = F.instance_norm(self.smooth(x)).relu()
        answer = self.classes(levels["coarse"][1], levels["middle"][1])
        found = F.cross_entropy(answer, (weights > 0).sum(1) % CLASSES)
        loss = found + (self.map(x).mean((1, 2, 3)) * weights.mean(1)).mean()
        return {"loss": loss, "logits": answer, "parts": [levels["fine"][1], (x.mean((2, 3)),)]}


def named(size: int) -> tuple[dict[str, Tensor], None]:
    return {"images": torch.randn(size, 3, 32, 32), "weights": torch.randn(size, 6)}, None


# -------------------------------------------------------------------- tasks


def _task(module: Callable[[], nn.Module], batch: Any, loss: Any, name: str) -> Task:
    return Task(module, batch=batch, loss=loss, optimizer=partial(torch.optim.SGD, lr=0.05), name=name)


UNSEEN: dict[str, Callable[[], Task]] = {
    "grouped": lambda: _task(Grouped, pictures, both_answers, "grouped"),
    "recurrent": lambda: _task(Recurrent, sentences, words_and_size, "recurrent"),
    "dropping experts": lambda: _task(Expert, sentences, words_and_loads, "experts"),
    "relative positions": lambda: _task(Positions, sentences, next_words, "positions"),
    "reused weights": lambda: _task(Reused, sentences, next_words, "reused"),
    "pyramid": lambda: _task(Pyramid, named, None, "pyramid"),
}
