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

from pipefit.capture import Chain, Task, build_chain, on_a_copy, pair, recording, seed_torch
from pipefit.errors import OutOfMemory, UsageError
from pipefit.lowering import Recompute, distinct_steps, recompute_decisions, step_programs
from pipefit.measure import Kernels, MemoryMeter, threads_of
from pipefit.profiler.training_runs.runs import Interval, Outcome, RunProgress, Runs, Stages, trimmed
from pipefit.runtime import (
    Hardware,
    Site,
    Source,
    StageSources,
    Transport,
    assemble,
    check_backwards,
    check_casts,
    check_model,
    cut_batch,
    run_in_turn,
)
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import AdditiveCosts, ModelProfile, Target
from pipefit.schema.training import Training

# ---- Trains one stage of a plan without its neighbors, for profiling.
#
# It receives zeros, and its messages are dropped. The stage runs its own program with tensors of the true
# shapes, so its memory is, to the byte, its memory in the whole pipeline, and no other part of the model
# needs a device. The computed values mean nothing.

_SEED = 0  # any seed: the computed values mean nothing


class LoneStages:
    """A model whose single stages are trained alone, on devices with the kernels of `target`.

    The model is built once; an existing module is copied, not changed.

    Raises:
        UsageError: the module cannot be captured.
    """

    def __init__(self, task: Task, microbatch_size: int, *, target: Target = "cpu") -> None:
        self.task, self._target = task, target
        with recording("profiling"):
            self.chain = self._chain(microbatch_size)
        self.shared = self.chain.shared  # before a stage is given its own copies

    def _chain(self, samples: int) -> Chain:
        return build_chain(on_a_copy(self.task), samples, seed=_SEED, target=self._target)

    def train(
        self, plan: Plan, stage: int, *, device: torch.device, meter: MemoryMeter, steps: int | None = None
    ) -> int:
        """Return the peak bytes of a stage of `plan` over `steps` steps on `device`.

        Its layers then return to the host. Default of `steps`: the number of distinct steps of the plan.

        Raises:
            OutOfMemory: the stage passed the meter's cap.
            FileError: the plan was made for another task; says what differs.
            UsageError: torch cannot run a backward on this GPU in this process.
        """
        check_backwards([device])
        check_casts(plan, self.task)
        check_model(plan, self.task, self.chain)
        programs = step_programs(plan)
        site = Site(
            task=self.task,
            sources=StageSources(
                plan,
                Source(self.chain, self.shared),
                plan.training.microbatch_size,
                lambda wanted: Source.of(self._chain(wanted.samples)),
            ),
            plan=plan,
            program=programs[-1],
            transport=Transport(),
            clock=lambda: 0.0,
            seed=_SEED,
        )
        runner = assemble(site, plan.stages[stage].device, device=device, meter=meter)
        try:
            devices = [device] if device.type == "cuda" else []
            with recording("profiling"), torch.random.fork_rng(devices, device_type="cuda"):
                seed_torch(_SEED, target=plan.cluster.target)
                for step in range(distinct_steps(plan) if steps is None else steps):
                    inputs, targets = pair(self.task.batch(plan.training.batch_size), "a step takes")
                    flat = self.chain.flatten(inputs), self.chain.flatten_targets(targets)
                    cut = cut_batch(plan, *flat)
                    program = programs[min(step, len(programs) - 1)]
                    run_in_turn([runner], cut.inputs, cut.targets, program=program)
        finally:
            for layer in (layer for each in runner.stages.values() for layer in each.layers):
                layer.module.to("cpu")
        return max(sample.total_bytes for sample in runner.record.samples)


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
        run: trains a plan's stage with this number alone and returns its peak; by default two steps in this
        process.

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
    return AdditiveCosts(
        mem_isolated=isolated, mem_added=(isolated[0], *added), training=training, recompute=recompute
    )


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
            raise UsageError(
                f"{plan.cluster.name} does not measure memory: profile on emulated devices, or on GPUs"
            )
        try:
            return lone.train(plan, stage, device=device, meter=meter)
        finally:
            kernels.keep()
            kernels.tell_unknown()
