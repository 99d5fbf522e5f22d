"""Mixtures of experts: all experts compute, or each has a fixed capacity, so that shapes are static."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gallery.model import ADAM, Model

WIDTH, EXPERTS, LENGTH = 8, 4, 6


def expert() -> nn.Sequential:
    """Build a small MLP."""
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))


class Soft(nn.Module):
    """A mixture of every expert for every word, weighted by a softmax (Jacobs et al., 1991)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        weights = self.gate(h).softmax(-1)
        return x + (torch.stack([one(h) for one in self.experts], -1) * weights.unsqueeze(-2)).sum(-1)


class TopTwo(nn.Module):
    """A layer of each word's two best experts, all experts' weights in one tensor, noise in training (Shazeer
    et al., 2017).

    Returns the words and the imbalance of the experts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 12) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 12, WIDTH) / 4)

    def forward(self, x: Tensor, uneven: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x)
        best = (scores + 0.1 * torch.randn_like(scores)).topk(2, -1).indices
        chosen = torch.zeros_like(scores).scatter(-1, best, 1.0)
        weights = scores.masked_fill(chosen == 0, float("-inf")).softmax(-1)
        inner = torch.einsum("bth,bte,ehw->betw", x, weights, self.up).relu()
        found = torch.einsum("betw,ewh->bth", inner, self.down)
        share = scores.softmax(-1).mean((0, 1)) * chosen.mean((0, 1))
        return x + found, uneven + EXPERTS * share.sum()


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(30, WIDTH), nn.ModuleList(TopTwo() for _ in range(3))
        self.head = nn.Linear(WIDTH, 30)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        x, uneven = self.embed(words), torch.zeros(())
        for layer in self.layers:
            x, uneven = layer(x, uneven)
        return self.head(x), uneven


class Capacity(nn.Module):
    """One expert for each word, with limited capacity; words beyond it skip the layer (Fedus
    et al., 2022).
    """

    def __init__(self, room: int = 4) -> None:
        super().__init__()
        self.gate, self.room = nn.Linear(WIDTH, EXPERTS), room
        self.experts = nn.ModuleList(expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        weight, number = self.gate(x).softmax(-1).flatten(0, 1).max(-1)
        chosen = F.one_hot(number, EXPERTS)
        place = (chosen.cumsum(0) - 1) * chosen
        has_room = (place < self.room) & (chosen > 0)
        sent = has_room.unsqueeze(-1) * F.one_hot(place.clamp(max=self.room - 1), self.room)
        sent = sent.to(x.dtype)
        inner = torch.einsum("nec,nh->ech", sent, x.flatten(0, 1))
        inner = torch.stack([one(part) for one, part in zip(self.experts, inner.unbind(0), strict=True)])
        found = torch.einsum("nec,ech->nh", sent * weight[:, None, None], inner)
        return x + found.view_as(x)


class Chosen(nn.Module):
    """Experts that choose their words (Zhou et al., 2022); one expert is shared by all words."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), nn.ModuleList(expert() for _ in range(EXPERTS))
        self.shared = expert()

    def forward(self, x: Tensor) -> Tensor:
        weights, number = self.gate(x).softmax(-1).mT.topk(2, -1)
        found = self.shared(x)
        for k, one in enumerate(self.experts):
            index = number[:, k, :, None].expand(-1, -1, WIDTH)
            found = found.scatter_add(1, index, one(x.gather(1, index)) * weights[:, k, :, None])
        return x + found


def chain_of(layer: type[nn.Module]) -> nn.Module:
    """Build words in and out around three such layers."""
    return nn.Sequential(nn.Embedding(30, WIDTH), *(layer() for _ in range(3)), nn.Linear(WIDTH, 30))


def words(size: int) -> tuple[Tensor, Tensor]:
    """Draw words in and out."""
    return torch.randint(30, (size, LENGTH)), torch.randint(30, (size, LENGTH))


def next_words(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the cross entropy of every word."""
    return F.cross_entropy(outputs.mT, targets)


EXPERT_MODELS = (
    Model(
        name="soft experts", special="all experts compute for all words, written as a chain",
        module=lambda: chain_of(Soft), batch=words, loss=next_words, optimizer=ADAM,
    ),
    Model(
        name="two of four", special="noisy top two, experts' weights in one tensor, a second loss summed on the way",
        module=Routed, batch=words, loss=lambda outputs, targets: next_words(outputs[0], targets) + 0.01 * outputs[1],
        optimizer=ADAM,
    ),
    Model(
        name="capacity", special="a fixed number of places for each expert, given out by cumulative sums",
        module=lambda: chain_of(Capacity), batch=words, loss=next_words, optimizer=ADAM,
    ),
    Model(
        name="chosen words", special="experts choose words, whose results are scattered back",
        module=lambda: chain_of(Chosen), batch=words, loss=next_words, optimizer=ADAM,
    ),
)  # fmt: skip
