"""The incremental profiler: what every layer takes alone and adds to others, from training runs of the whole model.

Trains a few steps under every partitioning of `profiler.partitionings` and reads every device's peak. A layer's
`mem_added` is the peak with it as a stage's last layer minus the peak without. Where a device passes its cap, the
stages that the run was for are run again, with the other layers spread evenly; where that does not fit either, with
half as many layers before the one in question, down to one. Results are saved after every run: after a break, the
same call goes on where it was. L - G + 1 runs for L layers on G >= 4 devices and L >= 2 G, if all fit. Peaks depend on
the place in the schedule, which the numbers do not: measure under GPipe. (mCAP, section 3.2.)
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from pipefit.capture.caller import apart
from pipefit.capture.task import Task
from pipefit.cluster import Cluster
from pipefit.errors import OutOfMemory
from pipefit.plans import Grid, Plan, Stage
from pipefit.profiler.partitionings import Interval, Stages, around, intervals, partitionings
from pipefit.profiler.runs import Outcome, RunProgress, Runs
from pipefit.profiler.threads import threads_of
from pipefit.profiles import AdditiveCosts, ModelProfile
from pipefit.runtime import Trainer
from pipefit.schedule.whole_stages import Recompute, whole_stages
from pipefit.training import Training

Run = Callable[[Plan], tuple[int, ...]]


def profile_incrementally(
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
    """Bytes of every layer alone and added, from runs of the whole model on the devices of `cluster`.

    Args:
        profile: of `task`, by any profiler; the trainer takes shapes from it.
        store: a JSON file of runs; results in it are used, and new ones are added after every run.
        recompute: the microbatches whose forward every stage runs twice.
        progress: called before every run.
        run: trains under a plan and returns the stages' peaks; by default two steps in this process.

    Raises:
        InfeasibleError: a layer does not fit alone, or not together with the one before it.
        UsageError: fewer than three devices.
        FileError: the store holds other runs, or cannot be read or written.
    """
    layers, devices = len(profile.layers), len(cluster.devices)
    planned = [intervals(edges) for edges in partitionings(layers, devices)]
    runs = Runs(store, "incremental", profile, cluster, training, recompute, progress)
    runs.expected = len(runs.outcomes.keys() | planned)
    measure = run or (lambda plan: train(task, plan))
    told = _Told(runs, lambda stages: measure(plan_of(profile, cluster, training, stages, recompute)), layers, devices)
    for stages in planned:
        told.attempt(stages)
    isolated = tuple(map(told.alone, range(layers)))
    return AdditiveCosts(mem_isolated=isolated, mem_added=(isolated[0], *map(told.added, range(1, layers))))


def train(task: Task, plan: Plan, *, steps: int = 2) -> tuple[int, ...]:
    """The peaks of `plan`'s stages in so many steps of training, all in this process, of a copy where a module exists.

    Raises:
        OutOfMemory: a device passed its cap.
    """
    with threads_of(plan.profile.assumptions.threads), torch.random.fork_rng(devices=[]):
        trainer = Trainer(apart(task), plan)
        torch.manual_seed(0)
        for _ in range(steps):
            trainer.step(task.batch(plan.training.batch_size))
    peaks = trainer.trace.peak_bytes
    return tuple(peaks[stage.device] for stage in plan.stages)


def plan_of(
    profile: ModelProfile, cluster: Cluster, training: Training, stages: Stages, recompute: Recompute = "never"
) -> Plan:
    """Stages that adjoin, each on the device of its number, and recomputed as asked."""
    placed = tuple(Stage(start=a, stop=b, grid=Grid.of(number)) for number, (a, b) in enumerate(stages))
    decisions = whole_stages(placed, recompute, training.schedule, training.microbatches)
    return Plan(profile=profile, cluster=cluster, training=training, stages=placed, decisions=decisions)


class _Told:
    """What the runs tell of single layers; makes further ones where the planned did not fit."""

    def __init__(self, runs: Runs, run: Callable[[Stages], tuple[int, ...]], layers: int, devices: int) -> None:
        self.runs, self.run, self.layers, self.devices = runs, run, layers, devices

    def attempt(self, stages: Stages) -> None:
        """Makes the run, unless it was made before; if a device passes its cap, no stage is measured."""
        self.runs.attempt(stages, lambda: self._outcome(stages))

    def _outcome(self, stages: Stages) -> Outcome:
        try:
            return Outcome(peaks=self.run(stages))
        except OutOfMemory as error:
            return Outcome(peaks=(None,) * len(stages), failure=str(error))

    def alone(self, layer: int) -> int:
        """Peak of a layer alone on a device."""
        self._measured((layer, layer + 1))
        return self.runs.needed((layer, layer + 1))

    def added(self, layer: int) -> int:
        """What a layer adds to those before it: as many of them as were run with it and without."""
        for first in range(layer):
            without, together = self.runs.peak((first, layer)), self.runs.peak((first, layer + 1))
            if without is not None and together is not None:
                return together - without
        first = 0
        while first < layer:
            together = self._measured((first, layer + 1))
            without = None if together is None else self._measured((first, layer))
            if together is not None and without is not None:
                return together - without
            first = (first + layer + 1) // 2
        raise self.runs.too_large((layer - 1, layer + 1))

    def _measured(self, interval: Interval) -> int | None:
        """The peak of these layers on a device, from a run of their own where there is none; None: they do not fit."""
        if self.runs.peak(interval) is None:
            self.attempt(intervals(around(*interval, self.layers, self.devices)))
        return self.runs.peak(interval)
