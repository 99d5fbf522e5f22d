"""Lifetimes of storages, from which a dry run predicts a GPU's reserved memory, and their repetition over
microbatches.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

from pipefit.lowering import lower
from pipefit.memory.cuda_allocator import AllocatorSettings
from pipefit.runtime import certify
from pipefit.runtime.dry_run import certify as dry_run
from pipefit.runtime.dry_run import reserved
from pipefit.runtime.dry_run.lives import LivesMeter
from pipefit.runtime.dry_run.microbatches import Folding, Seating
from pipefit.runtime.dry_run.reserved import LivesOf
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.program import Program
from pipefit.schema.trace import AllocatorPeaks
from support.known_profiles import profile
from support.random_offloads import moving
from support.random_trainings import random_plan
from support.small_tasks import plan_of, task_of
from support.two_pool_model import on_gpus, wide, wide_profile

DEFAULT = AllocatorSettings()


@pytest.fixture(scope="module")
def found() -> ModelProfile:
    """Return the profile of `wide` on a GPU."""
    return wide_profile()


# ---------------------------------------------------------------- lifetimes of storages


def step_of(parameters: list[Tensor], data: Tensor) -> None:
    """Run a step of plain training whose kernels need no temporary memory."""
    for parameter in parameters:
        parameter.grad = None
    hidden = torch.tanh(data * parameters[0])
    other = hidden.exp() + parameters[1]
    del hidden
    (torch.relu(other) * parameters[0]).sum().backward()
    with torch.no_grad():
        for parameter in parameters:
            parameter.sub_(parameter.grad * data[:1])


def test_births_and_deaths_are_those_of_the_allocator() -> None:
    """Births and deaths are those of the allocator's events on the CPU: the same sizes in the same order,
    forward, backward and update.
    """
    parameters = [torch.randn(1, 300, requires_grad=True), torch.randn(50, 300, requires_grad=True)]
    data = torch.randn(50, 300)
    meter = LivesMeter(0, kernels=None, passings={}, place=torch.device("cpu"), workspace_bytes=0)
    gc.collect()
    meter.begin("before")
    with meter:
        step_of(parameters, data)  # one-time allocations are made
    meter.end(0, 0.0)
    meter.changes()
    meter.take()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as observed:
        meter.begin("step")
        with meter:
            step_of(parameters, data)
        meter.end(0, 0.0)
    meter.changes()
    _, (lives,) = meter.take()
    sizes: dict[int, int] = {}
    seen = []
    for name, nbytes in lives:
        sizes.setdefault(name, nbytes)
        seen.append(nbytes or -sizes[name])
    events = observed.profiler.kineto_results.events()
    memory = sorted(
        ((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda event: event[0]
    )
    told = [nbytes for _, nbytes in memory]
    assert [nbytes for nbytes in seen if nbytes] == [nbytes for nbytes in told if nbytes in seen]
    assert len(seen) > 20


@contextmanager
def captured() -> Iterator[dict[int, Any]]:
    """Return the events of every device of the dry run inside, by device."""
    seen: dict[int, Any] = {}
    original = reserved.allocator_peaks

    def capturing(plan: Plan, program: Program, device: int, *others: Any) -> AllocatorPeaks:
        seen[device] = others[0]
        return original(plan, program, device, *others)

    with mock.patch.object(reserved, "allocator_peaks", capturing):
        yield seen


def highest(events: Any) -> int:
    """Return the highest sum of living storages."""
    level, most, living = 0, 0, {}
    for name, nbytes in events:
        level += nbytes or -living.pop(name)
        most = max(most, level)
        if nbytes:
            living[name] = nbytes
    return most


@pytest.mark.parametrize("seed", range(3))
def test_what_lives_is_what_the_meter_counts(found: ModelProfile, seed: int) -> None:
    """The highest sum of living storages is the certified peak, to the byte, on every device."""
    plan = random_plan(found, Random(seed))
    with captured() as events:
        trace = certify(wide(), plan, allocator=DEFAULT)
    used = [device for device in trace.devices if device.allocator]
    assert len(used) == len(plan.ranks) == len(events)
    for device in used:
        assert highest(events[device.device]) == device.peak_bytes == device.allocator.requested_bytes


def test_what_is_on_the_host_has_no_block() -> None:
    """Adam's step counts on the host have no block: at its peak, an update, the device has parameters,
    gradients, two moments, temporary memory equal to a layer's parameters, and the loss.
    """
    task = task_of(
        lambda: [nn.Linear(600, 600) for _ in range(3)], inputs=600, outputs=600, optimizer=torch.optim.Adam
    )
    plan = plan_of(
        task, [3], size=8, microbatches=1, profiled=profile(task, microbatch_size=8, target="cuda")
    )
    with captured() as events:
        trace = certify(task, plan, allocator=DEFAULT)
    layer = 4 * (600 * 600 + 600)
    assert trace.peak_bytes[0] == highest(events[0]) == 4 * 3 * layer + layer + 4


# ---------------------------------------------------------------- folding


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(6))
def test_folded_microbatches_reserve_what_all_do(found: ModelProfile, seed: int) -> None:
    """Folded microbatches reserve all three numbers of three steps of a full run, under any split, schedule
    and recomputation, without a second run.
    """
    plan = on_gpus(random_plan(found, Random(seed), microbatches=5))
    with mock.patch.object(dry_run.Rehearsal, "_whole") as again:
        folded = certify(wide(), plan, steps=3, allocator=DEFAULT)
    assert not again.called
    assert folded == certify(wide(), plan, steps=3, allocator=DEFAULT, fold=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_moved_away_loses_its_block(found: ModelProfile, seed: int) -> None:
    """Offloaded tensors lose their block: with random moves, folded microbatches reserve the same as all and
    reach the meter's peak; lent memory is a tensor on its lender, from the first to the last.
    """
    plan = moving(random_plan(found, Random(seed), microbatches=5), Random(seed))
    with captured() as events:
        folded = certify(wide(), plan, steps=3, allocator=DEFAULT)
    assert folded == certify(wide(), plan, steps=3, allocator=DEFAULT, fold=False)
    used = [device for device in folded.devices if device.allocator]
    assert len(used) == len(plan.ranks) == len(events)
    for device in used:
        assert highest(events[device.device]) == device.peak_bytes


def test_of_equal_layers_all_are_run() -> None:
    """A stack that dry runs fold to four layers reserves the same as all of its layers."""
    task = task_of(
        lambda: [nn.Linear(640, 640) for _ in range(9)], inputs=640, outputs=640, optimizer=torch.optim.Adam
    )
    plan = plan_of(task, [9], size=600, profiled=profile(task, microbatch_size=600, target="cuda"))
    one = certify(task, plan, allocator=DEFAULT)
    assert one == certify(task, plan, allocator=DEFAULT, fold=False)
    assert one.peak_bytes == certify(task, plan).peak_bytes


def program_of(found: ModelProfile) -> Program:
    """Return a program of three microbatches; the second stands for the third."""
    return lower(plan_of(wide(), [6], size=700, microbatches=3, schedule="gpipe", profiled=found))


def seen_in(program: Program, lives: dict[str, tuple[tuple[int, int], ...]]) -> Any:
    """Return lifetimes in the executed actions, by the actions' texts."""
    ran = Folding.of(program).first
    actions = [a for a in program.actions[0] if a.microbatch is None or a.microbatch in ran]
    return (), [lives.get(str(action), ()) for action in actions]


