"""Modules of traced models that branch on values stay whole, and train to the numbers of a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task, module_key
from pipefit.capture.model import built, capture
from pipefit.capture.sample import sample
from pipefit.errors import PipefitError, UsageError
from pipefit.profiler import profile
from pipefit.runtime import Trainer, certify
from pipefit.schema.decisions import Decision, SavedTensors, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid, Stage
from pipefit.simulator import simulate
from support.gallery_samples import sampled
from support.offload_choices import movable
from support.random_trainings import random_plan

HERE = rf"{Path(__file__).name}:"
SIZE, COUNT, STEPS, WIDTH = 4, 2, 3, 8
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)

pytestmark = pytest.mark.filterwarnings("ignore:peaks do not include")


class Row(nn.Module):
    """A row of parts, each after a linear layer, and a last linear layer."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.between = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(len(parts) + 1))
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for between, part in zip(self.between, self.parts, strict=False):
            made = part(between(x))
            x = made if isinstance(made, Tensor) else made["hidden"]
        out: Tensor = self.between[-1](x)
        return out


class Part(nn.Module):
    """A linear layer followed by a function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Chooses(Part):
    """A choice between two branches by the sign of a sum; random data takes both."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) if x.sum() > 0 else x


class Experts(nn.Module):
    """Experts with a gate that chooses one per sample; the module also returns their number."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = (
            nn.Linear(WIDTH, 3),
            nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)),
        )

    def forward(self, x: Tensor, *, scale: float = 0.5, mask: None = None) -> dict[str, Any]:
        weights, numbers = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            at = numbers == number
            if at.any():
                out[at] = expert(x[at]) * weights[at, None] * scale
        return {"hidden": out, "experts": 3, "mask": mask}


class Clamps(Part):
    """A clamp of non-finite values, as in DETR; it never takes effect."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if not torch.isfinite(x).all():
            x = torch.clamp(x, min=-1e6, max=1e6)
        return x


class Counts(Part):
    """An average over all previous batches, in a buffer that the module replaces and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += 1
            self.mean = self.mean + (x.detach().mean(0) - self.mean) / float(self.seen)
        return self.linear(x - self.mean)


class Inside(nn.Module):
    """A module around a part with a value-dependent number of rows: the outer module stays whole."""

    class Rows(Part):
        """A selection of rows."""

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.linear(x[x.sum(1) > 0])
            return found

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.Rows()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.rows(x).sum(0)
        return out


class Tied(nn.Module):
    """One weight in a whole module, after it, and in a second call."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.middle = Chooses(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = F.linear(self.one(self.middle(self.one(x))), self.one.linear.weight)
        return out


class Guards(Part):
    """A module that raises on non-finite values."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.isnan(x).any():
            raise ValueError("not a number")
        out: Tensor = self.linear(x)
        return out


class Loops(nn.Module):
    """A loop over blocks that checks each value."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if x.sum() > 0 else -block(x)
        return x


class Pair(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x))
        return out


class Numbers(Part):
    """A module that returns a number read from a tensor."""

    def forward(self, x: Tensor) -> Any:
        return {"hidden": self.linear(x) if x.sum() > 0 else x, "norm": x.norm().item()}


class Flags(Part):
    """A module that returns whether a condition holds."""

    def forward(self, x: Tensor) -> Any:
        return {"hidden": self.linear(x), "positive": bool(x.sum() > 0)}


class InPlace(Part):
    """A module that changes a large argument in place."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x.mul_(2)
        out: Tensor = self.linear(x)
        return out


class Returns(Part):
    """A module that returns an object unknown to torch."""

    def forward(self, x: Tensor) -> Any:
        return (lambda: x) if x.sum() > 0 else (lambda: -x)


class OwnWeight(Part):
    """A module that returns its weight or the negative of it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear.weight[: len(x)] if x.sum() > 0 else -self.linear.weight[: len(x)]


