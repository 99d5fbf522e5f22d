"""Models with state or effects that a trace loses: a chain would compute something else, unless it is
refused.

All are three linear layers; they differ between the first two.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task

WIDTH, CLASSES = 6, 3


class Layered(nn.Module):
    """Three linear layers with `between` after the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, CLASSES)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(self.between(torch.tanh(self.first(x))))))


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randint(CLASSES, (size,))


def task_of(model: Callable[[], nn.Module], **options: Any) -> Task:
    """Return a task with one of these models."""
    return Task(model, batch=batch, loss=F.cross_entropy, name="forgetful", **options)


# -------------------------------------------------------------------- state between calls


class Remembering(Layered):
    """Truncated backpropagation: a model that adds an attribute set by the previous call."""

    left: Tensor | None = None

    def between(self, x: Tensor) -> Tensor:
        before, self.left = self.left, x.detach()
        return x if before is None else x + 0.5 * before


class SetAtFirst(Layered):
    """Division by a scale that the first call computes from its data."""

    scale: Tensor | None = None

    def between(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.detach().std(0) + 0.1
        return x / self.scale


class Growing(Layered):
    """Multiplication by the length of a growing list."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def between(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return x * len(self.seen)


class CountingOutside(Layered):
    """Multiplication by a count in a closure."""

    def __init__(self) -> None:
        super().__init__()
        calls = 0

        def count() -> int:
            nonlocal calls
            calls += 1
            return calls

        self.count = count

    def between(self, x: Tensor) -> Tensor:
        return x * self.count()


def remembering() -> Task:
    """Build a task for the command line."""
    return task_of(Remembering)


# -------------------------------------------------------------------- another forward


class Seeding(Layered):
    """A model that seeds torch's generator for constant noise."""

    def between(self, x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return x * torch.rand(WIDTH)


class Exporting(Layered):
    """A model that behaves differently during export."""

    def between(self, x: Tensor) -> Tensor:
        return 2 * x if torch.compiler.is_exporting() else x


class Elsewhere(Layered):
    """A model that can be traced but not run on the CPU."""

    def between(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            raise RuntimeError("no kernel for the CPU")
        return x


# -------------------------------------------------------------------- refused during the trace


class Counting(Layered):
    """A model that changes from the thousandth call on, beyond any two microbatches. The count starts in the
    class.
    """

    calls = 0

    def between(self, x: Tensor) -> Tensor:
        self.calls += 1
        return 2 * x if self.calls > 1000 else x


class Annealing(Layered):
    """Division by a falling temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def between(self, x: Tensor) -> Tensor:
        self.temperature *= 0.5
        return x / self.temperature


class PythonDraws(Layered):
    """Scaling that Python's generator skips at random."""

    def between(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else 2 * x


class NumpyDraws(Layered):
    """Noise from numpy."""

    def between(self, x: Tensor) -> Tensor:
        return x + float(np.random.rand())


class Hiding(Layered):
    """A layer in a plain list, unknown to nn.Module."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(WIDTH, WIDTH)]

    def between(self, x: Tensor) -> Tensor:
        return self.hidden[0](x)


class PuttingData(Layered):
    """Weight normalisation by assignment to `data`."""

    def between(self, x: Tensor) -> Tensor:
        self.second.weight.data = F.normalize(self.second.weight.data, dim=0)
        return x


class OwnGenerator(Layered):
    """Noise from a separate generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def between(self, x: Tensor) -> Tensor:
        return x * torch.rand(WIDTH, generator=self.generator)


# -------------------------------------------------------------------- kept


class ReadingData(Layered):
    """Computation with a clamped weight, a buffer and an activation through their `data`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def between(self, x: Tensor) -> Tensor:
        self.second.weight.data.clamp_(-0.1, 0.1)
        self.mean.data.mul_(0.9).add_(x.detach().mean(0))
        return x * x.data - self.mean.data


class OverItself(Layered):
    """A lambda that holds the module, and so its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.scaled = lambda x: x * self.scale

    def between(self, x: Tensor) -> Tensor:
        return self.scaled(x)


class Patched(Layered):
    """A layer whose forward is wrapped by a function, as adapter libraries do."""

    def __init__(self) -> None:
        super().__init__()
        before = self.second.forward
        self.shift = nn.Parameter(torch.ones(WIDTH))

        def forward(x: Tensor, *, module: nn.Module = self) -> Tensor:
            return before(x) + module.shift

        self.second.forward = forward  # type: ignore[assignment]


class Collecting(Layered):
    """Hooks that keep layers' outputs in a dictionary of the module, and in a list cleared after each
    call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        self.seen = seen = list[Tensor]()
        self.first.register_forward_hook(lambda module, inputs, output: self.kept.update(first=output))
        self.first.register_forward_hook(lambda module, inputs, output: seen.append(output))

    def between(self, x: Tensor) -> Tensor:
        return x * self.kept.pop("first") + self.seen.pop()


class Settling(Layered):
    """A model that records the width of its input, as windowed attention does, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 7

    def between(self, x: Tensor) -> Tensor:
        self.width = x.shape[1]
        return x / self.width


class DrawingInVain(Layered):
    """A model that draws unused random numbers before used ones."""

    def between(self, x: Tensor) -> Tensor:
        F.dropout(x)
        return F.dropout(x)


class Dropping(Layered):
    """Dropout, and one mask for two places."""

    def between(self, x: Tensor) -> Tensor:
        mask = (torch.rand(WIDTH) < 0.5).to(x.dtype)
        return F.dropout(x) * mask + mask


class AskingForPrecision(Layered):
    """A model that reads autocast's state and a value's dtype, and turns autocast off for one part."""

    def between(self, x: Tensor) -> Tensor:
        x = 2 * x if torch.is_autocast_enabled("cpu") else x
        x = x if x.dtype == torch.float32 else 3 * x
        with torch.autocast("cpu", enabled=False):
            return x.float() @ self.first.weight


class Doubled(nn.Sequential):
    """A Sequential with a custom forward."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def doubled() -> nn.Module:
    return Doubled(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def hooked() -> nn.Module:
    """Return a Sequential with a hook that doubles its output."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    module.register_forward_hook(lambda module, inputs, outputs: 2 * outputs)
    return module
