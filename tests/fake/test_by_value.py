"""Manual layers that branch on values: trained as in a plain loop, counted with everything selected, and
named.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.capture.model import chain
from pipefit.capture.whole_modules import NumberReads
from pipefit.errors import PipefitWarning, UsageError
from pipefit.fake_cuda.target import FakeTarget
from pipefit.lowering.passes.recomputation import Recompute
from pipefit.planner import plan
from pipefit.profiler import profile
from pipefit.report.show import text
from pipefit.runtime import Trainer, certify
from pipefit.schema.json_io import load_cluster
from pipefit.simulator import simulate
from support.random_trainings import random_plan
from support.selecting_layers import SELECTING, selecting
from support.small_tasks import plan_of
from support.step_peaks import step_peaks

aten = torch.ops.aten
SIZE, COUNT, STEPS = 4, 2, 3
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


class Experts(nn.Module):
    """Experts with a gate that chooses one per sample."""

    def __init__(self, experts: int = 4, width: int = 8) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight and the number of each sample's expert."""
        weights, numbers = self.gate(x).softmax(-1).max(-1)
        return weights[:, None], numbers


class ByWhere(Experts):
    """Selection by the indices of an expert's samples."""

    def forward(self, x: Tensor) -> Tensor:
        (weights, numbers), out = self.chosen(x), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            at = torch.where(numbers == number)[0]
            out = out.index_add(0, at, expert(x[at]) * weights[at])
        return out


class ByMask(Experts):
    """Selection by masks, without unused experts."""

    def forward(self, x: Tensor) -> Tensor:
        (weights, numbers), out = self.chosen(x), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mask = numbers == number
            if mask.any():
                out[mask] = expert(x[mask]) * weights[mask]
        return out


class ByCount(Experts):
    """Selection by the number of an expert's samples, for which no assumption is possible."""

    def forward(self, x: Tensor) -> Tensor:
        numbers = self.chosen(x)[1]
        order = numbers.argsort()
        counts = torch.bincount(numbers, minlength=len(self.experts)).tolist()
        parts = zip(self.experts, x[order].split(counts), strict=True)
        return torch.cat([expert(part) for expert, part in parts])[order.argsort()]


@pytest.mark.filterwarnings("ignore:peaks do not include")
@pytest.mark.sample(5)
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("how", SELECTING)
def test_selections_are_counted_with_everything_selected(how: str, recompute: Recompute) -> None:
    """The dry run equals the allocator if everything is selected, and is never below if some is, inside of kernels
    too.
    """
    for least in (-99.0, 0.0):
        task = selecting(how, least)
        made = plan_of(task, [2, 1], size=SIZE, microbatches=3, recompute=recompute)
        peaks = step_peaks(task, made)
        if least < 0:
            assert peaks.simulated == peaks.dry == peaks.metered == peaks.allocated
        pairs = zip(peaks.dry, peaks.allocated, strict=True)
        assert all(one >= other for dry, taken in pairs for one, other in zip(dry, taken, strict=True))


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return made-up regression data."""
    return torch.randn(size, 8), torch.randn(size, 8)


def chosen_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute the error for positive targets."""
    return F.mse_loss(outputs[targets > 0], targets[targets > 0])


def task_of(kind: type[nn.Module], loss: Callable[[Any, Any], Tensor] = F.mse_loss) -> Task:
    """Return a task with experts between two layers."""
    torch.manual_seed(1)
    return Task(chain([nn.Linear(8, 8), kind(), nn.Linear(8, 8)]), batch=batch, loss=loss, optimizer=SGD)