class Seldom(Part):
    """A module with another output shape for very large numbers, which made-up data never contains."""

    def forward(self, x: Tensor) -> Tensor:
        large = int(x.abs().max()) > 1000
        return self.linear(x)[:, : 4 if large else 8] if large else self.linear(x)


class TwoWays(torch.autograd.Function):
    """A function that doubles, with a backward that triples; a module among its arguments cannot be
    traced.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        assert isinstance(module, nn.Module)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * 3, None


class Custom(Part):
    """A module that passes a module to a custom function."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = TwoWays.apply(self.linear(x), self)
        return out


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return made-up regression data."""
    return torch.randn(size, WIDTH), torch.randn(size, WIDTH)


def task_of(make: Callable[[], nn.Module], **settings: Any) -> Task:
    """Build a task with the traced model around a module."""
    torch.manual_seed(1)
    return Task(make(), batch=batch, loss=F.mse_loss, optimizer=SGD, name="mine", **settings)


WAYS: dict[str, Callable[[], nn.Module]] = {
    "as assumed": lambda: Row(Clamps(), Counts(), nn.BatchNorm1d(WIDTH, momentum=None), Custom(), Guards()),
    "others": lambda: Row(Chooses(), Experts(), Inside(), Tied(), torch.ao.quantization.FakeQuantize()),
}


def plainly(module: nn.Module, *, last_first: bool) -> list[float]:
    """Return the losses of a loop over microbatches without pipefit."""
    optimizer, means = SGD(module.parameters()), []
    for step in range(STEPS):
        torch.manual_seed(step)
        parts = zip(*(tensor.split(SIZE) for tensor in batch(SIZE * COUNT)), strict=True)
        losses = [F.mse_loss(module(x), y) for x, y in parts]
        for one in reversed(losses) if last_first else losses:
            (one / COUNT).backward()
        optimizer.step()
        optimizer.zero_grad()
        means.append(torch.stack([one.detach() for one in losses]).mean().item())
    return means


@pytest.mark.parametrize("ways", sampled(WAYS, often=["as assumed"]))
def test_they_train_as_in_a_plain_loop(ways: str) -> None:
    """Losses, parameters and buffers equal the plain loop's. A device uses the planned memory if all assumed
    branches run, and never more.
    """
    task = task_of(WAYS[ways])
    assert isinstance(task.module, nn.Module)
    theirs = copy.deepcopy(task.module)
    made = random_plan(profile(task, microbatch_size=SIZE), Random(3), microbatches=COUNT)
    trainer, losses = Trainer(task, made), []
    for step in range(STEPS):
        torch.manual_seed(step)
        losses.append(trainer.step(batch(SIZE * COUNT)))
    expected = plainly(theirs, last_first=made.training.schedule == "torchgpipe")
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0.0)
    assert trainer.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(trainer.state_dict()[name], tensor, rtol=1e-6, atol=1e-8)
    taken, planned = trainer.trace.peak_bytes, simulate(made, steps=STEPS).peak_bytes
    assert all(one <= other for one, other in zip(taken, planned, strict=True)) and any(taken)
    if ways == "as assumed":
        assert taken == planned == certify(task, made).peak_bytes


def test_each_is_a_layer_that_calls_it() -> None:
    """The layers hold the modules with the model's own parameters, other modules are traced, and equal
    modules are equal layers.
    """
    task = task_of(lambda: Row(Chooses(), nn.ReLU(), Chooses()))
    chain = capture(built(task), *sample(task, SIZE))
    assert isinstance(task.module, Row)
    first, relu, second = (
        next(one for one in chain.layers if one.name == f"parts.{number}") for number in range(3)
    )
    kept = [part for layer in (first, second) for part in layer.module.modules() if isinstance(part, Chooses)]
    assert [
        part.linear.weight is task.module.parts[n].linear.weight for n, part in zip((0, 2), kept, strict=True)
    ] == [
        True,
        True,
    ]
    assert module_key(first.module) == module_key(second.module) != module_key(relu.module)
    assert dict(first.originals) == {
        f"whole.linear.{name}": f"parts.0.linear.{name}" for name in ("weight", "bias")
    }


def test_blocks_that_cannot_be_divided_say_so() -> None:
    """The report names a whole module that contains blocks, with its line, and the unknown value."""
    task = task_of(lambda: Row(Loops()))
    found = profile(task, microbatch_size=SIZE)
    (told,) = filter(None, (block.undivided for block in found.blocks))
    assert (
        told.startswith("parts.0 stays whole (")
        and f"{HERE}" in told
        and "depends on the values of a tensor" in told
    )
    (unknown,) = found.kernels.unknown
    assert (
        unknown.operation == "aten._local_scalar_dense.default"
        and "every condition were true" in unknown.reason
    )


def test_what_holds_only_otherwise_is_said() -> None:
    """A forward that raises if every condition holds is counted with all conditions false, and the reason
    says so.
    """
    (unknown,) = profile(task_of(lambda: Row(Guards())), microbatch_size=SIZE).kernels.unknown
    assert unknown.reason.endswith("counted as if every mask selected half and every condition were false")


@pytest.mark.parametrize("part", [Inside.Rows, Numbers, Flags, InPlace, Returns, OwnWeight])
def test_what_the_rest_could_not_follow_is_refused(part: Callable[[], nn.Module]) -> None:
    """A part stays whole if it returns only tensors of known shapes and numbers independent of values; alone
    in a model, it is refused with the line that reads a value.
    """
    task = task_of(lambda: Row(part()))
    with pytest.raises(UsageError, match=rf"module parts\.0 cannot be cut .*{HERE}.*values"):
        profile(task, microbatch_size=SIZE)


def test_another_shape_than_in_the_trace_stops_training() -> None:
    """The layer detects a value-dependent shape that two made-up runs did not reveal."""
    task = task_of(lambda: Row(Seldom()))
    trainer = Trainer(
        task, random_plan(profile(task, microbatch_size=SIZE), Random(3), microbatches=COUNT), numbers=False
    )
    x, y = batch(SIZE * COUNT)
    trainer.step((x, y))
    with (
        torch.no_grad(),
        pytest.raises(PipefitError, match=r"Seldom, which stays whole .* float32 \(4, 4\), .*\(4, 8\)"),
    ):
        trainer.step((x * 1e6, y))


class SkipsExperts(Experts):
    """A module that skips unused experts, so that values decide which tensors are kept, and their number."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        weights, numbers = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (at,) = torch.where(numbers == number)
            if len(at):
                out = out.index_add(0, at, expert(x[at]) * weights[at, None])
        return {"hidden": out}


