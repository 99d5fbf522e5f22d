"""Unusual but supported models train to the numbers of a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from pipefit.capture import Task
from pipefit.capture.model import chain
from pipefit.profiler import profile
from pipefit.runtime import Trainer
from support.clashing_names import Named
from support.random_trainings import random_plan

SIZE, COUNT, STEPS = 2, 2, 3
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Model(nn.Module):
    """A model with a module between two layers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), inner, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.inner(self.first(x)))
        return out


class Nested(Model):
    """A module that takes its input in pieces, and returns texts and None in addition to its output."""

    def __init__(self) -> None:
        super().__init__(nn.ReLU())

    def forward(self, x: Any, *, more: Any) -> Any:  # type: ignore[override]
        return {"logits": super().forward(x["a"]["b"] + more[0]), "name": "nested", "nothing": None}


class Listed(nn.Module):
    """A module with parameters in a list and in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.randn(8) for _ in range(3))
        self.named = nn.ParameterDict({"bias": nn.Parameter(torch.randn(8))})

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return x + self.named["bias"]


class Partly(nn.Module):
    """A module with a list of parameters, the last of them unused."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.parts[0] + self.parts[1])


class Parts(nn.Module):
    """A list of layers, one with a list of the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(8, 8), Partly(), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Fourier(nn.Module):
    """A module with a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=8)


class There(nn.Module):
    """A transform to frequencies, which are complex and cross to the next layer."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x)


class Back(nn.Module):
    """The inverse transform."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(x, n=8)


class Policy(nn.Module):
    """Log probabilities of actions under a distribution that checks its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        spread = torch.distributions.Normal(self.a(x), F.softplus(self.b(x)))
        logarithms: Tensor = spread.log_prob(x)
        return logarithms


def batch(size: int) -> tuple[Any, Any]:
    """Return made-up regression data."""
    return torch.randn(size, 8), torch.randn(size, 8)


def nested(size: int) -> tuple[Any, Any]:
    """Return the same data in pieces."""
    pieces = {"x": {"a": {"b": torch.randn(size, 8)}}, "more": [torch.randn(size, 8)]}
    return pieces, (torch.randn(size, 8),)


def speech(size: int) -> tuple[Any, Any]:
    """Return frames with letters and their counts."""
    return torch.randn(size, 12, 8), (torch.randint(1, 8, (size, 4)), torch.randint(1, 5, (size,)))


def letters(outputs: Tensor, targets: tuple[Tensor, Tensor]) -> Tensor:
    """Compute the CTC loss."""
    frames = torch.full((len(outputs),), outputs.shape[1])
    return F.ctc_loss(outputs.log_softmax(-1).transpose(0, 1), targets[0], frames, targets[1])


@pytest.fixture
def make() -> Callable[[str], Task]:
    """Build the tasks by name; the caller catches warnings of old interfaces."""

    def task(name: str) -> Task:
        torch.manual_seed(1)
        base = Task(Model(nn.ReLU()), batch=batch, loss=F.mse_loss, optimizer=SGD)
        match name:
            case "old weight norm":
                return replace(base, module=Model(nn.utils.weight_norm(nn.Linear(8, 8))))  # type: ignore[no-untyped-call]
            case "lists of parameters":
                return replace(base, module=Model(Listed()))
            case "unused parameters in lists of one name":
                return replace(base, module=Parts())
            case "names that layers use":
                return replace(base, module=Model(Named()))
            case "distribution":
                return replace(base, module=Policy())
            case "complex parameter":
                return replace(base, module=Model(Fourier()))
            case "complex values between layers":
                return replace(base, module=chain([nn.Linear(8, 8), There(), Back(), nn.Linear(8, 8)]))
            case "nested batch":
                return replace(
                    base, module=Nested(), batch=nested, loss=lambda o, t: F.mse_loss(o["logits"], t[0])
                )
        return replace(base, batch=speech, loss=letters)

    return task


@pytest.mark.filterwarnings("ignore:.*weight_norm", "ignore:peaks do not include")
@pytest.mark.parametrize(
    "name",
    [
        "old weight norm",
        "lists of parameters",
        "unused parameters in lists of one name",
        "names that layers use",
        "distribution",
        "complex parameter",
        "complex values between layers",
        "nested batch",
        "CTC loss",
    ],
)
def test_oddities_are_trained(make: Callable[[str], Task], name: str) -> None:
    """Losses and parameters equal the plain loop's, bit by bit."""
    task, theirs = make(name), make(name).module
    assert isinstance(theirs, nn.Module) and task.loss is not None
    plan = random_plan(profile(task, microbatch_size=SIZE), Random(name), microbatches=COUNT)
    trainer, optimizer = Trainer(task, plan), SGD(theirs.parameters())
    for step in range(STEPS):
        torch.manual_seed(step)
        whole = task.batch(SIZE * COUNT)
        found = trainer.step(whole)
        losses = []
        for number in range(COUNT):
            inputs, targets = pytree.tree_map(lambda tensor: tensor.split(SIZE)[number], whole)  # noqa: B023
            losses.append(
                task.loss(theirs(**inputs) if isinstance(inputs, dict) else theirs(inputs), targets)
            )
        for loss in reversed(losses) if plan.training.schedule == "torchgpipe" else losses:
            (loss / COUNT).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert found == pytest.approx(torch.stack(losses).mean().item(), rel=1e-6)
    trained = trainer.state_dict()
    assert trained.keys() == theirs.state_dict().keys()
    for key, tensor in theirs.state_dict().items():
        torch.testing.assert_close(trained[key], tensor, rtol=0.0, atol=0.0)
