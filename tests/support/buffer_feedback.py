"""Layers that change buffers in the forward and compute with them, and layers that cannot run twice for other
reasons.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, FusedMovingAvgObsFakeQuantize, MovingAverageMinMaxObserver
from torch.nn.utils import parametrizations, spectral_norm

from pipefit.capture import Task
from pipefit.capture.model import chain

WIDTH = 6


class Average(nn.Module):
    """A linear layer that subtracts a moving average of its inputs, or keeps one for later."""

    def __init__(self, *, reads: bool = True) -> None:
        super().__init__()
        self.linear, self.reads = nn.Linear(WIDTH, WIDTH), reads
        self.register_buffer("average", torch.zeros(WIDTH))

    def update(self, mean: Tensor) -> None:
        """Update in place."""
        self.average.lerp_(mean, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.update(x.detach().mean(0))
        return x - self.average if self.reads else x


class Replaced(Average):
    """A buffer that each forward replaces by another tensor."""

    def update(self, mean: Tensor) -> None:
        """Update out of place."""
        self.average = 0.9 * self.average + 0.1 * mean


class ReplacedAfterwards(Average):
    """A buffer whose old value is saved for the backward before another tensor replaces it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        result = x * (1.0 + self.average.unsqueeze(0)) * self.average
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return result


class BehindTorch(Average):
    """A buffer changed through `.data`, invisible to autograd."""

    def update(self, mean: Tensor) -> None:
        """Update in place."""
        self.average.data.mul_(0.9).add_(mean, alpha=0.1)


class Saved(Average):
    """An average used as a factor, so that the backward needs its old value."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.update(x.detach().mean(0))
        return x * self.average


class Rows(nn.Module):
    """Two averages that are rows of one table: all three are buffers in one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.zeros(2, WIDTH))
        self.register_buffer("fast", self.table[0])
        self.register_buffer("slow", self.table[1])

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.fast.lerp_(x.detach().mean(0), 0.5)
        self.slow.lerp_(self.fast, 0.1)
        return x - self.table.sum(0)


class Observed(nn.Module):
    """Rounding to 8 bits between moving averages of the lowest and the highest input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("low", torch.tensor([-1.0]))
        self.register_buffer("high", torch.tensor([1.0]))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.seen.add_(1)
        self.low.lerp_(x.detach().amin(), 0.3)
        self.high.lerp_(x.detach().amax(), 0.3)
        scale = (self.high - self.low) / 255.0
        rounded = torch.clamp(torch.round((x - self.low) / scale), 0.0, 255.0) * scale + self.low
        return x + (rounded - x).detach()


class ScaledGradient(torch.autograd.Function):
    """The identity with a scaled gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(1.0 + scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


class GradientAlone(Average):
    """A layer in which only the gradient depends on the average."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.update(x.detach().mean(0))
        scaled: Tensor = ScaledGradient.apply(x, self.average)
        return scaled


class Twice(nn.Module):
    """An average and batch norm, applied in parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.average = nn.BatchNorm1d(WIDTH), Average()
        self.register_buffer("mask", torch.ones(5 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.average(self.norm(x)) * self.mask[:WIDTH]


def spectral() -> nn.Module:
    """Build the spectral norm of torch.nn.utils.parametrizations."""
    return parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


def old_spectral() -> nn.Module:
    """Build the spectral norm of torch.nn.utils, whose weight is an attribute that each forward replaces."""
    return spectral_norm(nn.Linear(WIDTH, WIDTH))


def fused_observer() -> nn.Module:
    """Build torch's fused observer: moving averages of the lowest and highest value, and rounding."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), FusedMovingAvgObsFakeQuantize())


def observer() -> nn.Module:
    """Build torch's older observer, which checks for the first call and for whether to observe."""
    observe = MovingAverageMinMaxObserver.with_args(averaging_constant=0.5)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), FakeQuantize(observer=observe, quant_min=0, quant_max=255))


class Started(nn.Module):
    """Division by the deviation of the first microbatch, then by a moving average of deviations."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("started", torch.tensor(False))
        self.register_buffer("scale", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if not self.started:
            self.scale.copy_(x.detach().std(0) + 0.1)
            self.started.fill_(True)
        self.scale.lerp_(x.detach().std(0) + 0.1, 0.3)
        return x / self.scale


# By name: the layer, the names of its buffers that feed back, and the supported model forms
FEEDING_BACK: dict[str, tuple[Callable[[], nn.Module], set[str], tuple[bool, ...]]] = {
    "average": (Average, {"average"}, (False, True)),
    "replaced": (Replaced, {"average"}, (False, True)),
    "replaced afterwards": (ReplacedAfterwards, {"average"}, (True,)),
    "behind torch": (BehindTorch, {"average"}, (True,)),
    "saved": (Saved, {"average"}, (False, True)),
    "rows": (Rows, {"table", "fast", "slow"}, (True,)),
    "observed": (Observed, {"low", "high"}, (False, True)),
    "gradient alone": (GradientAlone, {"average"}, (False, True)),
    "twice": (Twice, {"average.average"}, (False, True)),
    "spectral norm": (
        spectral,
        {"parametrizations.weight.0._u", "parametrizations.weight.0._v"},
        (False, True),
    ),
    "fused observer": (
        fused_observer,
        {"1.scale", "1.zero_point", "1.activation_post_process.min_val", "1.activation_post_process.max_val"},
        (False, True),
    ),
    "observer": (
        observer,
        {
            "1.scale",
            "1.zero_point",
            "1.fake_quant_enabled",
            "1.observer_enabled",
            "1.activation_post_process.min_val",
            "1.activation_post_process.max_val",
            "1.activation_post_process.eps",
        },
        (True,),
    ),
    "started": (Started, {"started", "scale"}, (True,)),
    "old spectral norm": (old_spectral, {"weight_u", "weight_v"}, (False,)),
}


class Wrapped(nn.Module):
    """A traced model with one part in the middle."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(torch.tanh(self.first(x))))


def task_with(build: Callable[[], nn.Module], *, by_hand: bool) -> Task:
    """Return a task of a few layers including this one, as a manual chain or a traced model."""

    def model() -> nn.Module:
        if not by_hand:
            return Wrapped(build())
        return chain([nn.Linear(WIDTH, WIDTH), nn.Tanh(), build(), nn.Linear(WIDTH, WIDTH)])

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, WIDTH), torch.randn(size, WIDTH)

    return Task(model, batch=batch, loss=nn.functional.mse_loss, name="feeding back")
