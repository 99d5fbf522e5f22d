"""Gradients that autograd derives from one tensor: accumulating one parameter's gradient changes no other's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity

from pipefit.capture import Task
from pipefit.runtime import Trainer, certify
from pipefit.runtime.engine.in_flight import born_apart
from pipefit.runtime.engine.runner import DeviceRunner
from pipefit.schema.actions import Kind
from pipefit.schema.grids import SHARDINGS
from pipefit.schema.profile import ModelProfile
from pipefit.simulator import simulate
from support.allocator_events import measured_peaks
from support.gallery_samples import sampled, seeds
from support.known_profiles import profile
from support.local_batches import batches, equal, sliced_plan
from support.memory_samples import samples, step_peaks_of
from support.random_state_offloads import moving_states
from support.random_trainings import random_plan
from support.replicated_models import Table
from support.shared_gradients import MIXES, OPTIMIZERS, entwined, plain
from support.small_tasks import plan_of
from support.step_peaks import step_peaks

pytestmark = pytest.mark.usefixtures("one_thread")


class Moved(nn.Module):
    """A layer that adds two parameters to a table without a batch dimension: all three gradients are one
    tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.more, self.again = (nn.Parameter(torch.randn(24, dtype=torch.float64)) for _ in range(2))

    def forward(self, given: Any) -> Any:
        x, table = given
        return x, table + self.more.view(3, 8) + self.again.view(3, 8)


