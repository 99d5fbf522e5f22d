"""The incremental profiler: bytes of every block alone and added to others, from training runs of the whole model.

It trains a few steps under every partitioning of `profiler.partitionings`, and reads every device's peak. A block's
`mem_added` is the peak of a stage with it as the last block, minus the peak without it. If a device passes its cap, the
stages that the run was to measure are run again, with the other blocks placed so that no device is fuller than
necessary (`profiler.placement`); if that does not fit either, with fewer blocks before the one in question. Results are
saved after every run, so that after an interruption the same call continues. It takes L - G + 1 runs for L blocks on
G >= 4 devices with L >= 2 G, if all fit. The numbers do not depend on a stage's place in the schedule, so only GPipe is
accepted, or a single microbatch. (mCAP, section 3.2.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cached_property

import torch

from pipefit.additive_costs import AdditiveCosts
from pipefit.capture.caller import on_a_copy
from pipefit.capture.random_state import seed_torch
from pipefit.capture.task import Task
from pipefit.cluster import Cluster
from pipefit.errors import InfeasibleError, OutOfMemory
from pipefit.grids import Grid, Stage
from pipefit.meter.threads import threads_of
from pipefit.plans import Plan
from pipefit.profiler.partitionings import Interval, Stages, intervals, partitionings
from pipefit.profiler.placement import Placement
from pipefit.profiler.runs import Outcome, RunProgress, Runs
from pipefit.profiles import ModelProfile
from pipefit.runtime import Trainer
from pipefit.schedule.recompute_settings import Recompute, recompute_decisions
from pipefit.training import Training

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
    """Bytes of every block alone and added, from runs of the whole model on the devices of `cluster`.

    Args:
        profile: of `task`, by any profiler; the trainer takes shapes from it.
        recompute: the microbatches that every stage recomputes (`pipefit.schedule.recompute_settings`).
        store: a JSON file of runs; results in it are used, and new ones are added after every run.
        progress: called before every run.
        run: trains under a plan and returns the stages' peaks; by default two steps in this process.

    Raises:
        InfeasibleError: a block does not fit alone, or not together with the one before it.
        UsageError: fewer than three devices, or a schedule under which a stage's memory depends on its place.
        FileError: the store holds other runs, or cannot be read or written.
    """
    blocks = len(profile.block_names)
    planned = [intervals(edges) for edges in partitionings(blocks, len(cluster.devices))]
    runs = Runs(store, "incremental", profile, cluster, training, recompute, progress)
    runs.expected = len(runs.outcomes.keys() | planned)
    measure = run or (lambda plan: train(task, plan))
    block_bytes = _BlockBytes(runs, lambda stages: measure(plan_of(profile, cluster, training, stages, recompute)))
    for stages in planned:
        block_bytes.attempt(stages)
    isolated = tuple(map(block_bytes.alone, range(blocks)))
    added = (isolated[0], *map(block_bytes.added, range(1, blocks)))
    return AdditiveCosts(mem_isolated=isolated, mem_added=added, training=training, recompute=recompute)


def train(task: Task, plan: Plan, *, steps: int = 2) -> tuple[int, ...]:
    """The peaks of `plan`'s stages in so many steps of training, in this process. An existing module is copied.

    Raises:
        OutOfMemory: a device passed its cap.
    """
    with threads_of(plan.profile.assumptions.threads), torch.random.fork_rng(devices=[]):
        trainer = Trainer(on_a_copy(task), plan, numbers=False)
        seed_torch(0, target=plan.cluster.target)
        for _ in range(steps):
            trainer.step(task.batch(plan.training.batch_size))
    peaks = trainer.trace.peak_bytes
    return tuple(peaks[stage.device] for stage in plan.stages)


def plan_of(
    profile: ModelProfile, cluster: Cluster, training: Training, intervals: Stages, recompute: Recompute = "never"
) -> Plan:
    """A plan of these stages, each on the device of its number, recomputed as asked."""
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
        shared=profile.at(training.microbatch_size).shared,
    )
    return Plan(profile=profile, cluster=cluster, training=training, stages=stages, decisions=decisions)


class _BlockBytes:
    """Single blocks' bytes, derived from the runs; makes further runs if planned ones did not fit."""

    def __init__(self, runs: Runs, run: Callable[[Stages], tuple[int, ...]]) -> None:
        self.runs, self.run = runs, run

    @cached_property
    def placement(self) -> Placement:
        """Where the other blocks go; computed when a planned run has not fitted."""
        return Placement(self.runs.profile, self.runs.cluster, self.runs.training, self.runs.recompute)

    def attempt(self, stages: Stages) -> None:
        """Make the run, unless it was made before; if a device passes its cap, no stage is measured."""
        self.runs.attempt(stages, lambda: self._outcome(stages))

    def _outcome(self, stages: Stages) -> Outcome:
        try:
            return Outcome(peaks=self.run(stages))
        except OutOfMemory as error:
            return Outcome(peaks=(None,) * len(stages), failure=str(error))

    def alone(self, block: int) -> int:
        """Peak of a block alone on a device.

        Raises:
            InfeasibleError: every run with it alone passed a cap.
        """
        peak = self._measured((block, block + 1))
        if peak is None:
            raise self._too_large((block, block + 1))
        return peak

    def added(self, block: int) -> int:
        """What a block adds to the blocks before it: to the most of them that were run both with it and without it.

        Raises:
            InfeasibleError: every run with it and the block before it on a device passed a cap.
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
        """First blocks of stages to try that end with this block.

        First the longest stage that fits by the profile, then shorter ones; at last the one with the lowest load, and
        the one that holds a single block before this one.
        """
        loads = [
            max(self.placement.load(first, block + 1), self.placement.load(first, block)) for first in range(block)
        ]
        fitting = [first for first, load in enumerate(loads) if load <= 1]
        while fitting:
            yield fitting[0]
            fitting = fitting[(len(fitting) + 1) // 2 :]
        yield loads.index(min(loads))
        yield block - 1

    def _measured(self, interval: Interval) -> int | None:
        """The peak of these blocks as a stage, from a run of their own if there is none yet; None if it did not fit."""
        if self.runs.peak(interval) is None:
            self.attempt(intervals(self.placement.edges(*interval)))
        return self.runs.peak(interval)

    def _too_large(self, interval: Interval) -> InfeasibleError:
        load = self.placement.load(*interval)
        return self.runs.too_large(interval, f" (by the profile, the fullest would need {100 * load:.1f} % of it)")
