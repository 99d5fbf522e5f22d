"""Buffers and plain tensor attributes shared by layers: one copy on a device, and one in a recomputed run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.runtime import Trainer, certify
from pipefit.runtime.engine.in_flight import move
from pipefit.schema.decisions import Decision, Run, What
from pipefit.schema.plan import Plan
from pipefit.simulator import simulate
from support.known_profiles import profile
from support.small_tasks import SGD, alone, batch_of, plan_of, task_of
from support.step_peaks import step_peaks

STEPS = 2


class Masked(nn.Module):
    """Attention with a mask, a buffer passed to its constructor."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)).masked_fill(self.mask, -1e9)
        return x + self.out(scores.softmax(-1) @ v)


class Rotating(nn.Module):
    """A layer that rotates pairs of numbers by angles in a table, a plain attribute."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(8, 8), table

    def forward(self, x: Tensor) -> Tensor:
        cosine, sine = self.table
        a, b = self.linear(x).chunk(2, -1)
        return torch.cat([a * cosine - b * sine, a * sine + b * cosine], -1)


class Scaled(nn.Module):
    """A layer that multiplies by a shared buffer, and has a second, private one."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", scale)
        self.register_buffer("shift", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.scale + self.shift)


class Decoder(nn.Module):
    """A traced model: its blocks share a mask of the root module, and rotary tables are plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.ones(16, 16, dtype=torch.bool).triu(1)
        self.blocks = nn.ModuleList(Masked(mask) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def masked() -> list[nn.Module]:
    mask = torch.ones(16, 16, dtype=torch.bool).triu(1)
    return [*(Masked(mask) for _ in range(4)), nn.Linear(8, 4)]


def rotating() -> list[nn.Module]:
    table = torch.rand(2, 16, 4)
    return [Rotating(table), nn.Tanh(), Rotating(table), Rotating(table), nn.Linear(8, 4)]


def sliced() -> list[nn.Module]:
    """Build two layers whose buffers are parts of one table, and a row that is used repeatedly."""
    table = torch.rand(6, 8)
    return [*(Scaled(table[k]) for k in (0, 0, 3)), Scaled(table[1].expand(16, 8)), nn.Linear(8, 4)]


def rows(layers: Callable[[], Sequence[nn.Module]]) -> Task:
    return Task(
        lambda: nn.Sequential(*layers()),
        batch=lambda size: (torch.randn(size, 16, 8), torch.randn(size, 16, 4)),
        loss=F.mse_loss,
        optimizer=SGD,
        name="rows",
    )


def decoder() -> Task:
    return Task(
        Decoder,
        batch=lambda size: (torch.randn(size, 16, 8), torch.randn(size, 16, 4)),
        loss=F.mse_loss,
        optimizer=SGD,
        name="decoder",
    )


TASKS: dict[str, Callable[[], Task]] = {
    "one mask for all": lambda: rows(masked),
    "a table as an attribute": lambda: rows(rotating),
    "parts of a table": lambda: rows(sliced),
    "traced": decoder,
}


def plans(task: Task) -> Iterator[Plan]:
    """Return plans with one stage, with two recomputed stages, and with runs of two layers recomputed."""
    profiled = profile(task, microbatch_size=2, threads=1)
    count = len(profiled.layers)
    yield plan_of(task, [count], profiled=profiled)
    yield plan_of(task, [2, count - 2], recompute="always", profiled=profiled)
    runs = [(start, stop) for start, stop in pairwise(range(0, count + 1, 2))]
    yield replaced(plan_of(task, [count], profiled=profiled), runs)


def replaced(plan: Plan, runs: Sequence[tuple[int, int]]) -> Plan:
    """Return the plan with these runs of layers of its only stage recomputed."""
    decisions = (Decision(stage=0, subject=Run(start=a, stop=b), what=What.RECOMPUTE) for a, b in runs)
    return Plan(
        profile=plan.profile, cluster=plan.cluster, training=plan.training, stages=plan.stages,
        decisions=tuple(decisions),
    )  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TASKS)
def test_a_buffer_of_several_layers_counts_once_on_each_device(name: str) -> None:
    """A buffer of several layers counts once on each device: simulator, dry run and meter equal the allocator
    in every step, with and without recomputation.
    """
    task = TASKS[name]()
    for plan in plans(task):
        found = step_peaks(task, plan, steps=STEPS)
        assert found.simulated == found.dry == found.metered == found.allocated, (plan.split, plan.decisions)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", TASKS)
def test_shared_buffers_change_no_number(name: str) -> None:
    """Losses and parameters equal plain training bit by bit, with and without recomputation."""
    task = TASKS[name]()
    for plan in plans(task):
        torch.manual_seed(0)
        trainer = Trainer(task, plan)
        losses, wanted = alone(task, plan, STEPS)
        assert [trainer.step(batch_of(task, plan, step)) for step in range(STEPS)] == losses
        found = trainer.state_dict()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


def twice() -> list[nn.Module]:
    """Use one batch norm in two places."""
    norm = nn.BatchNorm1d(8)
    return [nn.Linear(8, 8), norm, nn.Linear(8, 8), norm, nn.Linear(8, 4)]


def test_a_shared_buffer_that_a_forward_changes_is_refused() -> None:
    """A shared buffer that a forward changes is refused, because two devices would have two of them; the
    error names the layers and the buffer.
    """
    with pytest.raises(
        UsageError, match=r"layers 1, 3 share buffer '1\.[a-z_]+', and the forward of layer 1"
    ):
        profile(task_of(twice), microbatch_size=4)


def test_a_buffer_that_is_moved_to_another_device_is_moved_once() -> None:
    """A buffer of every layer is moved to another device once; the dry run's peaks equal the simulator's for
    GPUs too.
    """
    plan = plan_of(rows(masked), [5], profiled=profile(rows(masked), microbatch_size=2, target="cuda"))
    assert certify(rows(masked), plan).peak_bytes == simulate(plan).peak_bytes


def test_moved_buffers_lie_in_one_storage_as_before() -> None:
    """A table and a part of it, moved to another device, still share one storage with the same layout."""
    first, second = Scaled(table := torch.rand(6, 8)), Scaled(table[3])
    move([first, second], torch.device("meta"))
    assert first.scale.device.type == second.scale.device.type == "meta"
    assert first.scale.untyped_storage()._cdata == second.scale.untyped_storage()._cdata
    assert (second.scale.shape, second.scale.storage_offset()) == ((8,), 24)