def plainly(module: nn.Module, loss: Callable[[Any, Any], Tensor], *, last_first: bool) -> list[float]:
    """Return the losses of a loop over microbatches without pipefit."""
    optimizer, means = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9), []
    for step in range(STEPS):
        torch.manual_seed(step)
        parts = zip(*(tensor.split(SIZE) for tensor in batch(SIZE * COUNT)), strict=True)
        losses = [loss(module(x), y) for x, y in parts]
        for one in reversed(losses) if last_first else losses:
            (one / COUNT).backward()
        optimizer.step()
        optimizer.zero_grad()
        means.append(torch.stack([one.detach() for one in losses]).mean().item())
    return means


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:peaks do not include")
@pytest.mark.parametrize(
    ("kind", "loss"), [(ByWhere, F.mse_loss), (ByMask, F.mse_loss), (ByMask, chosen_loss)]
)
def test_experts_by_hand_are_trained(kind: type[nn.Module], loss: Callable[[Any, Any], Tensor]) -> None:
    """A manual loop over experts trains to the numbers of a plain loop, and takes at most the planned
    memory.
    """
    task = task_of(kind, loss)
    assert isinstance(task.module, nn.Module)
    theirs = copy.deepcopy(task.module)
    made = random_plan(profile(task, microbatch_size=SIZE), Random(2), microbatches=COUNT)
    trainer, losses = Trainer(task, made), []
    for step in range(STEPS):
        torch.manual_seed(step)
        losses.append(trainer.step(batch(SIZE * COUNT)))
    expected = plainly(theirs, loss, last_first=made.training.schedule == "torchgpipe")
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0.0)
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(trainer.state_dict()[name], tensor, rtol=0.0, atol=0.0)
    taken, planned = trainer.trace.peak_bytes, simulate(made, steps=STEPS).peak_bytes
    assert all(one <= other for one, other in zip(taken, planned, strict=True)) and any(taken)


@pytest.mark.filterwarnings("ignore:peaks do not include")
def test_what_is_not_known_is_said() -> None:
    """The profile and every plan name the operations whose results depend on values, and a dry run warns
    about them.
    """
    task = task_of(ByMask)
    found = profile(task, microbatch_size=SIZE)
    told = {kernel.operation: kernel.reason for kernel in found.kernels.unknown}
    assert (
        "as if every mask selected everything and every condition were true"
        in told["aten._local_scalar_dense.default"]
    )
    made = plan(found, load_cluster("emulated:2x64MiB"), batch_size=SIZE * COUNT, stages=2)
    said = " ".join(text(made).split())
    assert "Peaks do not include the memory that kernels need inside aten._local_scalar_dense.default" in said
    assert "counted as if every mask selected everything" in said
    with pytest.warns(PipefitWarning, match="every mask selected everything"):
        certify(task, made)


def test_what_nothing_can_be_assumed_of_is_refused() -> None:
    """The message names the layer, the line and the operation, and explains how to write a custom one."""
    with pytest.raises(UsageError) as refused:
        profile(task_of(ByCount), microbatch_size=SIZE)
    text = str(refused.value)
    assert all(
        words in text for words in ("layer 1 (ByCount)", "test_by_value.py:", "aten.bincount", "custom_op")
    )


class Shrinks(nn.Module):
    """A loop that halves until a condition no longer holds."""

    def forward(self, x: Tensor) -> Tensor:
        while x.norm() > 1:
            x = x / 2
        return x


def test_a_loop_until_a_condition_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every condition assumed true the loop would never end; the message has the line and the remedy."""
    monkeypatch.setattr("pipefit.profiler.update.NumberReads", partial(NumberReads, most=100))
    with pytest.raises(UsageError, match=r"layer 1 \(Shrinks\).*test_by_value.py:.*a fixed number of steps"):
        profile(task_of(Shrinks), microbatch_size=SIZE)


@torch.library.custom_op("pipefit_tests::by_count", mutates_args=())
def by_count(x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
    """Multiply each row of `x` by the matrix of its number, matrix by matrix."""
    order = numbers.argsort()
    parts = x[order].split(torch.bincount(numbers, minlength=len(weights)).tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])[order.argsort()]


@by_count.register_fake
def _(x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
    """Return the output's shape."""
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
    """Compute the gradient with products that do not depend on values."""
    x, numbers, weights = ctx.saved_tensors
    chosen = F.one_hot(numbers, len(weights)).to(x.dtype)
    return (
        torch.einsum("no,nio->ni", gradient, weights[numbers]),
        None,
        torch.einsum("ne,ni,no->eio", chosen, x, gradient),
    )


by_count.register_autograd(_back, setup_context=_keep)


