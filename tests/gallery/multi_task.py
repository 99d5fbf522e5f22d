"""Models with several tasks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gallery.model import ADAM, SHARED, TIED, Model


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


class GatedExperts(nn.Module):
    """Tasks with separate mixtures of the same experts (Ma et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(10, 12), nn.ReLU()) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(10, 3) for _ in range(2))
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        found = torch.stack([one(x) for one in self.experts], 1)
        mixed = [(gate(x).softmax(1).unsqueeze(2) * found).sum(1) for gate in self.gates]
        return [tower(part).squeeze(1) for tower, part in zip(self.towers, mixed, strict=True)]


class Uncertain(nn.Module):
    """Losses weighted by parameters of the model (Kendall et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.SELU()) for _ in range(3)
        )
        self.kind, self.depth, self.angle = nn.Linear(8, 4), nn.Linear(8, 1), nn.Linear(8, 2)
        self.doubts = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, kind: Tensor, depth: Tensor, angle: Tensor) -> dict[str, Any]:
        for part in self.body:
            x = x + part(x)
        turned = F.normalize(self.angle(x), dim=1)
        losses = torch.stack(
            [F.cross_entropy(self.kind(x), kind), F.l1_loss(self.depth(x), depth), F.mse_loss(turned, angle)]
        )
        return {"loss": (losses * torch.exp(-self.doubts) + self.doubts).sum(), "losses": losses.detach()}


class CrossStitch(nn.Module):
    """Two parallel networks with features mixed after every layer (Misra et al., 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mix = nn.Parameter(torch.tensor([[0.9, 0.1], [0.1, 0.9]]))

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        both = torch.stack([self.left(pair[0]).tanh(), self.right(pair[1]).tanh()])
        left, right = torch.einsum("ij,jbn->ibn", self.mix, both).unbind(0)
        return left, right


class Triplets(nn.Module):
    """One tower for three inputs (Schroff et al., 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 6)
        )

    def forward(self, anchor: Tensor, near: Tensor, far: Tensor) -> Tensor:
        found = [F.normalize(self.tower(x)) for x in (anchor, near, far)]
        return F.triplet_margin_loss(*found, margin=0.5)


class Reversal(torch.autograd.Function):
    """The identity, with a gradient of the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.3 * gradient


class Domains(nn.Module):
    """Features that predict classes and hide the domain of a sample (Ganin et al., 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Linear(8, 12), nn.ReLU(inplace=True), nn.Linear(12, 12), nn.ReLU(inplace=True)
        )
        self.kinds = nn.Linear(12, 3)
        self.domain = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.features(x)
        return self.kinds(x), self.domain(Reversal.apply(x)).squeeze(1)


class Distilled(nn.Module):
    """A small network that learns from a large frozen one in evaluation mode (Hinton et al., 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4)
        )
        self.teacher.requires_grad_(False).eval()
        self.student = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = (self.teacher(x) / 2).softmax(1)
        found = self.student(x)
        return F.cross_entropy(found, kinds) + 4 * F.kl_div(
            (found / 2).log_softmax(1), wanted, reduction="batchmean"
        )


def several(size: int) -> tuple[tuple[Tensor, ...], None]:
    """Draw a class, a depth and a direction."""
    angle = F.normalize(torch.randn(size, 2))
    return (torch.randn(size, 8), torch.randint(4, (size,)), torch.rand(size, 1), angle), None


MULTI_TASK = (
    Model(
        name="two losses", special="the loss inside, of two; labels travel along",
        module=TwoLosses,
        batch=lambda size: ((torch.randn(size, 12), torch.randint(5, (size,)), torch.randn(size, 1)), None), loss=None,
    ),
    Model(
        name="gated experts", special="a list of outputs, each with its mixture of the same experts",
        module=GatedExperts,
        batch=lambda size: (torch.randn(size, 10), (torch.rand(size).round(), torch.randn(size))),
        loss=lambda outputs, targets: F.binary_cross_entropy_with_logits(outputs[0], targets[0])
        + F.mse_loss(outputs[1], targets[1]),
    ),
    Model(
        name="uncertain losses", special="three losses inside, weighted by parameters of the model itself",
        module=Uncertain, batch=several, loss=None, optimizer=ADAM,
    ),
    Model(
        name="cross stitch", special="two networks side by side, a chain of pairs, two losses outside",
        module=lambda: nn.Sequential(*(CrossStitch() for _ in range(4))),
        batch=lambda size: ((torch.randn(size, 8), torch.randn(size, 8)), (torch.randn(size, 8), torch.randn(size, 8))),
        loss=lambda outputs, targets: sum(F.mse_loss(a, b) for a, b in zip(outputs, targets, strict=True)),
    ),
    Model(
        name="triplets", special="one tower run three times, whose batch norm sees three batches",
        module=Triplets, batch=lambda size: (tuple(torch.randn(size, 1, 8, 8) for _ in range(3)), None), loss=None,
        rounded=TIED, above=SHARED,
    ),
    Model(
        name="domains", special="a reversed gradient, a custom autograd function",
        module=Domains,
        batch=lambda size: (torch.randn(size, 8), (torch.randint(3, (size,)), torch.rand(size).round())),
        loss=lambda outputs, targets: F.cross_entropy(outputs[0], targets[0])
        + F.binary_cross_entropy_with_logits(outputs[1], targets[1]),
    ),
    Model(
        name="distilled", special="a frozen part in evaluation mode under no_grad, beside one that trains",
        module=Distilled, batch=lambda size: ((torch.randn(size, 8), torch.randint(4, (size,))), None), loss=None,
    ),
)  # fmt: skip
