"""The dry run: the runtime itself over fake tensors, all devices in one process, no hardware and no data.

It executes every action of the program as the workers would, on tensors that have shapes and storages but no bytes. The
peaks it counts are those of the real run, to the byte, for any model that fake tensors can follow; that is what
certifies a plan before anyone pays for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import torch

from pipefit.capture.sample import sample
from pipefit.capture.shared import shared_parameters
from pipefit.capture.task import Task
from pipefit.fake.chain import fake_chain
from pipefit.fake.target import FakeTarget
from pipefit.meter.cpu import Meter
from pipefit.plans import Plan
from pipefit.profiles import Target
from pipefit.runtime.assembly import Site, assemble, check_model
from pipefit.runtime.runner import DeviceRunner, run_in_turn
from pipefit.runtime.transport import Mailroom
from pipefit.schedule import lower
from pipefit.trace import DeviceTrace, Source, Trace


def certify(task: Task, plan: Plan, *, steps: int = 2, target: Target | None = None) -> Trace:
    """The peaks of `plan` on every device, over `steps` training steps, to the byte.

    The first step differs from all others (optimizer state is born in it), so two steps tell everything. Times in the
    trace are positions in the program, not seconds. Budgets are not enforced: compare `trace.peak_bytes` with the
    cluster's.

    Raises:
        FileError: the plan was made for another model.
    """
    target = target or plan.profile.assumptions.target
    threads = plan.profile.assumptions.threads if target == "cpu" else None
    training, program, mailroom = plan.training, lower(plan), Mailroom()
    like = sample(task, training.microbatch_size)
    with torch.random.fork_rng(devices=[]), FakeTarget(target) as fake:
        chain = fake_chain(task, fake, like)
        check_model(plan, chain)
        shared = shared_parameters([layer.module for layer in chain.layers])
        ticks: Iterator[int] = count()
        site = Site(
            task=task,
            chain=chain,
            plan=plan,
            program=program,
            shared=shared,
            transport=mailroom,
            clock=lambda: float(next(ticks)),
            seed=0,
        )
        runners = [
            assemble(site, stages, device=fake.device, meter=Meter(plan.stages[stages[0]].device, threads=threads))
            for stages in plan.ranks
        ]
        data = [[fake.fake(t) for t in chain.flatten(like[0])]] * training.microbatches
        wanted = [[fake.fake(t) for t in chain.flatten_targets(like[1])]] * training.microbatches
        for _ in range(steps):
            run_in_turn(runners, data, wanted)
    return gather(plan, runners, "dry run", steps, (0.0,) * steps)


def gather(
    plan: Plan, runners: Sequence[DeviceRunner], source: Source, steps: int, seconds: tuple[float, ...]
) -> Trace:
    """The trace of the devices that this process runs; the others are empty."""
    mine = {runner.number: runner for runner in runners}
    devices = tuple(
        mine[number].trace(device.memory_bytes)
        if number in mine
        else DeviceTrace(device=number, budget_bytes=device.memory_bytes, events=(), memory=())
        for number, device in enumerate(plan.cluster.devices)
    )
    return Trace(source=source, steps=steps, devices=devices, step_seconds=seconds)
