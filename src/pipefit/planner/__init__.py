"""Planners: from a profile, a cluster and a training to a plan. `plan` is the one to call.

A planner is a callable, `Question -> Found`; a new one is one new file and one line here. One driver runs it, times it
and makes the plan (`planner.driver`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pipefit.cluster import Cluster
from pipefit.errors import UsageError
from pipefit.planner.additive import additive
from pipefit.planner.bayesian import bayesian
from pipefit.planner.bisection import bisection
from pipefit.planner.driver import plan_of, solved
from pipefit.planner.exact import exact
from pipefit.planner.exhaustive import exhaustive
from pipefit.planner.first_last import first_last
from pipefit.planner.joint import joint
from pipefit.planner.mcap_bf import mcap_bf
from pipefit.planner.mcap_bo import mcap_bo
from pipefit.planner.mpress import mpress
from pipefit.planner.parameters import parameters
from pipefit.planner.prediction import best_split, true_peaks
from pipefit.planner.question import Found, Options, Planner, Question
from pipefit.planner.techniques import Means
from pipefit.planner.time import time
from pipefit.planner.uniform import uniform
from pipefit.plans import Plan
from pipefit.profiles import ModelProfile
from pipefit.schedule.whole_stages import Recompute
from pipefit.training import Training, Versions
from pipefit.validation import whole

__all__ = [
    "PLANNERS",
    "Found",
    "Means",
    "Options",
    "Planner",
    "Question",
    "additive",
    "bayesian",
    "best_split",
    "bisection",
    "exact",
    "exhaustive",
    "first_last",
    "joint",
    "mcap_bf",
    "mcap_bo",
    "mpress",
    "parameters",
    "plan",
    "plan_of",
    "solved",
    "time",
    "true_peaks",
    "uniform",
]

PLANNERS: dict[str, Planner] = {
    "joint": joint,
    "mpress": mpress,
    "exact": exact,
    "exhaustive": exhaustive,
    "bisection": bisection,
    "bayesian": bayesian,
    "uniform": uniform,
    "parameters": parameters,
    "time": time,
    "first_last": first_last,
    "additive": additive,
    "mcap_bf": mcap_bf,
    "mcap_bo": mcap_bo,
}

Goal = Literal["throughput", "peak"]
PLANNER_FOR: dict[str, str] = {"throughput": "joint", "peak": "exact"}


def plan(
    profile: ModelProfile,
    cluster: Cluster,
    training: Training | None = None,
    *,
    batch_size: int | None = None,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    recompute: Recompute = "never",
    clip_norm: float | None = None,
    versions: Versions = "weights",
    objective: Goal = "throughput",
    planner: str | None = None,
    stages: int | None = None,
    allow_infeasible: bool = False,
) -> Plan:
    """Choose which layers go on which device, and what is recomputed or moved away, so that the model fits.

    The objective is the fastest step that fits (`throughput`), or the lowest `peak` of all splits.
    Say how the model is trained either by `training`, or by `batch_size` samples in `microbatches` equal parts,
    `schedule`, `clip_norm`, the norm to which gradients are clipped, and `versions`, as in `Training`. Without
    `microbatches`, microbatches have the first size that was profiled. Without `batch_size` too, there are four
    microbatches for each device. `planner` is a name in `PLANNERS`, instead of the one for the objective; `stages`,
    `recompute` and `allow_infeasible` are explained in `Options`.

    Raises:
        UsageError: an unknown name, numbers that do not go together, or a microbatch size that was not profiled.
        InfeasibleError: the plan does not fit; says by how much and what would.
    """
    if objective not in PLANNER_FOR:
        raise UsageError(f"there is no objective {objective!r}; choose one of {', '.join(PLANNER_FOR)}")
    planner = PLANNER_FOR[objective] if planner is None else planner
    if planner not in PLANNERS:
        raise UsageError(f"there is no planner {planner!r}; choose one of {', '.join(PLANNERS)}")
    if training is None:
        training = replace(
            _training(profile, cluster, batch_size, microbatches, schedule=schedule, clip_norm=clip_norm),
            versions=versions,
        )
    elif (batch_size, microbatches, clip_norm, versions) != (None, None, None, "weights"):
        raise UsageError(
            "say how the model is trained either with training or with batch_size, microbatches, clip_norm and "
            "versions, not both"
        )
    options = Options(stages=stages, recompute=recompute, allow_infeasible=allow_infeasible)
    question = Question(profile=profile, cluster=cluster, training=training, options=options)
    return solved(question, PLANNERS[planner], name=planner)


def _training(
    profile: ModelProfile,
    cluster: Cluster,
    batch_size: int | None,
    microbatches: int | None,
    *,
    schedule: str,
    clip_norm: float | None,
) -> Training:
    """The training that numbers given one by one describe; missing ones get the defaults that `plan` explains."""
    size = profile.measurements[0].microbatch_size
    if batch_size is not None:
        whole("batch_size", batch_size, 1)
    if microbatches is None:
        microbatches = 4 * len(cluster.devices) if batch_size is None else max(1, batch_size // size)
    if batch_size is None:
        batch_size = microbatches * size
    precision = profile.assumptions.precision
    return Training(
        batch_size=batch_size,
        microbatches=microbatches,
        schedule=schedule,
        precision=precision,
        clip_norm=clip_norm,
    )
