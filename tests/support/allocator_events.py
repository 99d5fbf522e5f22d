"""Independent oracle for memory: the CPU allocator's own events, read from torch's profiler.

It shares no code with pipefit's meter: the allocator reports every allocated and freed byte, inside kernels
too. All devices of a plan run in turn in this process, so events belong to the device whose action contains
them. The garbage collector is off meanwhile, because its frees belong to no action.
"""

from __future__ import annotations

import contextlib
import gc
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pipefit.capture import Task
from pipefit.runtime import Trainer
from pipefit.runtime.engine.runner import DeviceRunner
from pipefit.schema.plan import Plan


def measured_peaks(
    task: Task, plan: Plan, *, steps: int = 2, seed: int = 0, accumulate: int = 1
) -> list[list[int]]:
    """Return the peak allocated bytes of every used device in every step, from allocator events:
    `[rank][step]`.
    """
    unmetered = replace(plan, cluster=replace(plan.cluster, backend="cpu"))
    with _observed():  # so that later frees have known sizes
        trainer = Trainer(task, unmetered, seed=seed, accumulate=accumulate)
    levels = [_resident(runner) for runner in trainer.runners]
    peaks: list[list[int]] = [[] for _ in trainer.runners]
    for step in range(steps):
        torch.manual_seed(seed + step)
        batch = task.batch(plan.training.batch_size)
        with _uncollected(), _marked(), _observed() as observed:
            trainer.step(batch)
        for rank, runner in enumerate(trainer.runners):
            changes = _changes(observed, runner.number)
            highest, levels[rank] = _walk(levels[rank], changes)
            peaks[rank].append(highest)
    return peaks


def _observed() -> profile:
    """Profile with the allocator's events."""
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def _resident(runner: DeviceRunner) -> int:
    """Return the bytes of everything that exists before the first step, counted from the tensors."""
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for stage in runner.stages.values()
        for t in (
            *stage.parameters,
            *stage.held,
            *stage.kept_losses,
            *stage.optimizer_state(),
        )
    }
    return sum(storages.values())


def _walk(level: int, changes: list[int]) -> tuple[int, int]:
    highest = level
    for change in changes:
        level += change
        highest = max(highest, level)
    return highest, level


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Collect garbage of earlier runs before the context, and none inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def _marked() -> Iterator[None]:
    """Turn every action of a runner into a range of the profile, named after its device."""
    original = DeviceRunner._timed

    def marked(self: DeviceRunner, *args: object) -> None:
        with record_function(f"device:{self.number}"):
            original(self, *args)  # type: ignore[arg-type]

    with mock.patch.object(DeviceRunner, "_timed", marked):
        yield


def _changes(observed: profile, device: int) -> list[int]:
    """Return the allocator's events inside this device's actions, in order: positive for allocated bytes,
    negative for freed bytes.
    """
    events = observed.profiler.kineto_results.events()  # type: ignore[union-attr]
    ranges = sorted((e.start_ns(), e.end_ns()) for e in events if e.name() == f"device:{device}")
    starts = [start for start, _ in ranges]
    memory = sorted(
        ((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda event: event[0]
    )
    return [
        nbytes for at, nbytes in memory if (k := bisect_right(starts, at) - 1) >= 0 and at <= ranges[k][1]
    ]