class Joined(nn.Module):
    """A layer that concatenates two parameters, whose gradients are different parts of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.more, self.again = (nn.Parameter(torch.randn(12, dtype=torch.float64)) for _ in range(2))

    def forward(self, given: Any) -> Any:
        x, table = given
        return x, table + torch.cat((self.more, self.again)).view(3, 8)


def task(between: Callable[[], nn.Module]) -> Task:
    """Return a task that passes a table from the first layer to the last."""
    return Task(
        lambda: nn.Sequential(Table(), between(), Table(last=True)),
        batch=lambda n: tuple(torch.randn(n, 3, 8, dtype=torch.float64) for _ in range(2)),
        loss=nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        name="moved",
    )


@pytest.fixture(scope="module")
def found() -> ModelProfile:
    """Return a profile of layers that share one gradient."""
    return profile(task(Moved), microbatch_size=(4, 2))


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["gpipe", "torchgpipe", "1f1b"])
@pytest.mark.parametrize("between", [Moved, Joined])
def test_what_is_sent_shares_no_memory_with_what_is_added_up(
    between: Callable[[], nn.Module], schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sent gradient shares no memory with the accumulated one. Under GPipe the next microbatch runs
    backward during the transfer; the numbers are those of undivided batches, which autograd does not
    accumulate.
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
    """Parameters that share one gradient receive it once, also within a stage, without transfers."""
    made = task(Moved)
    plan = sliced_plan(found, [0, 3], [1], microbatches=3)
    trainer, data = Trainer(made, plan), batches(made, plan, 2)
    for one in data:
        trainer.step(one)
    assert equal(trainer.state_dict(), plain(made, data), relative=1e-9)


USUAL: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), lambda: torch.randn(5, 4)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8)),
        lambda: torch.randn(2, 4, 9),
    ),
    "embedding": (lambda: nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4)), lambda: torch.arange(6)),
}


@pytest.mark.parametrize("name", USUAL)
def test_gradients_with_memory_of_their_own_are_not_copied(name: str) -> None:
    """Gradients with separate memory are not copied: by allocator events, a backward allocates the same with
    and without `born_apart`.
    """
    build, batch = USUAL[name]
    module, taken = build(), list[list[int]]()
    for care in (nullcontext(), born_apart(module.parameters())):
        loss = module(batch()).sum()
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as observed, care:
            loss.backward()
        events = observed.profiler.kineto_results.events()  # type: ignore[union-attr]
        taken.append(
            sorted(event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0)
        )
        module.zero_grad()
    assert taken[0] == taken[1] != []


DEGREES = [(shard, buckets) for shard in SHARDINGS for buckets in (1, 3)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("shard", "buckets"), sampled(DEGREES, often=[("none", 1), ("gradients", 3)]))
def test_replicas_sum_each_gradient_once(shard: Any, buckets: int, found: ModelProfile) -> None:
    """Replicas sum each gradient once: numbers are plain training's, and all accounts count the same bytes,
    copy included.
    """
    made = task(Moved)
    plan = sliced_plan(
        found, [0, 1, 3], [2, 2], microbatches=2, shard=(shard, shard), buckets=(buckets, buckets)
    )
    trainer, data = Trainer(made, plan), batches(made, plan, 2)
    for one in data:
        trainer.step(one)
    assert equal(trainer.state_dict(), plain(made, data), relative=1e-9)
    peaks = step_peaks(made, plan)
    assert peaks.simulated == peaks.dry == peaks.metered == peaks.allocated


SIZES = [(name, size, microbatches) for name in MIXES for size in (1, 2) for microbatches in (1, 3)]
OFTEN = [("attention bias", 2, 3), ("cat", 1, 3), ("stack of flat ones", 1, 1), ("sum of views", 1, 1)]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "size", "microbatches"), sampled(SIZES, often=OFTEN))
def test_peaks_count_each_gradient_in_memory_of_its_own(name: str, size: int, microbatches: int) -> None:
    """Simulator, dry run, trainer and allocator events agree, on one device and split over several."""
    made = entwined([name])
    found = profile(made, microbatch_size=size, threads=1)
    for split in ([3], [1, 1, 1]):
        peaks = step_peaks(made, plan_of(made, split, size=size, microbatches=microbatches, profiled=found))
        assert peaks.simulated == peaks.dry == peaks.metered == peaks.allocated


@pytest.mark.parametrize("shard", sampled(SHARDINGS, often=["gradients"]))
@pytest.mark.parametrize("name", sampled(MIXES, often=["attention bias"]))
def test_replicas_divide_and_sum_entwined_gradients(name: str, shard: Any) -> None:
    """Replicas shard and sum gradients that share memory: numbers are plain training's, and all byte counts
    agree.
    """
    made = entwined([name])
    found = profile(made, microbatch_size=(4, 2), threads=1)
    plan = sliced_plan(found, [0, 3], [2], microbatches=2, shard=(shard,))
    trainer, data = Trainer(made, plan), batches(made, plan, 2)
    for one in data:
        trainer.step(one)
    assert equal(trainer.state_dict(), plain(made, data), relative=1e-9)
    peaks = step_peaks(made, plan)
    assert peaks.simulated == peaks.dry == peaks.metered == peaks.allocated


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", seeds(3, of=60))
def test_plans_of_entwined_layers_are_trained_as_they_were_planned(seed: int) -> None:
    """Random plans of layers that share gradients, traced or not, with clipping, offloaded state and
    recomputation, train plain training's numbers, a dry run's samples and the simulator's peaks. The
    allocator sees no more, and less only if autograd copies for the meter alone.
    """
    rng = Random(f"entwined {seed}")
    names = [rng.choice(list(MIXES)) for _ in range(rng.randint(1, 3))]
    made = entwined(names, optimizer=rng.choice(list(OPTIMIZERS)), traced=rng.random() < 0.5)
    found = profile(made, microbatch_size=rng.choice([1, 2]), threads=1)
    plan = random_plan(found, rng, microbatches=rng.randint(1, 3))
    plan = moving_states(plan, rng) if rng.random() < 0.5 else plan
    plan = replace(plan, training=replace(plan.training, clip_norm=rng.choice([None, 0.05])))
    trainer, data = Trainer(made, plan), batches(made, plan, 2)
    for one in data:
        trainer.step(one)
    wanted = plain(made, data, clip_norm=plan.training.clip_norm)
    assert equal(trainer.state_dict(), wanted, relative=1e-7)  # a norm is a float32
    dry = certify(made, plan, steps=2)
    assert samples(trainer.trace) == samples(dry)
    assert step_peaks_of(dry) == step_peaks_of(simulate(plan, steps=2))
    if all(one.place is None for one in plan.decisions):
        allocated, counted = (
            measured_peaks(made, plan),
            [step_peaks_of(dry)[device] for device in plan.workers],
        )
        for ours, theirs in zip(counted, allocated, strict=True):
            assert all(one >= other for one, other in zip(ours, theirs, strict=True))
