"""Profilers by training runs: bytes of every block, alone and added to those before.

The trimmed profiler trains at most two blocks on a device (below). The incremental one trains a few steps of
the whole model under every partitioning of `profiler.training_runs.runs`, and reads every device's peak. A
block's `mem_added` is the peak of a stage that ends with it, minus the peak of the stage without it. If a
device exceeds its cap, the stages that the run was to measure run again, with the other blocks placed so that
the fullest device is as empty as possible (`Placement`); if that does not fit either, with fewer blocks
before the one in question. Results are saved after every run, so the same call continues after an
interruption. If everything fits, L blocks on G >= 4 devices with L >= 2 G take L - G + 1 runs. The numbers do
not depend on a stage's place in the schedule, so only GPipe or a single microbatch is accepted. (mCAP,
section 3.2.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray

from pipefit.capture import Chain, Task, build_chain, on_a_copy, pair, recording, seed_torch
from pipefit.errors import InfeasibleError, OutOfMemory, UsageError
from pipefit.lowering import Recompute, distinct_steps, recompute_decisions, step_programs
from pipefit.measure import Kernels, MemoryMeter, threads_of
from pipefit.planner import true_peaks
from pipefit.profiler.training_runs.runs import (
    Edges,
    Interval,
    Outcome,
    RunProgress,
    Runs,
    Stages,
    intervals,
    partitionings,
    trimmed,
)
from pipefit.runtime import (
    Hardware,
    Site,
    Source,
    StageSources,
    Trainer,
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

# ---- Placement of the other blocks in a run that measures one stage
#
# The profiler runs whole models to measure one stage; `Placement` divides the blocks before and after that
# stage among the other devices to minimize the load of the fullest. It uses the profile's peaks, under a
# schedule in which a stage's place does not matter; stage s is on device s. So if the profile is exact, a
# run exceeds a cap only if every run with that stage would. Dynamic programming over (devices, blocks) takes
# milliseconds for 100 blocks on 8 devices, and 8 L^2 bytes.

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]


class Placement:
    """Best placements of all other blocks, for any stage. A load is the used share of a device's memory."""

    def __init__(
        self, profile: ModelProfile, cluster: Cluster, training: Training, recompute: Recompute
    ) -> None:
        self.blocks = len(profile.block_names)
        peaks = _peaks(profile, training, recompute)
        self._loads = [peaks / budget for budget in cluster.budgets]
        self._before = _before(self._loads)
        self._behind = _behind(self._loads)

    def load(self, start: int, stop: int) -> float:
        """Return the lowest load of the fullest device, with blocks `start` to `stop - 1` as one stage.

        Above 1 no such run fits.
        """
        return self._best(start, stop)[0]

    def edges(self, start: int, stop: int) -> Edges:
        """Return the partitioning with that load."""
        device = self._best(start, stop)[-1]
        before, end = [start], start
        for number in reversed(range(device)):
            end = int(self._before[number + 1][1][end])
            before.append(end)
        behind, first = [stop], stop
        for number in range(device + 1, len(self._loads)):
            if first == self.blocks:
                break
            first = int(self._behind[number][1][first])
            behind.append(first)
        return (*reversed(before), *behind)

    def _best(self, start: int, stop: int) -> tuple[float, float, int]:
        """Return the lowest load, the load of the other devices, and the device of the stage."""
        ways = []
        for device, loads in enumerate(self._loads):
            others = max(float(self._before[device][0][start]), float(self._behind[device + 1][0][stop]))
            ways.append((max(float(loads[start, stop]), others), others, device))
        return min(ways)


def _peaks(profile: ModelProfile, training: Training, recompute: Recompute) -> Floats:
    """Return the peak of blocks `start` to `stop - 1` as a stage, at [start, stop]; infinity if empty."""
    blocks = len(profile.block_names)
    predicted = true_peaks(profile, training, stages=1, recompute=recompute)
    peaks = np.full((blocks + 1, blocks + 1), np.inf)
    for start, stop in combinations(range(blocks + 1), 2):
        peaks[start, stop] = predicted(0, start, stop)
    return peaks


