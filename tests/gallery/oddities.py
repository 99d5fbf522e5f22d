"""Models with rare features: buffers that feed back, weights computed in the forward, in-place writes, unused
parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from gallery.model import ADAM, HOUSEHOLDER, SHARED, TIED, Model


class StraightThrough(torch.autograd.Function):
    """A rounding with straight-through gradient (Bengio et al., 2013); also returns the rounding distance,
    and None.
    """

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


class Reversed(torch.autograd.Function):
    """The identity, with a gradient of the other sign (Ganin et al., 2016)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradient, None


reverse = Reversed.apply  # a custom name, as models often have


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


class Centred(nn.Linear):
    """A linear layer that subtracts a running mean, which it replaces in each forward."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Centring(nn.Module):
    """Two layers that subtract running means; one runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.head = Centred(6), Centred(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.again(self.first(x))))


class Repeated(nn.Module):
    """One block, run three times (as ALBERT shares its layers), with a running mean."""

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


class Skip(nn.Module):
    """A layer that passes on its result together with its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, pair: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, skipped = pair if isinstance(pair, tuple) else (pair, pair)
        return torch.tanh(self.linear(x)) * 0.5 + skipped, x


class Join(nn.Module):
    """The sum of a pair."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] + pair[1]


def spectral() -> nn.Module:
    """Build weights divided by their largest singular value, tracked in buffers (Miyato et al., 2018)."""
    norm = parametrizations.spectral_norm
    return nn.Sequential(
        norm(nn.Conv2d(1, 6, 3)), nn.LeakyReLU(0.1, inplace=True), norm(nn.Conv2d(6, 6, 3)), nn.Flatten(),
        nn.Linear(96, 3),
    )  # fmt: skip


def weight_normed() -> nn.Module:
    """Build weights of separate direction and length (Salimans and Kingma, 2016); one weight is kept
    orthogonal.
    """
    norm = parametrizations.weight_norm
    return nn.Sequential(
        norm(nn.Conv1d(3, 8, 3)), nn.ELU(inplace=True), norm(nn.Conv1d(8, 8, 3), dim=None), nn.Flatten(),
        norm(nn.Linear(64, 6)), parametrizations.orthogonal(nn.Linear(6, 6, bias=False)), nn.Linear(6, 3),
    )  # fmt: skip


