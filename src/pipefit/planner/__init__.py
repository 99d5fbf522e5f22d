"""Planners: from a profile, a cluster and a training to a plan. `plan` is the one to call.

A planner is a callable, `Question -> Found`; a new one is one new file and one line here. One driver runs it, times it
and makes the plan (`planner.driver`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import Literal, NamedTuple, TypedDict, Unpack, cast

from pipefit.errors import InfeasibleError, UsageError
from pipefit.lowering.passes.recomputation import Recompute
from pipefit.planner.arrangements import Trials, alternatives
from pipefit.planner.baselines.alpa import alpa
from pipefit.planner.baselines.bisection import bisection
from pipefit.planner.baselines.capture import capture
from pipefit.planner.baselines.exhaustive import exhaustive
from pipefit.planner.baselines.mcap import additive, bayesian, mcap_bf, mcap_bo
from pipefit.planner.baselines.mpress import mpress
from pipefit.planner.baselines.prediction import best_split, true_peaks
from pipefit.planner.baselines.simple import first_last, parameters, time, uniform
from pipefit.planner.driver import answer, plan_of, solved
from pipefit.planner.exact import exact, leanest_of
from pipefit.planner.joint import joint
from pipefit.planner.lean import lean, leanest_with_hosts
from pipefit.planner.open_choices import Numbers, Open, Profiles, Space, space_of
from pipefit.planner.problem import ON_GRIDS, Found, Means, Options, Planner, Question
from pipefit.planner.replicas import in_replicas
from pipefit.processes import uncollected
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Sharding
from pipefit.schema.plan import Alternative, Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training, Versions
from pipefit.schema.validation import check_arguments, check_names, instance
from pipefit.texts import unknown

__all__ = [
    "ON_GRIDS",
    "ON_RUNS",
    "PLANNERS",
    "Asked",
    "Found",
    "Means",
    "Options",
    "Planner",
    "Profiles",
    "Question",
    "additive",
    "alpa",
    "bayesian",
    "best_split",
    "bisection",
    "capture",
    "check_planner",
    "exact",
    "exhaustive",
    "first_last",
    "joint",
    "lean",
    "mcap_bf",
    "mcap_bo",
    "mpress",
    "parameters",
    "plan",
    "plan_again",
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
    "lean": lean,
    "bisection": bisection,
    "bayesian": bayesian,
    "uniform": uniform,
    "parameters": parameters,
    "time": time,
    "first_last": first_last,
    "capture": capture,
    "alpa": alpa,
    "additive": additive,
    "mcap_bf": mcap_bf,
    "mcap_bo": mcap_bo,
}

ON_RUNS = "additive", "mcap_bf", "mcap_bo"  # planners that take what training runs measured
FOR_SPEED = "joint", "mpress", "alpa", "time"  # planners that look for the fewest seconds

Goal = Literal["throughput", "peak"]


class Asked(TypedDict, total=False):
    """The arguments of `plan` that may be left out."""

    batch_size: int | None
    microbatches: int | None
    microbatch_size: int | None
    schedule: str | None
    recompute: Recompute
    clip_norm: float | None
    versions: Versions
    objective: Goal
    planner: str | None
    stages: int | None
    data: int | None
    tensor: int | None
    sequences: bool | None
    shard: Sharding | None
    effort: float
    allow_infeasible: bool
    means: Means


ELSEWHERE = {"precision": "it belongs to the task, pipefit.Task(module, ..., precision=...), or to a Training"} | {
    name: f"it belongs to the task, pipefit.Task(module, ..., {name}=...)"
    for name in ("batch", "loss", "optimizer", "groups", "scheduler", "granularity")
}
PLANNER_FOR: dict[str, str] = {"throughput": "joint", "peak": "exact"}


def plan(
    profile: ModelProfile | Profiles, cluster: Cluster, training: Training | None = None, **asked: Unpack[Asked]
) -> Plan:
    """Choose which layers go on which device, and what is recomputed or moved away, so that the model fits.

    The objective is the fastest step that fits (`throughput`), or the lowest `peak` of all plans.
    Say how the model is trained either by `training`, or by `batch_size` samples in `microbatches` equal parts or in
    microbatches of `microbatch_size`, `schedule`, `clip_norm`, the norm to which gradients are clipped, and `versions`,
    as in `Training`. What is left out of microbatches, `schedule` and `stages` the `joint` planner chooses
    (`planner.arrangements`), among the microbatch sizes of the profile, or any where `profile` is a function that makes
    one for a size. `joint`, `exact` and `lean` also choose how many replicas each stage has and what these divide, as
    far as the profile has the sizes of the slices that they compute, and the size of microbatches; `data` and `tensor`
    are the degrees of all stages, `sequences` says whether all shards divide positions too (chosen where the profile
    has both), and `shard` is what the replicas of each divide, if it has several. Without
    `batch_size`, and under other planners, microbatches have the first size that was profiled, the schedule is 1f1b,
    and there are stages on all devices. Without `batch_size` and `microbatches`, there are four microbatches for each
    device. `planner` is a name in `PLANNERS`, instead of the one for the objective; `stages`, `recompute`, `effort` and
    `allow_infeasible` are explained in `Options`. `means` are what `joint` and `mpress` may do to free memory.

    Raises:
        UsageError: an unknown name, numbers that do not go together, or a microbatch size that was not profiled.
        InfeasibleError: the plan does not fit; says by how much and what would.
    """
    check_names("plan", asked, Asked, ELSEWHERE)
    check_arguments(Asked, asked)
    return answered(profile, cluster, training, **asked).complete()


class Answer(NamedTuple):
    """A plan, and what looks for its alternatives, which it has not."""

    plan: Plan
    others: Callable[[], tuple[Alternative, ...]] = tuple

    def complete(self) -> Plan:
        """The plan with its alternatives."""
        return replace(self.plan, alternatives=self.others())


def answered(
    profile: ModelProfile | Profiles,
    cluster: Cluster,
    training: Training | None = None,
    *,
    batch_size: int | None = None,
    microbatches: int | None = None,
    microbatch_size: int | None = None,
    schedule: str | None = None,
    recompute: Recompute = "never",
    clip_norm: float | None = None,
    versions: Versions = "weights",
    objective: Goal = "throughput",
    planner: str | None = None,
    stages: int | None = None,
    data: int | None = None,
    tensor: int | None = None,
    sequences: bool | None = None,
    shard: Sharding | None = None,
    effort: float = 1.0,
    allow_infeasible: bool = False,
    means: Means = Means(),
    redone: bool = False,
) -> Answer:
    """The plan of `plan`, whose alternatives may be looked for meanwhile; `redone` as in `space_of`.

    Raises:
        UsageError: an unknown name, numbers that do not go together, or a microbatch size that was not profiled.
        InfeasibleError: the plan does not fit; says by how much and what would.
    """
    instance("cluster", cluster, Cluster, 'such as pipefit.load_cluster("4x-titan-rtx")')
    if not callable(profile):
        instance("profile", profile, ModelProfile, "pipefit.profile makes one of a task")
    if training is not None:
        instance("training", training, Training, "or say batch_size and microbatches by name")
    planner = PLANNER_FOR[objective] if planner is None else planner
    check_planner(planner, objective)
    numbers = Numbers(
        batch_size=batch_size,
        microbatches=microbatches,
        microbatch_size=microbatch_size,
        schedule=schedule,
        clip_norm=clip_norm,
        versions=versions,
    )
    if training is not None and numbers != Numbers():
        raise UsageError(
            "say how the model is trained either with training or with batch_size, microbatches, microbatch_size, "
            "schedule, clip_norm and versions, not both"
        )
    options = Options(
        stages=stages,
        data=data,
        tensor=tensor,
        sequences=sequences,
        shard=shard,
        recompute=recompute,
        effort=effort,
        allow_infeasible=allow_infeasible,
    )
    chooses = planner == "joint"
    may = Open(sizes=planner in ("joint", "exact", "lean"), arrangements=chooses, degrees=planner in ON_GRIDS)
    space = space_of(profile, cluster, numbers if training is None else training, options, may, means, redone=redone)
    if may.sizes:
        return _chosen(space) if chooses else Answer(_leanest(space, planner))
    asked = PLANNERS[planner] if may.degrees else in_replicas(PLANNERS[planner])
    return Answer(solved(space.question, asked, name=planner))


def check_planner(name: str, objective: Goal = "throughput") -> None:
    """Check that there is a planner of this name, which does not look for something else than what is asked for.

    Raises:
        UsageError: there is none, with those that there are; or it looks for speed, and the lowest peak is wanted.
    """
    if name not in PLANNERS:
        raise UsageError(unknown(f"there is no planner {name!r}", name, PLANNERS))
    if objective == "peak" and name in FOR_SPEED:
        raise UsageError(
            f"the {name} planner looks for the fastest step, not for the lowest peak: leave it out for the objective "
            "peak (then exact is used), or leave out the objective"
        )


def plan_again(old: Plan, cluster: Cluster) -> Plan:
    """The plan for the same training on another cluster, as when a device is gone; `old` itself on its own cluster.

    It is found by the planner of `old`, and by `joint` where that is not known. The batch and its microbatches stay,
    and so do the numbers. Stages have as many replicas and shards as `old` was asked for, and there are no more of
    them, as far as there are devices for them all; else without those replicas, and at last without those shards.
    Replicas divide what they were asked to divide, if there are devices for any.

    Raises:
        UsageError: the planner cannot answer for this cluster.
        InfeasibleError: the training does not fit there; says by how much and what would.
    """
    instance("old", old, Plan, "pipefit.load reads one")
    instance("cluster", cluster, Cluster, 'such as pipefit.load_cluster("4x-titan-rtx")')
    if cluster == old.cluster:
        return old
    made = old.provenance
    asked = made.options if made else {}

    def again(stages: int | None, data: int | None, tensor: int | None) -> Plan:
        return answered(
            old.profile,
            cluster,
            old.training,
            recompute=cast("Recompute", asked.get("recompute", "never")),  # of a file: checked where options are made
            planner=made.planner if made and made.planner in PLANNERS else "joint",
            shard=cast("Sharding | None", asked.get("shard")) if len(cluster.devices) > 1 else None,
            stages=stages,
            data=data,
            tensor=tensor,
            sequences=cast("bool | None", asked.get("sequences")) if tensor else None,
            redone=old.is_sliced,
        ).complete()

    *ways, last = _degrees(asked, len(cluster.devices))
    for way in ways:
        with suppress(UsageError, InfeasibleError):
            return again(*way)
    return again(*last)


def _degrees(asked: Mapping[str, object], devices: int) -> list[tuple[int | None, int | None, int | None]]:
    """Stages, replicas and shards that a plan was asked for, for so many devices, and with less and less of that."""
    stages, data, shards = (
        found if isinstance(found, int) else None for found in map(asked.get, ("stages", "data", "tensor"))
    )
    ways: list[tuple[int | None, int | None, int | None]] = []
    for replicas, ranks in ((data, shards), (None, shards), (None, None)):
        room = devices // ((replicas or 1) * (ranks or 1))
        way = stages and min(stages, room), replicas, ranks
        if room and way not in ways:
            ways.append(way)
    return ways


def _leanest(space: Space, planner: str) -> Plan:
    """The plan with the lowest peak of all microbatch sizes of a space.

    Large ones may have it: where replicas divide them, and where few of them leave fewer gradients to add up.

    Raises:
        InfeasibleError: it does not fit.
    """
    began, asked = perf_counter(), list[Question]()
    for size in space.sizes:
        with suppress(UsageError):
            asked.append(space.question_of(size, space.profiles(size)))
    question, best = (leanest_of if planner == "exact" else leanest_with_hosts)(asked or [space.question])
    seconds = perf_counter() - began
    return answer(question, best, planner=PLANNERS[planner], name=planner, seconds=seconds, asked=question.options)


def _chosen(space: Space) -> Answer:
    """The fastest plan of a space.

    Raises:
        InfeasibleError: none fits.
    """
    began = perf_counter()
    with uncollected():
        trials = Trials(space)
        best = trials.best()
        question, found = trials.told(best)
        made = answer(
            question,
            found,
            planner=in_replicas(joint),
            name="joint",
            seconds=perf_counter() - began,
            asked=space.question.options,
        )

    @uncollected()
    def others() -> tuple[Alternative, ...]:
        return alternatives(trials, best) if best is not None and space.count > 1 else ()

    return Answer(made, others)
