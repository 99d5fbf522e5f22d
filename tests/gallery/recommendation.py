"""Models of users and items."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gallery.model import ADAM, SHARED, TIED, Model

ITEMS = 50


def ids(size: int, *shape: int, below: int = ITEMS) -> Tensor:
    """Draw random numbers of users or items."""
    return torch.randint(below, (size, *shape))


class DeepRecommendation(nn.Module):
    """Products of all pairs of features (Naumov et al., 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, 8, mode="sum") for n in (20, 30, ITEMS))
        self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1))
        self.register_buffer("pairs", torch.tril_indices(4, 4, -1), persistent=False)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        rows = torch.stack(
            [dense, *(table(part) for table, part in zip(self.tables, categories.unbind(1), strict=True))], 1
        )
        products = torch.bmm(rows, rows.mT)[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, products], 1)).squeeze(1)


class WideAndDeep(nn.Module):
    """A linear part over the same features as a deep one (Cheng et al., 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.bias = nn.Embedding(ITEMS, 1), nn.Parameter(torch.zeros(1))
        self.embed = nn.Embedding(ITEMS, 6)
        self.deep = nn.Sequential(nn.Linear(30, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 12), nn.ReLU())
        self.out = nn.Linear(12, 1)

    def forward(self, features: Tensor) -> Tensor:
        wide = self.wide(features).sum((1, 2))
        return wide + self.out(self.deep(self.embed(features).flatten(1)))[:, 0] + self.bias


class TwoTowers(nn.Module):
    """Users and items of one microbatch, contrasted with each other (Yi et al., 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(30, 12), nn.Embedding(ITEMS, 12)
        self.user_tower = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))
        self.item_tower = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, user: Tensor, item: Tensor, about: Tensor) -> Tensor:
        left = F.normalize(self.user_tower(self.users(user)))
        right = F.normalize(self.item_tower(torch.cat([self.items(item), about], 1)))
        return left @ right.mT * self.temperature.exp()


def in_batch(scores: Tensor, targets: None) -> Tensor:
    """Compute the loss of each user's item against those of the others, in both directions."""
    own = torch.arange(len(scores))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.mT, own)) / 2


class Factorisation(nn.Module):
    """Products of users and items, with a bias for each (Koren et al., 2009)."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(30, 8), nn.Embedding(ITEMS, 8)
        self.user_bias, self.item_bias = nn.Embedding(30, 1), nn.Embedding(ITEMS, 1)
        self.mean = nn.Parameter(torch.tensor(3.0))

    def forward(self, pair: Tensor) -> Tensor:
        user, item = pair.unbind(1)
        biases = self.user_bias(user) + self.item_bias(item)
        return (self.users(user) * self.items(item)).sum(1) + biases[:, 0] + self.mean


class FactorisationMachine(nn.Module):
    """All pairs of features by the square of a sum, plus a deep part over the same embedding (Guo et al.,
    2017).
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(ITEMS, 8), nn.Embedding(ITEMS, 1)
        self.deep = nn.ModuleList([nn.Linear(48, 24), nn.Linear(24, 12), nn.Linear(12, 1)])
        self.norm = nn.BatchNorm1d(24)

    def forward(self, features: Tensor) -> Tensor:
        x = self.embed(features)
        pairs = (x.sum(1).square() - x.square().sum(1)).sum(1) / 2
        deep = F.relu(self.norm(self.deep[0](x.flatten(1))))
        deep = self.deep[2](F.relu(self.deep[1](deep)))
        return self.linear(features).sum((1, 2)) + pairs + deep[:, 0]


