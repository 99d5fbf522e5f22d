"""Gradients that autograd makes of one tensor: whoever adds up a parameter's changes nobody else's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipefit.actions import Kind
from pipefit.capture import Task
from pipefit.grids import SHARDINGS
from pipefit.profiler import profile
from pipefit.profiles import ModelProfile
from pipefit.runtime import Trainer
from pipefit.runtime.runner import DeviceRunner
from replicated import Table
from sampled import sampled
from slices import batches, equal, sliced_plan
from step_peaks import step_peaks

pytestmark = pytest.mark.usefixtures("one_thread")


class Moved(nn.Module):
    """Adds two parameters to a table without samples that it is given: all three have one gradient, in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.more, self.again = (nn.Parameter(torch.randn(24, dtype=torch.float64)) for _ in range(2))

    def forward(self, given: Any) -> Any:
        x, table = given
        return x, table + self.more.view(3, 8) + self.again.view(3, 8)


class Joined(nn.Module):
    """Puts two parameters together, whose gradients are parts of one memory, but not the same."""

    def __init__(self) -> None:
        super().__init__()
        self.more, self.again = (nn.Parameter(torch.randn(12, dtype=torch.float64)) for _ in range(2))

    def forward(self, given: Any) -> Any:
        x, table = given
        return x, table + torch.cat((self.more, self.again)).view(3, 8)


def task(between: Callable[[], nn.Module]) -> Task:
    """A table goes from the first layer to the last."""
    return Task(
        lambda: nn.Sequential(Table(), between(), Table(last=True)),
        batch=lambda n: tuple(torch.randn(n, 3, 8, dtype=torch.float64) for _ in range(2)),
        loss=nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        name="moved",
    )


@pytest.fixture(scope="module")
def found() -> ModelProfile:
    """What layers with one gradient cost."""
    return profile(task(Moved), microbatch_size=(4, 2))


def plain(made: Task, data: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Plain training, each batch as a whole, so that no gradient is added to another one."""
    torch.manual_seed(0)
    module = made.build()
    optimizer = made.optimizer(module.parameters())
    for inputs, targets in data:
        optimizer.zero_grad()
        made.loss(module(inputs), targets).backward()
        optimizer.step()
    return dict(module.state_dict())


@pytest.mark.parametrize("schedule", ["gpipe", "torchgpipe", "1f1b"])
@pytest.mark.parametrize("between", [Moved, Joined])
def test_what_is_sent_shares_no_memory_with_what_is_added_up(
    between: Callable[[], nn.Module], schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under GPipe the next microbatch goes backward while the gradient is on its way; numbers are those of batches that
    are not divided, where autograd adds nothing up.
    """
    made, timed, checked = task(between), DeviceRunner._timed, list[bool]()
    plan = sliced_plan(profile(made, microbatch_size=2), [0, 1, 3], [1, 1], microbatches=3, schedule=schedule)

    def watched(self: DeviceRunner, action: Any, *rest: Any) -> None:
        timed(self, action, *rest)
        if action.kind is Kind.BACKWARD:
            sent = {tensor.untyped_storage()._cdata for tensor in self.transfers.tensors}
            own = [p.grad for stage in self.stages.values() for p in stage.parameters if p.grad is not None]
            assert sent.isdisjoint(gradient.untyped_storage()._cdata for gradient in own)
            checked.append(bool(sent))

    monkeypatch.setattr(DeviceRunner, "_timed", watched)
    trainer, data = Trainer(made, plan), batches(made, plan, 2)
    for one in data:
        trainer.step(one)
    assert any(checked)
    assert equal(trainer.state_dict(), plain(made, data), relative=1e-9)


def test_parameters_with_one_gradient_get_it_once(found: ModelProfile) -> None:
    """Within a stage too, where no gradient is sent."""
    made = task(Moved)
    plan = sliced_plan(found, [0, 3], [1], microbatches=3)
    trainer, data = Trainer(made, plan), batches(made, plan, 2)
    for one in data:
        trainer.step(one)
    assert equal(trainer.state_dict(), plain(made, data), relative=1e-9)


DEGREES = [(shard, buckets) for shard in SHARDINGS for buckets in (1, 3)]


@pytest.mark.parametrize(("shard", "buckets"), sampled(DEGREES, often=[("none", 1), ("gradients", 3)]))
def test_replicas_sum_each_gradient_once(shard: Any, buckets: int, found: ModelProfile) -> None:
    """Numbers of plain training; and bytes that all agree on, to the one that is copied."""
    made = task(Moved)
    plan = sliced_plan(found, [0, 1, 3], [2, 2], microbatches=2, shard=(shard, shard), buckets=(buckets, buckets))
    trainer, data = Trainer(made, plan), batches(made, plan, 2)
    for one in data:
        trainer.step(one)
    assert equal(trainer.state_dict(), plain(made, data), relative=1e-9)
    peaks = step_peaks(made, plan)
    assert peaks.simulated == peaks.dry == peaks.metered == peaks.allocated
