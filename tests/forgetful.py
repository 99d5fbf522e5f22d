"""Models that a trace does not see through: each computes something else as a chain, unless it is refused.

All are three linear layers; what they do between the first two is the point.
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
    """A task of one of these models."""
    return Task(model, batch=batch, loss=F.cross_entropy, name="forgetful", **options)


# -------------------------------------------------------------------- what lasts from one call to the next


class Remembering(Layered):
    """Truncated backpropagation: adds what the call before left in an attribute."""

    left: Tensor | None = None

    def between(self, x: Tensor) -> Tensor:
        before, self.left = self.left, x.detach()
        return x if before is None else x + 0.5 * before


class SetAtFirst(Layered):
    """Divides by a scale that the first call computes from its data."""

    scale: Tensor | None = None

    def between(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.detach().std(0) + 0.1
        return x / self.scale


class Growing(Layered):
    """Multiplies by the length of a list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def between(self, x: Tensor) -> Tensor:
        self.seen.append(1)
        return x * len(self.seen)


class CountingOutside(Layered):
    """Multiplies by a count in a closure."""

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
    """For the command line."""
    return task_of(Remembering)


# -------------------------------------------------------------------- another forward


class Seeding(Layered):
    """Seeds torch's generator itself, for noise that is always the same."""

    def between(self, x: Tensor) -> Tensor:
        torch.manual_seed(5)
        return x * torch.rand(WIDTH)


class Exporting(Layered):
    """Does something else while it is exported."""

    def between(self, x: Tensor) -> Tensor:
        return 2 * x if torch.compiler.is_exporting() else x


class Elsewhere(Layered):
    """Can be traced, and cannot run on the CPU."""

    def between(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting():
            raise RuntimeError("no kernel for the CPU")
        return x


# -------------------------------------------------------------------- refused while they are traced


class Counting(Layered):
    """Acts from the thousandth call on: no two microbatches show it. The count begins in the class."""

    calls = 0

    def between(self, x: Tensor) -> Tensor:
        self.calls += 1
        return 2 * x if self.calls > 1000 else x


class Annealing(Layered):
    """Divides by a temperature that falls."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def between(self, x: Tensor) -> Tensor:
        self.temperature *= 0.5
        return x / self.temperature


class PythonDraws(Layered):
    """Leaves out the scaling at random, by Python's generator."""

    def between(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else 2 * x


class NumpyDraws(Layered):
    """Noise of numpy's."""

    def between(self, x: Tensor) -> Tensor:
        return x + float(np.random.rand())


class Hiding(Layered):
    """A list, of which nn.Module does not know, holds a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.Linear(WIDTH, WIDTH)]

    def between(self, x: Tensor) -> Tensor:
        return self.hidden[0](x)


class PuttingData(Layered):
    """Normalises a weight by giving it other data."""

    def between(self, x: Tensor) -> Tensor:
        self.second.weight.data = F.normalize(self.second.weight.data, dim=0)
        return x


class OwnGenerator(Layered):
    """Noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def between(self, x: Tensor) -> Tensor:
        return x * torch.rand(WIDTH, generator=self.generator)


# -------------------------------------------------------------------- kept


class ReadingData(Layered):
    """Clamps a weight and reads a buffer by their `data`, and computes with that of an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def between(self, x: Tensor) -> Tensor:
        self.second.weight.data.clamp_(-0.1, 0.1)
        self.mean.data.mul_(0.9).add_(x.detach().mean(0))
        return x * x.data - self.mean.data


class OverItself(Layered):
    """A lambda holds the module, and so its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.scaled = lambda x: x * self.scale

    def between(self, x: Tensor) -> Tensor:
        return self.scaled(x)


class Patched(Layered):
    """One layer's forward is replaced by a function around it, as libraries of adapters do."""

    def __init__(self) -> None:
        super().__init__()
        before = self.second.forward
        self.shift = nn.Parameter(torch.ones(WIDTH))

        def forward(x: Tensor, *, module: nn.Module = self) -> Tensor:
            return before(x) + module.shift

        self.second.forward = forward  # type: ignore[assignment]


class Collecting(Layered):
    """Hooks keep what layers return in a dictionary of the module, and in a list that it forgets after each call."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        self.seen = seen = list[Tensor]()
        self.first.register_forward_hook(lambda module, inputs, output: self.kept.update(first=output))
        self.first.register_forward_hook(lambda module, inputs, output: seen.append(output))

    def between(self, x: Tensor) -> Tensor:
        return x * self.kept.pop("first") + self.seen.pop()


class Settling(Layered):
    """Notes the width of what it sees, as windowed attention does, and computes with that."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 7

    def between(self, x: Tensor) -> Tensor:
        self.width = x.shape[1]
        return x / self.width


class DrawingInVain(Layered):
    """Draws what it does not use, and then what it does."""

    def between(self, x: Tensor) -> Tensor:
        F.dropout(x)
        return F.dropout(x)


class Dropping(Layered):
    """Dropout, and one mask for two places."""

    def between(self, x: Tensor) -> Tensor:
        mask = (torch.rand(WIDTH) < 0.5).to(x.dtype)
        return F.dropout(x) * mask + mask


class AskingForPrecision(Layered):
    """Asks whether it is under autocast and of which type a value is, and turns autocast off for a while."""

    def between(self, x: Tensor) -> Tensor:
        x = 2 * x if torch.is_autocast_enabled("cpu") else x
        x = x if x.dtype == torch.float32 else 3 * x
        with torch.autocast("cpu", enabled=False):
            return x.float() @ self.first.weight


class Doubled(nn.Sequential):
    """A Sequential with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def doubled() -> nn.Module:
    return Doubled(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def hooked() -> nn.Module:
    """A Sequential with a hook that doubles what it returns."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
    module.register_forward_hook(lambda module, inputs, outputs: 2 * outputs)
    return module