class Averaging(nn.Module):
    """Codes that track their users by moving averages, and counters (Razavi et al., 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(5, 4), nn.Linear(4, 3)
        self.register_buffer("codes", torch.randn(8, 4))
        self.register_buffer("used", torch.ones(8))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("never", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        number = torch.cdist(x, self.codes).argmin(1)
        code = self.codes[number]
        with torch.no_grad():
            chosen = F.one_hot(number, 8).to(x.dtype)
            self.used.lerp_(chosen.sum(0), 0.1)
            self.codes.copy_(0.9 * self.codes + 0.1 * (chosen.mT @ x) / self.used[:, None])
            self.steps += 1
        return self.outward(x + (code - x).detach())


class AllNorms(nn.Module):
    """Every normalisation in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3)
        self.norms = nn.ModuleList(
            [
                *(nn.BatchNorm2d(8), nn.InstanceNorm2d(8, track_running_stats=True)),
                *(nn.GroupNorm(2, 8), nn.LayerNorm([8, 6, 6]), nn.LocalResponseNorm(2), nn.RMSNorm(6)),
                *(nn.BatchNorm2d(8, track_running_stats=False), nn.InstanceNorm2d(8, affine=True)),
            ]
        )
        self.head = nn.Linear(8 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        for norm in self.norms:
            x = norm(x) + 0.1 * x
        return self.head(x.flatten(1))


class Pools(nn.Module):
    """Poolings, paddings and their way back in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 6, 3, padding=1, padding_mode="circular"), nn.Conv2d(6, 6, 3)
        self.pool, self.back = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.lengths, self.head = nn.LPPool2d(2, 2), nn.Linear(6 * 9, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.softplus(self.first(F.pad(x, (1, 1, 1, 1), mode="reflect")))
        small, places = self.pool(x)
        x = x + self.back(small, places)
        x = self.lengths(self.second(F.celu(F.avg_pool2d(x, 2, ceil_mode=True), 0.5)).square() + 0.1)
        return self.head(F.adaptive_max_pool2d(x, 3).flatten(1))


def dropouts() -> nn.Module:
    """Build a chain of every kind of dropout, some in place."""
    return nn.Sequential(
        *(nn.Conv2d(2, 6, 3), nn.Dropout2d(0.3), nn.SELU(), nn.AlphaDropout(0.2)),
        *(nn.Conv2d(6, 6, 3), nn.Dropout(0.4, inplace=True), nn.RReLU(), nn.FeatureAlphaDropout(0.2)),
        *(nn.Flatten(), nn.Linear(96, 12), nn.Dropout(0.5), nn.Linear(12, 3), nn.Dropout(0.1, inplace=True)),
    )


class InPlace(nn.Module):
    """A layer that writes into views of its results, and into outputs of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            x[:, number::4] *= 2
            x[:, :4].add_(x[:, 4:].clone().sigmoid())
            x.relu_() if number % 2 else x.tanh_()
        out = torch.empty(len(x), 3)
        out[:] = self.head(x)
        return out.mul_(0.5)


class Hyper(nn.Module):
    """A network whose weights another network computes (Ha et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 6 * 8 + 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, about: Tensor) -> Tensor:
        made = self.make(about)
        weight, bias = made[:, :48].unflatten(1, (8, 6)), made[:, 48:]
        return self.head(torch.baddbmm(bias.unsqueeze(2), weight, x.unsqueeze(2)).squeeze(2).relu())


class Capsules(nn.Module):
    """Capsules that agree on wholes in three rounds, the first two without gradients (Sabour
    et al., 2017).
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 4, 2)
        self.vote = nn.Parameter(torch.randn(18, 3, 6, 4) / 4)

    def forward(self, x: Tensor) -> Tensor:
        parts = squashed(self.conv(x).unflatten(1, (2, 4)).permute(0, 1, 3, 4, 2).flatten(1, 3))
        votes = torch.einsum("pkoi,bpi->bpko", self.vote, parts)
        held, agreed = votes.detach(), torch.zeros(votes.shape[:3])
        for _ in range(2):
            whole = squashed((agreed.softmax(2).unsqueeze(3) * held).sum(1))
            agreed = agreed + (held * whole.unsqueeze(1)).sum(-1)
        return squashed((agreed.softmax(2).unsqueeze(3) * votes).sum(1)).norm(dim=-1)


def squashed(x: Tensor) -> Tensor:
    """Scale long vectors to length one, short ones to zero."""
    square = x.square().sum(-1, keepdim=True)
    return x * square / ((1 + square) * (square + 1e-8).sqrt())


def margins(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the margin loss: the right vector long, the others short."""
    right = F.one_hot(targets, 3)
    return (
        (right * F.relu(0.9 - outputs).square() + 0.5 * (1 - right) * F.relu(outputs - 0.1).square())
        .sum(1)
        .mean()
    )


class Bounded(nn.Module):
    """A table that clips its rows in place on lookup; an unused part; a trained scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6, max_norm=0.5)
        self.unused, self.scale = nn.Linear(6, 50), nn.Parameter(torch.tensor(1.0))
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Softsign(), nn.Linear(12, 3))

    def forward(self, numbers: Tensor) -> Tensor:
        return self.scale * self.body(self.embed(numbers).mean(1))