def _before(loads: Sequence[Floats]) -> list[tuple[Floats, Indices]]:
    """Return for the first n devices and the first l blocks the lowest load, and the start of the last stage.

    None of these devices may be empty.
    """
    nothing = np.full(len(loads[0]), np.inf)
    nothing[0] = 0
    result = [(nothing, np.zeros(len(nothing), np.intp))]
    for own in loads:
        table = np.maximum(result[-1][0][:, None], own)
        result.append((table.min(axis=0), table.argmin(axis=0)))
    return result


def _behind(loads: Sequence[Floats]) -> list[tuple[Floats, Indices]]:
    """Return for devices n and later and blocks l and later the lowest load, and the stop of the first
    stage.
    """
    nothing = np.full(len(loads[0]), np.inf)
    nothing[-1] = 0
    result = [(nothing, np.zeros(len(nothing), np.intp))]
    for own in reversed(loads):
        table = np.maximum(own, result[-1][0][None, :])
        lowest = table.min(axis=1)
        lowest[-1] = 0
        result.append((lowest, table.argmin(axis=1)))
    return result[::-1]


# ---- The profiler

Run = Callable[[Plan], tuple[int, ...]]


def profile_incrementally(
    task: Task,
    profile: ModelProfile,
    cluster: Cluster,
    training: Training,
    *,
    recompute: Recompute = "never",
    store: str | os.PathLike[str],
    progress: RunProgress | None = None,
    run: Run | None = None,
) -> AdditiveCosts:
    """Return the bytes of every block, alone and added, from runs of the whole model on `cluster`.

    Args:
        profile: a profile of `task` by any profiler; the trainer takes shapes from it.
        recompute: the microbatches that every stage recomputes (`lowering.passes.recomputation`).
        store: a JSON file of runs; results in it are used, and new ones are added after every run.
        progress: called before every run.
        run: trains under a plan and returns the stages' peaks; by default two steps in this process.

    Raises:
        InfeasibleError: a block does not fit alone, or not together with the block before it.
        UsageError: fewer than three devices, or a schedule under which a stage's memory depends on its place.
        FileError: the store holds other runs, or cannot be read or written.
    """
    blocks = len(profile.block_names)
    planned = [intervals(edges) for edges in partitionings(blocks, len(cluster.devices))]
    runs = Runs(store, "incremental", profile, cluster, training, recompute, progress)
    runs.expected = len(runs.outcomes.keys() | planned)
    measure = run or (lambda plan: train(task, plan))
    block_bytes = _BlockBytes(
        runs, lambda stages: measure(plan_of(profile, cluster, training, stages, recompute))
    )
    for stages in planned:
        block_bytes.attempt(stages)
    isolated = tuple(map(block_bytes.alone, range(blocks)))
    added = (isolated[0], *map(block_bytes.added, range(1, blocks)))
    return AdditiveCosts(mem_isolated=isolated, mem_added=added, training=training, recompute=recompute)


def train(task: Task, plan: Plan, *, steps: int = 2) -> tuple[int, ...]:
    """Return the peaks of `plan`'s stages in `steps` training steps in this process; copy an existing module.

    Raises:
        OutOfMemory: a device exceeded its cap.
    """
    with threads_of(plan.profile.assumptions.threads), torch.random.fork_rng(devices=[]):
        trainer = Trainer(on_a_copy(task), plan, numbers=False)
        seed_torch(0, target=plan.cluster.target)
        for _ in range(steps):
            trainer.step(task.batch(plan.training.batch_size))
    peaks = trainer.trace.peak_bytes
    return tuple(peaks[stage.device] for stage in plan.stages)


def plan_of(
    profile: ModelProfile,
    cluster: Cluster,
    training: Training,
    intervals: Stages,
    recompute: Recompute = "never",
) -> Plan:
    """Return a plan of these stages, each on the device with its number, with recomputation as given."""
    edges = profile.edges
    stages = tuple(
        Stage(start=edges[a], stop=edges[b], grid=Grid.of(number)) for number, (a, b) in enumerate(intervals)
    )
    decisions = recompute_decisions(
        stages,
        edges,
        recompute,
        training.schedule,
        training.microbatches,
    )
    return Plan(profile=profile, cluster=cluster, training=training, stages=stages, decisions=decisions)


