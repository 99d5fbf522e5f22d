"""Every partitioner of the comparisons, by name: ours, those of the papers, torchgpipe's own run for real, the usual.

Not a benchmark itself. `splitters` gives the edges of each for a setting; `plan_at` makes a plan of edges.

Like is compared with like: `never`, `except_last` and `always` are torchgpipe's settings of recomputation, with
`except_last` its default, and all partitioners are compared under its schedule, `torchgpipe`: backwards from the last
microbatch to the first. `except_one` is ours, under `gpipe`: backwards from the first microbatch, which is kept, on.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, pstdev
from typing import NamedTuple

from pipefit.capture import Task
from pipefit.lowering.passes.recomputation import Recompute, recompute_decisions
from pipefit.planner import best_split, plan
from pipefit.planner.baselines.simple import lightest_parts
from pipefit.profiler.training_runs.profilers import profile_incrementally
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import AdditiveCosts, ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from torchgpipe_balance import torchgpipe_split, torchgpipe_times

Edges = tuple[int, ...]  # stage s holds layers edges[s] to edges[s + 1] - 1

SCHEDULES: dict[Recompute, str] = {
    "never": "torchgpipe",
    "except_last": "torchgpipe",
    "always": "torchgpipe",
    "except_one": "gpipe",
}

OURS, TORCHGPIPE = "exact", "torchgpipe"
PLANNERS = (OURS, "uniform", "parameters", "time", "first_last", "bisection")  # by their names in pipefit
ADDITIVE, SOLVED = "additive", "exact on torchgpipe's times"
BAYESIAN = "bayesian"
PREDICTING = (OURS, "bisection", BAYESIAN, ADDITIVE)  # peaks; all others are baselines


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is to be split, and of which microbatches every stage recomputes."""

    task: Task
    profile: ModelProfile
    cluster: Cluster
    training: Training
    recompute: Recompute

    @property
    def devices(self) -> int:
        """Number of stages wanted."""
        return len(self.cluster.devices)


Splitter = Callable[[Setting], Edges]


class Outcome(NamedTuple):
    """What the simulator says of a split, to the byte."""

    peak_bytes: tuple[int, ...]
    step_seconds: float

    @property
    def highest_bytes(self) -> int:
        """The fullest device."""
        return max(self.peak_bytes)

    @property
    def deviation_bytes(self) -> float:
        """Standard deviation over the devices."""
        return pstdev(self.peak_bytes)


def plan_at(setting: Setting, edges: Edges) -> Plan:
    """A plan of the stages between `edges`, stage s on device s, whether or not it fits."""
    training = setting.training
    stages = tuple(
        Stage(start=start, stop=stop, grid=Grid.of(number))
        for number, (start, stop) in enumerate(itertools.pairwise(edges))
    )
    return Plan(
        profile=setting.profile,
        cluster=setting.cluster,
        training=training,
        stages=stages,
        decisions=recompute_decisions(
            stages, setting.profile.edges, setting.recompute, training.schedule, training.microbatches
        ),
    )


def lengths(edges: Edges) -> tuple[int, ...]:
    """Layers of every stage."""
    return tuple(stop - start for start, stop in itertools.pairwise(edges))


def outcome(setting: Setting, edges: Edges) -> Outcome:
    """Peaks and the second step's time of a split, simulated."""
    simulation = Simulation(plan_at(setting, edges), steps=2)
    return Outcome(simulation.peak_bytes, simulation.step_seconds[-1])


def planned(setting: Setting, planner: str) -> Edges:
    """The split of one of pipefit's planners, whether or not it fits."""
    made = plan(
        setting.profile,
        setting.cluster,
        setting.training,
        recompute=setting.recompute,
        planner=planner,
        allow_infeasible=True,
    )
    return (0, *made.boundaries, len(setting.profile.layers))


def simulated_additive_costs(setting: Setting) -> AdditiveCosts:
    """mCAP's two numbers for every layer, from its incremental runs, each simulated: peaks are those of real runs."""
    with tempfile.TemporaryDirectory() as folder:
        return profile_incrementally(
            setting.task,
            setting.profile,
            setting.cluster,
            setting.training,
            recompute=setting.recompute,
            store=Path(folder) / "runs.json",
            run=lambda made: Simulation(made, steps=2).peak_bytes[: len(made.stages)],
        )


def additive_split(setting: Setting, costs: AdditiveCosts) -> Edges:
    """mCAP's own choice: the best of all splits by its additive predictor."""
    return best_split(costs, len(setting.profile.layers), setting.devices)


class TorchgpipeSplits(NamedTuple):
    """torchgpipe's balance by time, and what an exact solver makes of the very times that it measured."""

    own: Edges
    solved_exactly: Edges


def torchgpipe_splits(task: Task, *, samples: int, devices: int, seconds: float = 1.0) -> TorchgpipeSplits:
    """torchgpipe run for real on this machine's CPU, on `samples` samples, for about so many seconds at least."""
    return splits_of_times(torchgpipe_times(task, samples=samples, seconds=seconds), devices)


def splits_of_times(times: list[int], devices: int) -> TorchgpipeSplits:
    """Both splits of the times of all layers."""
    _, exact = lightest_parts(times, devices)
    return TorchgpipeSplits((0, *itertools.accumulate(torchgpipe_split(times, devices))), tuple(exact))


def median_splits(measured: Iterable[list[int]], devices: int) -> TorchgpipeSplits:
    """Both splits of the medians of each layer's times in several measurings."""
    return splits_of_times([round(median(times)) for times in zip(*measured, strict=True)], devices)


def splitters(torchgpipe: Callable[[Setting], TorchgpipeSplits]) -> dict[str, Splitter]:
    """Every partitioner by name, ours first, but for the Bayesian, which takes a minute a split. `torchgpipe` measures
    the layers of a setting, or has done so.
    """
    return {
        **{name: partial(planned, planner=name) for name in PLANNERS},
        ADDITIVE: lambda setting: additive_split(setting, simulated_additive_costs(setting)),
        TORCHGPIPE: lambda setting: torchgpipe(setting).own,
        SOLVED: lambda setting: torchgpipe(setting).solved_exactly,
    }