class ByOperator(nn.Module):
    """The remedy of the refusal: the counting part is a custom operator."""

    def __init__(self, experts: int = 4, width: int = 8) -> None:
        super().__init__()
        self.gate, self.weights = nn.Linear(width, experts), nn.Parameter(torch.randn(experts, width, width))

    def forward(self, x: Tensor) -> Tensor:
        chances, numbers = self.gate(x).softmax(-1).max(-1)
        out: Tensor = torch.ops.pipefit_tests.by_count(x, numbers, self.weights)
        return out * chances[:, None]


class Between(nn.Module):
    """A traced module with the operator inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), ByOperator(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.inner(self.first(x)))
        return out


@pytest.mark.filterwarnings("ignore:peaks do not include")
@pytest.mark.parametrize("traced", [False, True])
def test_an_operator_of_ones_own_is_a_way_out(traced: bool) -> None:
    """An operator with custom shapes and backward is planned and trained, as a manual layer and traced."""
    task = task_of(ByOperator)
    task = replace(task, module=Between()) if traced else task
    assert isinstance(task.module, nn.Module)
    theirs = copy.deepcopy(task.module)
    made = random_plan(profile(task, microbatch_size=SIZE), Random(2), microbatches=COUNT)
    certify(task, made)
    trainer, losses = Trainer(task, made), []
    for step in range(STEPS):
        torch.manual_seed(step)
        losses.append(trainer.step(batch(SIZE * COUNT)))
    expected = plainly(theirs, F.mse_loss, last_first=made.training.schedule == "torchgpipe")
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0.0)


SELECTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nonzero": lambda x, mask: torch.nonzero(mask),
    "where": lambda x, mask: torch.stack(torch.where(mask)),
    "masked_select": torch.masked_select,
    "mask of all dimensions": lambda x, mask: x[mask],
    "mask of the first dimension": lambda x, mask: x[mask[:, 0]],
    "mask behind a slice": lambda x, mask: x[:, mask[0]],
    "one row of a mask for all": lambda x, mask: torch.masked_select(x, mask[:1]),
}


@pytest.mark.parametrize("select", SELECTIONS.values(), ids=SELECTIONS)
def test_assumptions_are_those_of_masks_that_select_all(select: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Shapes, strides and dtypes equal torch's for a mask that is all True."""
    x, mask = torch.randn(3, 5), torch.ones(3, 5, dtype=torch.bool)
    expected = select(x, mask)
    with FakeTarget("cpu") as fake:
        found = select(fake.fake(x), fake.fake(mask))
    assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)


def test_a_factory_is_not_given_made_up_numbers() -> None:
    """A module that reads numbers from tensors during construction gets the real ones, and none is
    unknown.
    """

    class Rates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rates = [rate.item() for rate in torch.linspace(0.0, 0.5, 3, device="cpu")]
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            assert self.rates == [0.0, 0.25, 0.5]
            return self.linear(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error", PipefitWarning)
        found = profile(Task(Rates, batch=batch, loss=F.mse_loss), microbatch_size=SIZE)
    assert not found.kernels.unknown


def test_a_factory_that_needs_numbers_of_weights_is_refused() -> None:
    """A module built without memory has no numbers to scale it by; the built one has."""

    def scaled() -> nn.Module:
        module = nn.Linear(8, 8)
        with torch.no_grad():
            module.weight.div_(module.weight.std().item())
        return nn.Sequential(module)

    with pytest.raises(UsageError, match=r"it reads numbers of tensors.*: pass the built module"):
        profile(Task(scaled, batch=batch, loss=F.mse_loss), microbatch_size=SIZE)
    profile(Task(scaled(), batch=batch, loss=F.mse_loss), microbatch_size=SIZE)


def test_products_of_two_dtypes_are_refused() -> None:
    """Fake products are refused like real ones: here a float32 batch meets a float64 model."""
    task = Task(nn.Sequential(nn.Linear(8, 8).double()), batch=batch, loss=F.mse_loss)
    with pytest.raises(
        UsageError, match=r"layer 0 \(Linear\).*a product of float64 and float32; give the data"
    ):
        profile(task, microbatch_size=SIZE)
    with pytest.raises(RuntimeError, match="dtype"):
        task.build()(batch(SIZE)[0])
