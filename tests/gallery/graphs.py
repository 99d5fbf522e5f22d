"""Models of graphs: a sample is a graph of eight nodes with sixteen edges."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gallery.model import ADAM, PASSED_ON, SHARED, TIED, Model

NODES, EDGES, WIDTH = 8, 16, 12


def graphs(size: int) -> tuple[Tensor, Tensor]:
    """Draw nodes with features, and edges from one node to another."""
    return torch.randn(size, NODES, 6), torch.randint(NODES, (size, EDGES, 2))


def picked(x: Tensor, index: Tensor) -> Tensor:
    """Return rows of nodes, by their numbers."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def gathered(x: Tensor, index: Tensor) -> Tensor:
    """Return sums of edge values at their target nodes."""
    zeros = x.new_zeros(len(x), NODES, x.shape[-1])
    return zeros.scatter_add(1, index[..., None].expand_as(x), x)


class Convolution(nn.Module):
    """A graph convolution normalised by degrees (Kipf and Welling, 2017)."""

    def __init__(self, inward: int, outward: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inward, outward)

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, edges = pair
        source, target = edges.unbind(-1)
        ones = torch.ones(*source.shape, 1)
        degree = gathered(ones, target) + 1
        brought = picked(self.linear(x) / degree.sqrt(), source)
        return F.relu((gathered(brought, target) + self.linear(x)) / degree.sqrt()), edges


class Nodes(nn.Module):
    """A layer that returns only the nodes."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0].mean(1)


def convolutions() -> nn.Module:
    """Build a chain of convolutions that passes the edges along."""
    layers = (Convolution(6, WIDTH), Convolution(WIDTH, WIDTH), Convolution(WIDTH, WIDTH))
    return nn.Sequential(*layers, Nodes(), nn.Linear(WIDTH, 3))


class Attention(nn.Module):
    """Weights over the edges of each node, a softmax by scattering (Velickovic et al., 2018)."""

    def __init__(self, inward: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inward, WIDTH, bias=False)
        self.out, self.into = nn.Linear(WIDTH, 1, bias=False), nn.Linear(WIDTH, 1, bias=False)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges.unbind(-1)
        x = self.linear(x)
        scores = F.leaky_relu(picked(self.out(x), source) + picked(self.into(x), target), 0.2)
        highest = torch.full((len(x), NODES, 1), -1e9).scatter_reduce(
            1, target[..., None], scores.detach(), "amax"
        )
        weights = (scores - picked(highest, target)).exp()
        weights = weights / picked(gathered(weights, target), target)
        return F.elu(gathered(self.drop(weights) * picked(x, source), target))


class GraphAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(6), Attention(WIDTH), Attention(WIDTH)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        for layer in self.layers:
            nodes = layer(nodes, edges)
        return self.head(nodes)


class Messages(nn.Module):
    """A GRU cell for the nodes, run four times with the same weights (Gilmer et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.message = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.ReLU())
        self.update, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges.unbind(-1)
        x = self.embed(nodes)
        for _ in range(4):
            sent = self.message(torch.cat([picked(x, source), picked(x, target)], -1))
            x = self.update(gathered(sent, target).flatten(0, 1), x.flatten(0, 1)).view_as(x)
        return self.head(x.sum(1))


class Neighbours(nn.Module):
    """The mean and the maximum of four neighbours, normalised to length one (Hamilton et al., 2017)."""

    def __init__(self, inward: int) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * inward, WIDTH)

    def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
        near = picked(x, neighbours.flatten(1)).unflatten(1, neighbours.shape[1:])
        return F.normalize(F.relu(self.linear(torch.cat([x, near.mean(2), near.amax(2)], -1))), dim=-1)


class Sampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = (
            nn.ModuleList([Neighbours(6), Neighbours(WIDTH)]),
            nn.Bilinear(WIDTH, WIDTH, 1),
        )

    def forward(self, nodes: Tensor, neighbours: Tensor, pairs: Tensor) -> Tensor:
        for layer in self.layers:
            nodes = layer(nodes, neighbours)
        return self.head(picked(nodes, pairs[..., 0]), picked(nodes, pairs[..., 1])).squeeze(-1)