class Solving(nn.Module):
    """A layer with linear algebra: a ridge regression on given examples, with trained features (Bertinetto et
    al., 2019).
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(5, 10), nn.LeakyReLU(0.1), nn.Linear(10, 4))
        self.ridge, self.scale = nn.Parameter(torch.tensor(0.0)), nn.Parameter(torch.tensor(1.0))

    def forward(self, given: Tensor, answers: Tensor, asked: Tensor) -> Tensor:
        known, wanted = self.features(given), self.features(asked)
        square = known.mT @ known + self.ridge.exp() * torch.eye(4)
        return self.scale * wanted @ torch.linalg.solve(square, known.mT @ answers)


def pairs_of(kinds: int, *shape: int) -> Any:
    """Draw batches of noise, and one of `classes` classes."""

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, *shape), torch.randint(kinds, (size,))

    return batch


ODDITIES = (
    Model(
        name="quantised", special="custom autograd functions: straight-through rounding and a reversed gradient",
        module=Quantised, batch=pairs_of(3, 6), loss=F.cross_entropy,
    ),
    Model(
        name="centring", special="buffers of layers, replaced in each forward, that feed back; one layer runs twice",
        module=Centring, batch=pairs_of(3, 6), loss=F.cross_entropy, rounded=TIED,
    ),
    Model(
        name="repeated", special="one module run three times, a buffer of the model itself that is replaced",
        module=Repeated, batch=pairs_of(3, 6), loss=F.cross_entropy, rounded=TIED, above=SHARED,
    ),
    Model(
        name="skips", special="pairs between the layers of a chain, Adam with amsgrad",
        module=lambda: nn.Sequential(Skip(20), Skip(20), Skip(20), Join(), nn.Linear(20, 5)),
        batch=lambda size: (torch.randn(size, 20), torch.randn(size, 5)), loss=F.smooth_l1_loss,
        optimizer=lambda given: torch.optim.Adam(given, amsgrad=True),
    ),
    Model(
        name="spectral norm", special="weights divided by a norm that buffers follow in each forward",
        module=spectral, batch=pairs_of(3, 1, 8, 8), loss=F.cross_entropy,
    ),
    Model(
        name="weight norm", special="weights made of directions and lengths, one kept orthogonal",
        module=weight_normed, batch=pairs_of(3, 3, 12), loss=F.cross_entropy, metered=HOUSEHOLDER,
    ),
    Model(
        name="averaging", special="buffers updated in place under no_grad: moving averages, an integer counter, None",
        module=Averaging, batch=pairs_of(3, 5), loss=F.cross_entropy, size=4,
    ),
    Model(
        name="all norms", special="every normalisation in a row, with and without weights and running statistics",
        module=AllNorms, batch=pairs_of(3, 2, 8, 8), loss=F.cross_entropy,
    ),
    Model(
        name="pools", special="poolings and their way back, circular and reflected padding",
        module=Pools, batch=pairs_of(3, 2, 12, 12), loss=F.cross_entropy,
    ),
    Model(
        name="dropouts", special="every kind of dropout in a chain, some in place, random slopes",
        module=dropouts, batch=pairs_of(3, 2, 8, 8), loss=F.cross_entropy,
    ),
    Model(
        name="in place", special="writing into views of results of layers",
        module=InPlace, batch=pairs_of(3, 8), loss=F.cross_entropy,
    ),
    Model(
        name="hypernetwork", special="the weights of one network, for each sample, are made by another",
        module=Hyper, batch=lambda size: ((torch.randn(size, 6), torch.randn(size, 4)), torch.randint(3, (size,))),
        loss=F.cross_entropy, optimizer=ADAM,
    ),
    Model(
        name="capsules", special="rounds of agreement without gradients, one large parameter of the model itself",
        module=Capsules, batch=pairs_of(3, 1, 8, 8), loss=margins, optimizer=ADAM,
    ),
    Model(
        name="bounded", special="a table that is changed in place when it is read, a part that nobody uses",
        module=Bounded, batch=lambda size: (torch.randint(20, (size, 4)), torch.randint(3, (size,))),
        loss=F.cross_entropy,
    ),
    Model(
        name="solving", special="a linear system solved in each forward, one module for two inputs",
        module=Solving,
        batch=lambda size: (
            (torch.randn(size, 6, 5), torch.randn(size, 6, 2), torch.randn(size, 3, 5)), torch.randn(size, 3, 2),
        ),
        loss=F.mse_loss, rounded=TIED,
    ),
)  # fmt: skip
