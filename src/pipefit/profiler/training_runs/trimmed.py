"""The trimmed profiler: bytes of every block, alone and added to the one before, without the model.

A run puts one block, or two consecutive ones, on each device and leaves out the rest of the model: each
device trains its stage alone, with zeros of the true shapes in place of its neighbors' messages. L blocks on
G devices take about 2 L / G runs instead of L - G + 1, each of a small part of the model; one device is
enough. A block's `mem_added` is its peak together with the block before it, minus the peak of that block
alone. Results are saved after every run, as in the incremental profiler. (CAPSlog, PDP 2024.)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from pipefit.capture.task import Task
from pipefit.errors import OutOfMemory, UsageError
from pipefit.lowering.passes.recomputation import Recompute, recompute_decisions
from pipefit.measure.kernels import Kernels
from pipefit.measure.machine import threads_of
from pipefit.profiler.training_runs.runs import Interval, Outcome, RunProgress, Runs, Stages, trimmed
from pipefit.runtime.alone import LoneStages
from pipefit.runtime.hardware import Hardware
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import AdditiveCosts, ModelProfile
from pipefit.schema.training import Training

Run = Callable[[Plan, int], int]


def profile_trimmed(
    task: Task,
    profile: ModelProfile,
    cluster: Cluster,
    training: Training,
    *,
    store: str | os.PathLike[str],
    recompute: Recompute = "never",
    progress: RunProgress | None = None,
    run: Run | None = None,
) -> AdditiveCosts:
    """Return the bytes of every block, alone and added, from runs of one or two blocks on each device.

    Args:
        profile: a profile of `task` by any profiler; the shapes at the cuts come from it.
        store: a JSON file of runs; results in it are used, and new ones are added after every run.
        recompute: the microbatches whose forward every stage runs twice.
        progress: called before every run.
        run: trains a plan's stage with this number alone and returns its peak; by default two steps in this process.

    Raises:
        InfeasibleError: a block does not fit alone, or not together with the block before it.
        UsageError: a schedule under which a stage's memory depends on its place.
        FileError: the store holds other runs, or cannot be read or written.
    """
    blocks = len(profile.block_names)
    planned = trimmed(blocks, len(cluster.devices))
    runs = Runs(store, "trimmed", profile, cluster, training, recompute, progress)
    runs.expected = len(planned)
    cut = partial(_cut, profile, cluster, training, recompute)
    train = run or partial(_train, LoneStages(task, training.microbatch_size, target=cluster.target))
    for stages in planned:
        runs.attempt(stages, partial(_outcome, cut, train, stages))
    isolated = tuple(runs.needed((block, block + 1)) for block in range(blocks))
    added = (runs.needed((block - 1, block + 1)) - isolated[block - 1] for block in range(1, blocks))
    return AdditiveCosts(mem_isolated=isolated, mem_added=(isolated[0], *added), training=training, recompute=recompute)


def _outcome(cut: Callable[[int, Interval], tuple[Plan, int]], run: Run, stages: Stages) -> Outcome:
    """Train every stage alone, on the device with its number, even if another stage does not fit."""
    peaks: list[int | None] = []
    failure = ""
    for number, interval in enumerate(stages):
        try:
            peaks.append(run(*cut(number, interval)))
        except OutOfMemory as error:
            peaks.append(None)
            failure = str(error)
    return Outcome(peaks=tuple(peaks), failure=failure)


def _cut(
    profile: ModelProfile,
    cluster: Cluster,
    training: Training,
    recompute: Recompute,
    number: int,
    interval: Interval,
) -> tuple[Plan, int]:
    """Return a plan with the stage of these blocks on device `number`, and the stage's number.

    The blocks before and after it are stages on two further devices, which no run uses.
    """
    start, stop = (profile.edges[block] for block in interval)
    layers, here = len(profile.layers), len(cluster.devices)
    parts = ((0, start, here), (start, stop, number), (stop, layers, here + 1))
    stages = tuple(Stage(start=a, stop=b, grid=Grid.of(device)) for a, b, device in parts if a < b)
    wider = replace(cluster, devices=(*cluster.devices, *[cluster.devices[number]] * 2))
    decisions = recompute_decisions(
        stages,
        profile.edges,
        recompute,
        training.schedule,
        training.microbatches,
    )
    plan = Plan(profile=profile, cluster=wider, training=training, stages=stages, decisions=decisions)
    return plan, int(start > 0)


def _train(lone: LoneStages, plan: Plan, stage: int) -> int:
    number = plan.stages[stage].device
    with threads_of(plan.profile.assumptions.threads):
        hardware, kernels = Hardware(plan), Kernels(torch.get_num_threads())
        device = hardware.device(number)
        meter = hardware.meter(number, device, kernels)
        if meter is None:
            raise UsageError(f"{plan.cluster.name} does not count memory: profile on emulated devices, or on GPUs")
        try:
            return lone.train(plan, stage, device=device, meter=meter)
        finally:
            kernels.keep()
            kernels.tell_unknown()
