"""Planning: from a profile, a cluster and a training to a plan.

A planner is a callable `Question -> PlannerResult`, registered in `PLANNERS`. One driver runs it, times it
and makes the plan (`planner.driver`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple, Unpack

from pipefit.errors import InfeasibleError, UsageError
from pipefit.planner.arrangements import Trials, alternatives
from pipefit.planner.baselines.alpa import alpa
from pipefit.planner.baselines.bisection import bisection
from pipefit.planner.baselines.capture import capture
from pipefit.planner.baselines.mcap import additive, bayesian, mcap_bf, mcap_bo
from pipefit.planner.baselines.mpress import mpress
from pipefit.planner.baselines.simple import exhaustive, first_last, parameters, time, uniform
from pipefit.planner.driver import answer, solved
from pipefit.planner.exact import exact, leanest_of
from pipefit.planner.joint import joint
from pipefit.planner.lean import lean, leanest_with_hosts
from pipefit.planner.open_choices import Arrangement, Profiles, Space, Trial, space_of
from pipefit.planner.options import Goal, PlanArguments, PlanOptions
from pipefit.planner.problem import (
    CHOOSE_SIZES,
    ON_GRIDS,
    Degree,
    Planner,
    PlannerResult,
    Question,
)
from pipefit.planner.replicas import in_replicas
from pipefit.processes import uncollected
from pipefit.schema.cluster import Cluster
from pipefit.schema.plan import Alternative, Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.schema.validation import instance
from pipefit.texts import unknown

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

ON_RUNS = "additive", "mcap_bf", "mcap_bo"  # planners that need measurements of training runs
FOR_SPEED = "joint", "mpress", "alpa", "time"  # planners that minimise the seconds of a step

PLANNER_FOR: dict[str, str] = {"throughput": "joint", "peak": "exact"}


def plan(
    profile: ModelProfile | Profiles,
    cluster: Cluster,
    training: Training | None = None,
    **options: Unpack[PlanArguments],
) -> Plan:
    """Choose the devices of every layer, and what to recompute or offload, so that the model fits.

    `options` are the fields of `PlanOptions`. Describe the training either by `training` or by the options.
    The `joint` planner chooses microbatches, `schedule` and `stages` if they are not given
    (`planner.arrangements`), among the microbatch sizes of the profile, or among all sizes if `profile` is a
    function from a size to a profile.

    `joint`, `exact` and `lean` also choose the microbatch size and, for each stage, the number of replicas
    and their sharding, if the profile has the sizes of the local batches. They choose `sequences` if the
    profile has both.

    Without `batch_size`, and under other planners, microbatches have the first profiled size, the schedule is
    1f1b, and stages use all devices. Without `batch_size` and `microbatches`, a step has four microbatches
    for each device.

    Raises:
        UsageError: an unknown name, inconsistent numbers, or a microbatch size that was not profiled.
        InfeasibleError: the plan does not fit; the message says by how many bytes, and which changes would
            fit.
    """
    return answered(profile, cluster, training, PlanOptions.named(options)).complete()


class Answer(NamedTuple):
    """A plan without its alternatives, and a function that finds them."""

    plan: Plan
    others: Callable[[], tuple[Alternative, ...]] = tuple

    def complete(self) -> Plan:
        """Return the plan with its alternatives."""
        return replace(self.plan, alternatives=self.others())


def answered(
    profile: ModelProfile | Profiles,
    cluster: Cluster,
    training: Training | None = None,
    options: PlanOptions = PlanOptions(),
    *,
    redone: bool = False,
    near: Plan | None = None,
) -> Answer:
    """Return the plan of `plan`, and a function that finds its alternatives later; `redone` as in `space_of`.

    `near` is the plan of the same call for devices with more memory, whose bound holds too. Then only its
    schedule, number of stages and microbatch size are searched, if that finds a plan about as fast.

    Raises:
        UsageError: an unknown name, inconsistent numbers, or a microbatch size that was not profiled.
        InfeasibleError: the plan does not fit; the message says by how many bytes, and which changes would
            fit.
    """
    instance("cluster", cluster, Cluster, 'such as pipefit.load_cluster("4x-titan-rtx")')
    if not callable(profile):
        instance("profile", profile, ModelProfile, "create one with pipefit.profile")
    if training is not None:
        instance("training", training, Training, "or pass batch_size and microbatches by name")
    planner = options.planner or PLANNER_FOR[options.objective]
    check_planner(planner, options.objective)
    if training is not None and options.describes_training:
        raise UsageError(
            "give either training, or batch_size, microbatches, microbatch_size, schedule, clip_norm and "
            "versions, not both"
        )
    space = space_of(profile, cluster, training, replace(options, planner=planner), redone=redone)
    if planner in CHOOSE_SIZES:
        return _chosen(space, near) if planner == "joint" else Answer(_leanest(space, planner))
    asked = PLANNERS[planner] if planner in ON_GRIDS else in_replicas(PLANNERS[planner])
    return Answer(solved(space.question, asked, name=planner))


def check_planner(name: str, objective: Goal = "throughput") -> None:
    """Check that a planner of this name exists and serves the objective.

    Raises:
        UsageError: the name is unknown (the message lists the known ones), or the planner minimises seconds
            while the objective is the lowest peak.
    """
    if name not in PLANNERS:
        raise UsageError(unknown(f"unknown planner {name!r}", name, PLANNERS))
    if objective == "peak" and name in FOR_SPEED:
        raise UsageError(
            f"the {name} planner minimises step time, not the peak: omit the planner for the objective peak "
            "(exact is then used), or omit the objective"
        )


def plan_again(old: Plan, cluster: Cluster) -> Plan:
    """Plan the training of `old` on another cluster, for instance after the loss of a device.

    Returns `old` itself for its own cluster. Otherwise the planner of `old` plans again, or `joint` if that
    planner is unknown. The batch, its microbatches and the numbers of training stay. Stages keep the
    data-parallel and tensor-parallel degrees that `old` was requested with, and the number of stages is at
    most the requested one. If the devices are too few or no plan fits, the data degree is left open, and
    after that the tensor degree too. The requested `shard` applies if the cluster has more than one device.

    Raises:
        UsageError: the planner does not support this cluster.
        InfeasibleError: the training does not fit the cluster; the message says by how many bytes, and which
            changes would fit.
    """
    instance("old", old, Plan, "pipefit.load reads one")
    instance("cluster", cluster, Cluster, 'such as pipefit.load_cluster("4x-titan-rtx")')
    if cluster == old.cluster:
        return old
    provenance = old.provenance
    planner = provenance.planner if provenance and provenance.planner in PLANNERS else "joint"
    asked = replace(PlanOptions.of_record(provenance.options if provenance else {}), planner=planner)
    if len(cluster.devices) == 1:
        asked = replace(asked, shard=None)

    def again(options: PlanOptions) -> Plan:
        return answered(old.profile, cluster, old.training, options, redone=old.is_sliced).complete()

    *ways, last = _degrees(asked, len(cluster.devices))
    for way in ways:
        with suppress(UsageError, InfeasibleError):
            return again(way)
    return again(last)


def _degrees(asked: PlanOptions, devices: int) -> list[PlanOptions]:
    """Return the options with stages limited to `devices`, and two looser alternatives."""
    ways = list[PlanOptions]()
    for way in (
        asked,
        replace(asked, data=None),
        replace(asked, data=None, tensor=None, sequences=None),
    ):
        room = devices // Degree.requested(way).devices
        limited = replace(way, stages=way.stages and min(way.stages, room))
        if room and limited not in ways:
            ways.append(limited)
    return ways


def _leanest(space: Space, planner: str) -> Plan:
    """Return the plan with the lowest peak over all microbatch sizes of a space.

    Large sizes can have the lowest peak: replicas divide them, and fewer microbatches need fewer sums of
    gradients.

    Raises:
        InfeasibleError: the plan does not fit.
    """
    began, asked = perf_counter(), list[Question]()
    for size in space.sizes:
        with suppress(UsageError):
            asked.append(space.question_of(size, space.profiles(size)))
    question, best = (leanest_of if planner == "exact" else leanest_with_hosts)(asked or [space.question])
    seconds = perf_counter() - began
    return answer(
        question, best, planner=PLANNERS[planner], name=planner, seconds=seconds, asked=question.options
    )


_NEAR = "Only plans with the schedule, microbatches and number of stages of the plan before were searched."
_SLOWER = 1.03  # multiple of the known plan's seconds above which everything is searched


def _chosen(space: Space, near: Plan | None) -> Answer:
    """Return the fastest plan of a space, or one that is like `near` and about as fast.

    Raises:
        InfeasibleError: no plan fits.
    """
    began = perf_counter()
    with uncollected():
        trials, best, question, result = _like(space, near) or _searched(Trials(space))
        made = answer(
            question,
            result,
            planner=in_replicas(joint),
            name="joint",
            seconds=perf_counter() - began,
            asked=space.question.options,
        )

    @uncollected()
    def others() -> tuple[Alternative, ...]:
        trials.space = space
        return alternatives(trials, best) if best is not None and space.count > 1 else ()

    return Answer(made, others)


class _Search(NamedTuple):
    """Examined arrangements, the best of them if it was searched, and the best plan of all."""

    trials: Trials
    best: Trial | None
    question: Question
    result: PlannerResult


def _searched(trials: Trials, first: Arrangement | None = None) -> _Search:
    """Return the result of a search; of one that begins with the arrangement `first`."""
    best = trials.best(first)
    return _Search(trials, best, *trials.told(best))


def _like(space: Space, near: Plan | None) -> _Search | None:
    """Return the search for plans like `near`; None if there is no such plan, or none about as fast."""
    if near is None or near.prediction is None or near.provenance is None:
        return None
    how, degrees = near.training, {Degree.of(stage.grid) for stage in near.stages}
    own = how.schedule, len(near.stages), how.microbatch_size
    with suppress(UsageError):
        found = _searched(
            Trials(space.like(near)), Arrangement(*own, *degrees) if len(degrees) == 1 else None
        )
        if found.result.value <= near.prediction.step_seconds * _SLOWER:
            remarks = *found.result.remarks, _NEAR
            return found._replace(result=found.result._replace(bound=near.provenance.bound, remarks=remarks))
    return None