class Interest(nn.Module):
    """A history weighted by relevance to the candidate item; padding does not count (Zhou et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ITEMS, 8, padding_idx=0)
        self.weigh = nn.Sequential(nn.Linear(32, 12), nn.PReLU(12), nn.Linear(12, 1))
        self.head = nn.Sequential(nn.Linear(16, 12), nn.BatchNorm1d(12), nn.PReLU(), nn.Linear(12, 1))

    def forward(self, history: Tensor, item: Tensor) -> Tensor:
        past, now = self.embed(history), self.embed(item)
        wide = now[:, None].expand_as(past)
        inner = self.weigh[0](torch.cat([past, wide, past - wide, past * wide], -1))
        inner = self.weigh[1](inner.flatten(0, 1)).unflatten(0, past.shape[:2])
        weights = self.weigh[2](inner).masked_fill((history == 0)[..., None], 0.0)
        return self.head(torch.cat([(weights * past).sum(1), now], 1))[:, 0]


class NextItem(nn.Module):
    """Causal attention over a history; the next item against a random one, in one table (Kang
    et al., 2018).
    """

    def __init__(self) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(ITEMS, 12, padding_idx=0), nn.Embedding(8, 12)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(12, 2, 24, 0.2, batch_first=True) for _ in range(2)
        )
        self.norm = nn.LayerNorm(12)

    def forward(self, history: Tensor, following: Tensor, other: Tensor) -> Tensor:
        x = self.items(history) * 12**0.5 + self.places(torch.arange(8))
        mask = nn.Transformer.generate_square_subsequent_mask(8)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        x = self.norm(x)
        right, wrong = ((x * self.items(item)).sum(-1) for item in (following, other))
        counts = (following != 0).float()
        losses = F.softplus(-right) + F.softplus(wrong)
        return (losses * counts).sum() / counts.sum().clamp(min=1)


class Crosses(nn.Module):
    """Layers that each multiply with the first layer's input again (Wang et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({"shop": nn.Embedding(9, 4), "town": nn.Embedding(20, 6)})
        self.cross = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 1)

    def forward(self, shop: Tensor, town: Tensor, numbers: Tensor) -> Tensor:
        first = torch.cat([self.tables["shop"](shop), self.tables["town"](town), numbers], 1)
        x = first
        for layer in self.cross:
            x = first * layer(x) + x
        return self.head(x)[:, 0]


class FieldPairs(nn.Module):
    """A table for each pair of fields (Juan et al., 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ITEMS, 12) for _ in range(4))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, fields: Tensor) -> Tensor:
        rows = [table(fields).unflatten(-1, (4, 3)) for table in self.tables]
        pairs = itertools.combinations(range(4), 2)
        return self.bias + sum((rows[a][:, b, b] * rows[b][:, a, a]).sum(-1) for a, b in pairs)


def clicks(size: int) -> Tensor:
    """Draw whether each item was clicked."""
    return torch.randint(2, (size,)).float()


RECOMMENDATION = (
    Model(
        name="deep recommendation", special="several tables of EmbeddingBag, products of all pairs, dictionaries in",
        module=DeepRecommendation,
        batch=lambda size: ({"numbers": torch.randn(size, 6), "categories": ids(size, 3, 4, below=20)}, clicks(size)),
        loss=F.binary_cross_entropy_with_logits,
    ),
    Model(
        name="wide and deep", special="integers to two tables of very different width, Adagrad",
        module=WideAndDeep, batch=lambda size: (ids(size, 5), clicks(size)),
        loss=F.binary_cross_entropy_with_logits, optimizer=torch.optim.Adagrad,
    ),
    Model(
        name="two towers", special="the loss is across the microbatch: items of others are the wrong ones",
        module=TwoTowers,
        batch=lambda size: ((ids(size, below=30), ids(size), torch.randn(size, 4)), None), loss=in_batch, size=4,
    ),
    Model(
        name="factorisation", special="nothing but tables, and one number as a parameter",
        module=Factorisation, batch=lambda size: (ids(size, 2, below=30), torch.rand(size)), loss=F.mse_loss,
    ),
    Model(
        name="factorisation machine", special="one embedding for the pairs and the deep part beside them",
        module=FactorisationMachine, batch=lambda size: (ids(size, 6), clicks(size)),
        loss=F.binary_cross_entropy_with_logits, optimizer=ADAM,
    ),
    Model(
        name="interest", special="a padded history weighed by the item in question, PReLU with and without channels",
        module=Interest, batch=lambda size: ({"history": ids(size, 7), "item": ids(size)}, clicks(size)),
        loss=F.binary_cross_entropy_with_logits, rounded=TIED,
    ),
    Model(
        name="next item", special="causal attention with dropout, one table at the start and in the loss",
        module=NextItem, batch=lambda size: ((ids(size, 8), ids(size, 8), ids(size, 8)), None), loss=None,
        optimizer=ADAM, rounded=TIED, above=SHARED,
    ),
    Model(
        name="crosses", special="the input of the first layer goes to every other",
        module=Crosses,
        batch=lambda size: (
            {"shop": ids(size, below=9), "town": ids(size, below=20), "numbers": torch.randn(size, 6)}, clicks(size),
        ),
        loss=F.binary_cross_entropy_with_logits,
    ),
    Model(
        name="field pairs", special="views of tables for each pair of fields, Adamax",
        module=FieldPairs, batch=lambda size: (ids(size, 4), clicks(size)),
        loss=F.binary_cross_entropy_with_logits, optimizer=torch.optim.Adamax,
    ),
)  # fmt: skip
