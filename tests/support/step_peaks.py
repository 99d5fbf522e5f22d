"""A plan's peaks in every step from four sources: simulator, dry run, a trainer's meter, the allocator."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch

from pipefit.capture import Task
from pipefit.runtime import Trainer, certify
from pipefit.schema.plan import Plan
from pipefit.schema.trace import Trace
from pipefit.simulator import simulate
from support.allocator_events import measured_peaks

Peaks = list[list[int]]  # by device in use, and by step


class StepPeaks(NamedTuple):
    """Peaks of four sources."""

    simulated: Peaks
    dry: Peaks
    metered: Peaks
    allocated: Peaks


def step_peaks(task: Task, plan: Plan, *, steps: int = 2) -> StepPeaks:
    """Predict, certify and train `plan`."""

    def of(trace: Trace) -> Peaks:
        devices = [trace.devices[device] for device in plan.workers]
        return [[device.step_peak_bytes(step) for step in range(steps)] for device in devices]

    trainer = Trainer(task, plan)
    for step in range(steps):
        torch.manual_seed(step)
        trainer.step(task.batch(plan.training.batch_size))
    predicted, dry = simulate(plan, steps=steps), certify(task, plan, steps=steps)
    return StepPeaks(of(predicted), of(dry), of(trainer.trace), measured_peaks(task, plan, steps=steps))


def too_low(task: Task, plan: Plan, *, steps: int = 2) -> list[str]:
    """Return the actions whose dry-run peak exceeds the simulated one."""
    dry, virtual = certify(task, plan, steps=steps), simulate(plan, steps=steps)
    told, seen = _by_action(virtual), _by_action(dry)
    return [
        f"device {device} step {step} {action}: {nbytes} instead of {expected}"
        for (device, step, action), found in seen.items()
        for nbytes, expected in zip(found, told.get((device, step, action), ()), strict=False)
        if nbytes > expected
    ]


def _by_action(trace: Trace) -> dict[tuple[int, int, str], list[int]]:
    """Return the peaks of every action of a device and step, at each occurrence."""
    found = defaultdict[tuple[int, int, str], list[int]](list)
    for number, device in enumerate(trace.devices):
        for sample in device.memory:
            found[number, sample.step, sample.action].append(sample.total_bytes)
    return found
