"""Models as users write them, which no zoo knows: residual, tuple-passing, recurrent, torch's own encoder layers.

Each has another loss and another optimizer than the zoo's.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task


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


class Skip(nn.Module):
    """Passes on its result and, beside it, what it was given."""

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


class Recurrent(nn.Module):
    """A GRU that answers in time-major order: a view that is not contiguous."""

    def __init__(self, inward: int, outward: int) -> None:
        super().__init__()
        self.gru = nn.GRU(inward, outward, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0].transpose(0, 1)


def resnet() -> Task:
    """Batch and group norm, mean squared error, RMSprop."""
    return Task(
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), Residual(16, 24), Residual(24, 32)),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 1)),
        ),
        batch=lambda size: (torch.randn(size, 3, 33, 33), torch.randn(size, 1)),
        loss=F.mse_loss,
        optimizer=torch.optim.RMSprop,
        name="resnet",
    )


def skips() -> Task:
    """Pairs between the layers, smooth L1, Adam with amsgrad."""
    return Task(
        lambda: nn.Sequential(Skip(20), Skip(20), Skip(20), Join(), nn.Linear(20, 5)),
        batch=lambda size: (torch.randn(size, 20), torch.randn(size, 5)),
        loss=F.smooth_l1_loss,
        optimizer=partial(torch.optim.Adam, amsgrad=True),
        name="skips",
    )


def recurrent() -> Task:
    """A GRU over tokens, cross entropy in time-major order, SGD with Nesterov momentum and weight decay."""
    return Task(
        lambda: nn.Sequential(nn.Embedding(50, 16), Recurrent(16, 24), nn.LayerNorm(24), nn.Linear(24, 50)),
        batch=lambda size: (torch.randint(0, 50, (size, 12)), torch.randint(0, 50, (size, 12))),
        loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.t().flatten()),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
        name="recurrent",
    )


def encoder() -> Task:
    """torch's encoder layers, post- and pre-norm, with dropout; binary cross entropy, Adagrad."""
    return Task(
        lambda: nn.Sequential(
            nn.Linear(16, 32),
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True, activation="gelu"),
            nn.Linear(32, 2),
        ),
        batch=lambda size: (torch.randn(size, 10, 16), torch.rand(size, 10, 2)),
        loss=lambda output, target: F.binary_cross_entropy(output.sigmoid(), target),
        optimizer=torch.optim.Adagrad,
        name="encoder",
    )


OWN_MODELS = {"resnet": resnet, "skips": skips, "recurrent": recurrent, "encoder": encoder}
