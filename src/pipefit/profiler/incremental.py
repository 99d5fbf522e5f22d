"""The incremental profiler: what every layer takes alone and adds to others, from training runs on emulated devices.

Trains a few steps under every partitioning of `profiler.partitionings` and reads every device's peak. A layer's
`mem_added` is the peak with it as a stage's last layer minus the peak without. Where a device passes its cap, the
stages that the run was for are run again, with the other layers spread evenly; where that does not fit either, with
half as many layers before the one in question, down to one. Results are saved after every run: after a break, the
same call goes on where it was. L - G + 1 runs for L layers on G >= 4 devices and L >= 2 G, if all fit. Peaks depend on
the place in the schedule, which the numbers do not: measure under GPipe. (mCAP, section 3.2.)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from pipefit.capture.task import Task
from pipefit.cluster import Cluster
from pipefit.cost.additive import AdditiveCosts
from pipefit.errors import FileError, InfeasibleError, OutOfMemory
from pipefit.plan import Plan, Stage
from pipefit.profile import ModelProfile
from pipefit.profiler.partitionings import Edges, around, intervals, partitionings
from pipefit.runtime import Trainer
from pipefit.training import Training
from pipefit.units import format_bytes

Peaks = tuple[int, ...]
Interval = tuple[int, int]
RunProgress = Callable[[int, int, Edges], None]  # runs done, runs planned by now, the next one
Run = Callable[[Plan], Peaks]


def profile_incrementally(
    task: Task,
    profile: ModelProfile,
    cluster: Cluster,
    training: Training,
    *,
    store: str | os.PathLike[str],
    progress: RunProgress | None = None,
    run: Run | None = None,
) -> AdditiveCosts:
    """Bytes of every layer alone and added, from runs on the devices of `cluster`.

    Args:
        profile: of `task`, by any profiler; the trainer takes shapes from it.
        store: a JSON file of runs; results in it are used, and new ones are added after every run.
        progress: called before every run.
        run: trains under a plan and returns the stages' peaks; by default two steps in this process.

    Raises:
        InfeasibleError: a layer does not fit alone, or not together with the one before it.
        UsageError: fewer than three devices.
        FileError: the store holds runs of another model, training or cluster, or cannot be read or written.
    """
    asked = {
        "model": profile.fingerprint,
        "training": asdict(training),
        "budgets": list(cluster.budgets),
    }
    runs = _Runs(Path(store), asked, progress)
    measure = run or (lambda plan: train(task, plan))

    def attempt(edges: Edges) -> bool:
        return runs.attempt(edges, lambda: measure(_plan(profile, cluster, training, edges)))

    layers, devices = len(profile.layers), len(cluster.devices)
    planned = partitionings(layers, devices)
    runs.expected = len(runs.results.keys() | planned)
    for edges in planned:
        attempt(edges)
    isolated = tuple(_alone(runs, attempt, layer, profile, cluster) for layer in range(layers))
    added = (isolated[0], *(_added(runs, attempt, layer, profile, cluster) for layer in range(1, layers)))
    return AdditiveCosts(mem_isolated=isolated, mem_added=added)


def train(task: Task, plan: Plan, *, steps: int = 2) -> Peaks:
    """The peaks of `plan`'s stages in so many steps of training, all in this process.

    Raises:
        OutOfMemory: a device passed its cap.
    """
    trainer = Trainer(task, plan)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(steps):
            trainer.step(task.batch(plan.training.batch_size))
    peaks = trainer.trace.peak_bytes
    return tuple(peaks[stage.device] for stage in plan.stages)


class _Runs:
    """Results by partitioning, on file; None where memory ran out."""

    def __init__(self, path: Path, asked: dict[str, Any], progress: RunProgress | None) -> None:
        self.path, self.asked, self.progress = path, asked, progress
        self.expected = 0
        self.reason = ""
        self.results: dict[Edges, Peaks | None] = self._load() if path.exists() else {}

    def attempt(self, edges: Edges, run: Callable[[], Peaks]) -> bool:
        """Whether the run goes through, now or earlier."""
        if edges not in self.results:
            if self.progress is not None:
                self.expected = max(self.expected, len(self.results) + 1)
                self.progress(len(self.results), self.expected, edges)
            try:
                self.results[edges] = run()
            except OutOfMemory as error:
                self.results[edges], self.reason = None, f". The last run that did not fit: {error}"
            self._save()
        return self.results[edges] is not None

    def peak(self, interval: Interval) -> int | None:
        """The peak of a stage of these layers in the first run that had it."""
        for edges, peaks in self.results.items():
            if peaks is not None and interval in intervals(edges):
                return peaks[intervals(edges).index(interval)]
        return None

    def _load(self) -> dict[Edges, Peaks | None]:
        try:
            found = json.loads(self.path.read_text())
            asked = found["asked"]
            results = {
                tuple(map(int, edges)): None if peaks is None else tuple(map(int, peaks))
                for edges, peaks in found["runs"]
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FileError(f"{self.path} is no record of profiling runs ({error}): delete it to begin anew") from None
        if asked != json.loads(json.dumps(self.asked)):
            raise FileError(
                f"{self.path} holds runs of another model, training or cluster: name another file, or delete it"
            )
        return results

    def _save(self) -> None:
        """Replace the file as a whole."""
        text = json.dumps({"asked": self.asked, "runs": list(self.results.items())})
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            beside.write_text(text)
            beside.replace(self.path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise FileError(f"{self.path} cannot be written: {error.strerror}") from None


def _plan(profile: ModelProfile, cluster: Cluster, training: Training, edges: Edges) -> Plan:
    stages = enumerate(intervals(edges))
    return Plan(
        profile=profile,
        cluster=cluster,
        training=training,
        stages=tuple(Stage(start=start, stop=stop, devices=(number,)) for number, (start, stop) in stages),
    )


def _alone(runs: _Runs, attempt: Callable[[Edges], bool], layer: int, profile: ModelProfile, cluster: Cluster) -> int:
    """Peak of a layer alone on a device."""
    peak = _measured(runs, attempt, (layer, layer + 1), profile, cluster)
    if peak is None:
        raise InfeasibleError(_too_large(runs, profile, cluster, f"layer {profile.layers[layer]} alone"))
    return peak


def _added(runs: _Runs, attempt: Callable[[Edges], bool], layer: int, profile: ModelProfile, cluster: Cluster) -> int:
    """What a layer adds to those before it: as many of them as were run with it and without."""
    for first in range(layer):
        without, together = runs.peak((first, layer)), runs.peak((first, layer + 1))
        if without is not None and together is not None:
            return together - without
    first = 0
    while first < layer:
        together = _measured(runs, attempt, (first, layer + 1), profile, cluster)
        without = None if together is None else _measured(runs, attempt, (first, layer), profile, cluster)
        if together is not None and without is not None:
            return together - without
        first = (first + layer + 1) // 2
    pair = f"layers {profile.layers[layer - 1]} and {profile.layers[layer]}"
    raise InfeasibleError(_too_large(runs, profile, cluster, f"{pair} together"))


def _measured(
    runs: _Runs, attempt: Callable[[Edges], bool], interval: Interval, profile: ModelProfile, cluster: Cluster
) -> int | None:
    """The peak of these layers on a device, from a run of their own where there is none; None where it does not fit."""
    if runs.peak(interval) is None:
        attempt(around(*interval, len(profile.layers), len(cluster.devices)))
    return runs.peak(interval)


def _too_large(runs: _Runs, profile: ModelProfile, cluster: Cluster, what: str) -> str:
    return (
        f"{profile.model} cannot be profiled on {cluster.name}: in no run did {what} fit, with the other layers spread "
        f"over the other devices of {format_bytes(max(cluster.budgets))}; profile with smaller microbatches, on more "
        f"devices, or on larger ones{runs.reason}"
    )