def test_lives_are_repeated_under_other_names(found: ModelProfile) -> None:
    """Microbatch 2 repeats microbatch 1's births and deaths under other names; storages that last until the
    update die there twice.
    """
    program = program_of(found)
    assert Folding.of(program).like[0, 2] == 1
    lives = LivesOf()
    in_run = {"0F1": ((1, 100), (2, 7)), "0B1": ((1, 0),), "0STEP": ((2, 0),)}
    lives.step(Seating(Folding.of(program)).step(0, program.actions[0]), *seen_in(program, in_run))
    assert lives.consistent
    assert lives.events == [
        (1, 100), (2, 7), ((1, 0, 2), 100), ((2, 0, 2), 7), (1, 0), ((1, 0, 2), 0), (2, 0), ((2, 0, 2), 0)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "in_run",
    [
        {"0F0": ((1, 100),), "0B1": ((1, 0),)},  # the storage left by microbatch 0 dies twice
        {"0F1": ((1, 100),)},  # the storage left by microbatch 1 stays twice
    ],
)
def test_a_repetition_that_cannot_be_is_noticed(found: ModelProfile, in_run: Any) -> None:
    """A microbatch that frees another's storage, or leaves a storage, cannot stand for others."""
    program = program_of(found)
    lives = LivesOf()
    lives.step(Seating(Folding.of(program)).step(0, program.actions[0]), *seen_in(program, in_run))
    assert not lives.consistent


def test_microbatches_that_differ_are_all_run(found: ModelProfile) -> None:
    """A dry run with a wrong repetition is run again with every microbatch."""
    plan = plan_of(wide(), [6], size=700, microbatches=3, profiled=found)
    whole = dry_run.Rehearsal._whole

    def doubtful(self: LivesOf) -> bool:
        return not any(isinstance(name, tuple) for name, _ in self.events)

    with (
        mock.patch.object(LivesOf, "consistent", property(doubtful)),
        mock.patch.object(dry_run.Rehearsal, "_whole", autospec=True) as run,
    ):
        run.side_effect = whole
        trace = certify(wide(), plan, allocator=DEFAULT)
    assert run.call_count == 1
    assert trace == certify(wide(), plan, allocator=DEFAULT, fold=False)