@pytest.mark.parametrize("part", [SkipsExperts, Clamps])
def test_what_values_decide_about_is_not_moved(part: Callable[[], nn.Module]) -> None:
    """A plan that offloads everything possible keeps value-dependent tensors on the device and trains; a
    manual plan to offload them is refused.
    """
    task = task_of(lambda: Row(part(), part()))
    stays = profile(task, microbatch_size=SIZE)
    made = random_plan(stays, Random(5), microbatches=COUNT)
    made = replace(made, decisions=(), stages=(Stage(start=0, stop=len(stays.layers), grid=Grid.of(0)),))
    moved = [
        Decision(stage=0, subject=SavedTensors(tensors=(one,)), what=What.OFFLOAD, place=parse_place("host"))
        for one in movable(made, 0)
    ]
    plan = replace(made, decisions=tuple(moved))
    trainer = Trainer(task, plan)
    for step in range(STEPS):
        torch.manual_seed(step)
        trainer.step(batch(SIZE * COUNT))
    assert moved and max(trainer.trace.peak_bytes) <= max(simulate(plan, steps=STEPS).peak_bytes)
    layer = next(n for n, cost in enumerate(made.measurement.costs) if cost.module == part.__name__)
    by_hand = replace(moved[0], subject=SavedTensors(tensors=((layer, 0),)))
    with pytest.raises(
        UsageError, match=rf"saved tensor {layer}\.0 cannot be offloaded: .* depends on values"
    ):
        simulate(replace(made, decisions=(by_hand,)))