class _BlockBytes:
    """Bytes of single blocks, derived from the runs; makes further runs if planned ones did not fit."""

    def __init__(self, runs: Runs, run: Callable[[Stages], tuple[int, ...]]) -> None:
        self.runs, self.run = runs, run

    @cached_property
    def placement(self) -> Placement:
        """Placement of the other blocks; computed when a planned run did not fit."""
        return Placement(self.runs.profile, self.runs.cluster, self.runs.training, self.runs.recompute)

    def attempt(self, stages: Stages) -> None:
        """Make the run, unless it was made before; if a device exceeds its cap, no stage is measured."""
        self.runs.attempt(stages, lambda: self._outcome(stages))

    def _outcome(self, stages: Stages) -> Outcome:
        try:
            return Outcome(peaks=self.run(stages))
        except OutOfMemory as error:
            return Outcome(peaks=(None,) * len(stages), failure=str(error))

    def alone(self, block: int) -> int:
        """Return the peak of a block alone on a device.

        Raises:
            InfeasibleError: every run with the block alone exceeded a cap.
        """
        peak = self._measured((block, block + 1))
        if peak is None:
            raise self._too_large((block, block + 1))
        return peak

    def added(self, block: int) -> int:
        """Return the bytes that a block adds to the longest measured run of blocks before it.

        Raises:
            InfeasibleError: every run of the block with the block before it exceeded a cap.
        """
        for first in range(block):
            without, together = self.runs.peak((first, block)), self.runs.peak((first, block + 1))
            if without is not None and together is not None:
                return together - without
        for first in self._firsts(block):
            together = self._measured((first, block + 1))
            without = None if together is None else self._measured((first, block))
            if together is not None and without is not None:
                return together - without
        raise self._too_large((block - 1, block + 1))

    def _firsts(self, block: int) -> Iterator[int]:
        """Yield first blocks of stages to try that end with this block.

        The longest stage that fits by the profile comes first, then shorter ones; at last the one with the
        lowest load, and the one with a single block before this one.
        """
        loads = [
            max(self.placement.load(first, block + 1), self.placement.load(first, block))
            for first in range(block)
        ]
        fitting = [first for first, load in enumerate(loads) if load <= 1]
        while fitting:
            yield fitting[0]
            fitting = fitting[(len(fitting) + 1) // 2 :]
        yield loads.index(min(loads))
        yield block - 1

    def _measured(self, interval: Interval) -> int | None:
        """Return the peak of these blocks as a stage, from a new run if necessary; None if it did not fit."""
        if self.runs.peak(interval) is None:
            self.attempt(intervals(self.placement.edges(*interval)))
        return self.runs.peak(interval)

    def _too_large(self, interval: Interval) -> InfeasibleError:
        load = self.placement.load(*interval)
        return self.runs.too_large(
            interval, f" (by the profile, the fullest would need {100 * load:.1f} % of it)"
        )


# ---- The trimmed profiler: bytes of every block, alone and added to the one before, without the model
#
# A run puts one block, or two consecutive ones, on each device and leaves out the rest of the model: each
# device trains its stage alone, with zeros of the true shapes in place of its neighbors' messages. L blocks
# on G devices take about 2 L / G runs instead of L - G + 1, each of a small part of the model; one device
# is enough. A block's `mem_added` is its peak together with the block before it, minus the peak of that
# block alone. Results are saved after every run, as in the incremental profiler. (CAPSlog, PDP 2024.)

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


StageRun = Callable[[Plan, int], int]


def profile_trimmed(
    task: Task,
    profile: ModelProfile,
    cluster: Cluster,
    training: Training,
    *,
    store: str | os.PathLike[str],
    recompute: Recompute = "never",
    progress: RunProgress | None = None,
    run: StageRun | None = None,
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


def _outcome(cut: Callable[[int, Interval], tuple[Plan, int]], run: StageRun, stages: Stages) -> Outcome:
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