class Isomorphism(nn.Module):
    """Sums over a dense adjacency matrix; every layer adds to the answer (Xu et al., 2019)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (6, WIDTH, WIDTH, WIDTH)
        self.inner = nn.ModuleList(
            nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(NODES), nn.ReLU(), nn.Linear(b, b), nn.ReLU())
            for a, b in itertools.pairwise(widths)
        )
        self.own = nn.Parameter(torch.zeros(3))
        self.heads = nn.ModuleList(nn.Linear(width, 3) for width in widths)

    def forward(self, nodes: Tensor, matrix: Tensor) -> Tensor:
        answer = self.heads[0](nodes.sum(1))
        for layer, own, head in zip(self.inner, self.own, self.heads[1:], strict=True):
            nodes = layer(torch.baddbmm((1 + own) * nodes, matrix, nodes))
            answer = answer + head(nodes.sum(1))
        return answer


class Continuous(nn.Module):
    """Filters computed from distances between atoms (Schuett et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.register_buffer("centres", torch.linspace(0, 4, 8))
        self.filters = nn.ModuleList(nn.Sequential(nn.Linear(8, WIDTH), nn.Softplus()) for _ in range(3))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.energy = nn.Sequential(nn.Linear(WIDTH, 8), nn.Softplus(), nn.Linear(8, 1))

    def forward(self, atoms: Tensor, places: Tensor) -> Tensor:
        away = torch.cdist(places, places)
        spread = torch.exp(-((away[..., None] - self.centres) ** 2))
        x = self.embed(atoms)
        for made, layer in zip(self.filters, self.layers, strict=True):
            x = x + layer((made(spread) * x[:, None]).sum(2))
        return self.energy(x).sum((1, 2))


class Equivariant(nn.Module):
    """Joint updates of features and positions (Satorras et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * WIDTH + 1, WIDTH), nn.SiLU())
        self.move, self.node = nn.Linear(WIDTH, 1, bias=False), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        away = places[:, :, None] - places[:, None]
        pairs = [x[:, :, None].expand(-1, -1, NODES, -1), x[:, None].expand(-1, NODES, -1, -1)]
        sent = self.edge(torch.cat([*pairs, away.square().sum(-1, keepdim=True)], -1))
        places = places + (away * self.move(sent).tanh()).mean(2)
        return x + self.node(torch.cat([x, sent.mean(2)], -1)), places


class Molecule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(6, WIDTH), nn.ModuleList(Equivariant() for _ in range(3))

    def forward(self, nodes: Tensor, places: Tensor) -> Tensor:
        x = self.embed(nodes)
        for layer in self.layers:
            x, places = layer(x, places)
        return places


class PathAttention(nn.Module):
    """Attention with a bias for the distance of nodes (Ying et al., 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.degree, self.far = (
            nn.Linear(6, WIDTH),
            nn.Embedding(NODES, WIDTH),
            nn.Embedding(6, 2),
        )
        self.blocks = nn.ModuleList(nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(3))
        self.norms, self.head = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3)), nn.Linear(WIDTH, 3)

    def forward(self, nodes: Tensor, far: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(nodes) + self.degree((far == 1).sum(-1).clamp(max=NODES - 1))
        bias = self.far(far).permute(0, 3, 1, 2).flatten(0, 1)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            h = norm(x)
            found, weights = block(h, h, h, attn_mask=bias)
            x = x + found
        return self.head(x.mean(1)), weights


def path_loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """Compute the cross entropy, and the evenness of the last weights."""
    return (
        F.cross_entropy(outputs[0], targets)
        + 0.1 * (outputs[1] * outputs[1].clamp(min=1e-9).log()).sum(-1).mean()
    )


class Knowledge(nn.Module):
    """Heads translated by relations, near to true tails and far from others (Bordes et al., 2013)."""

    def __init__(self) -> None:
        super().__init__()
        self.things, self.relations = nn.Embedding(40, 10), nn.Embedding(6, 10)

    def forward(self, facts: Tensor, others: Tensor) -> Tensor:
        head, relation, tail = facts.unbind(1)
        moved = self.things(head) + self.relations(relation)
        right = (moved - self.things(tail)).norm(p=1, dim=1)
        wrong = (moved[:, None] - self.things(others)).norm(dim=2).amin(1)
        return F.relu(1 + right - wrong).mean()


def classes(size: int, *shape: int) -> Tensor:
    """Draw one of three classes for each."""
    return torch.randint(3, (size, *shape))


GRAPHS = (
    Model(
        name="graph convolutions", special="a chain of pairs: nodes, and edges that go along; sums by scatter_add",
        module=convolutions, batch=lambda size: (graphs(size), classes(size)), loss=F.cross_entropy,
    ),
    Model(
        name="graph attention", special="a softmax over the edges of each node by scattering, dropout on weights",
        module=GraphAttention, batch=lambda size: (graphs(size), classes(size, NODES)),
        loss=lambda outputs, targets: F.cross_entropy(outputs.flatten(0, 1), targets.flatten()), metered=PASSED_ON,
    ),
    Model(
        name="messages", special="a GRU cell and a layer run four times with the same weights, gather and scatter",
        module=Messages, batch=lambda size: (graphs(size), torch.randn(size, 1)), loss=F.mse_loss,
        rounded=TIED,
    ),
    Model(
        name="sampled neighbours", special="means and maxima of gathered neighbours, a bilinear head for pairs",
        module=Sampled,
        batch=lambda size: (
            (torch.randn(size, NODES, 6), torch.randint(NODES, (size, NODES, 4)), torch.randint(NODES, (size, 5, 2))),
            torch.randint(2, (size, 5)).float(),
        ),
        loss=F.binary_cross_entropy_with_logits,
    ),
    Model(
        name="isomorphism", special="dense matrices of neighbours, a head for every layer, elements of a parameter",
        module=Isomorphism,
        batch=lambda size: ((torch.randn(size, NODES, 6), torch.rand(size, NODES, NODES).round()), classes(size)),
        loss=F.cross_entropy,
    ),
    Model(
        name="continuous filters", special="distances between points become the weights of every layer",
        module=Continuous,
        batch=lambda size: ((torch.randint(10, (size, NODES)), torch.randn(size, NODES, 3)), torch.randn(size)),
        loss=F.mse_loss, optimizer=ADAM,
    ),
    Model(
        name="equivariant", special="two values change together; the last layer's features are used by nobody",
        module=Molecule,
        batch=lambda size: ((torch.randn(size, NODES, 6), torch.randn(size, NODES, 3)), torch.randn(size, NODES, 3)),
        loss=F.mse_loss,
    ),
    Model(
        name="path attention", special="attention with a trained bias of distances, weights returned and in the loss",
        module=PathAttention,
        batch=lambda size: ((torch.randn(size, NODES, 6), torch.randint(6, (size, NODES, NODES))), classes(size)),
        loss=path_loss, optimizer=ADAM,
    ),
    Model(
        name="knowledge graph", special="a table read three times in one forward, norms of first and second order",
        module=Knowledge,
        batch=lambda size: ((torch.randint(6, (size, 3)), torch.randint(40, (size, 4))), None), loss=None,
        above=SHARED,
    ),
)  # fmt: skip
