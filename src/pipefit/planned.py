"""Plans of tasks: what planning has to know of a model is found out on the way.

    plan = pipefit.plan(task, pipefit.Cluster.preset("dgx1-v100"), batch_size=64)

A profile is planned without torch. For a task, profiles are made for the microbatch sizes that planning looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypedDict, Unpack

from pipefit.cluster import Cluster
from pipefit.errors import UsageError
from pipefit.planner import ELSEWHERE, ON_RUNS, Asked, Means
from pipefit.planner import plan as plan_of_profile
from pipefit.plans import Plan
from pipefit.profiles import ModelProfile, Target
from pipefit.training import Training
from pipefit.validation import check_arguments, check_names, instance

if TYPE_CHECKING:
    from pipefit.allocator import AllocatorSettings
    from pipefit.capture import Task
    from pipefit.profiler import Progress


class _Own(TypedDict):
    """Arguments that concern tasks alone."""

    target: Target | None
    certify: bool
    progress: Callable[..., object] | None


def plan(
    model: Task | ModelProfile,
    cluster: Cluster | str,
    training: Training | None = None,
    *,
    target: Target | None = None,
    certify: bool = True,
    allocator: AllocatorSettings | None = None,
    progress: Progress | None = None,
    **asked: Unpack[Asked],
) -> Plan:
    """Choose how a model is trained on a cluster so that it fits: see `pipefit.planner.plan`, which has the arguments.

    `model` is a task, or a profile of one; `cluster` may be a name or a file, as `load_cluster` takes them. `target`
    says whose kernels a task will run; the cluster's unless given. The plan of a task is held against a dry run
    (`pipefit.fitting.reserving`), unless `certify` is False or what does not fit is allowed: for GPUs against what
    processes reserve under the settings of torch's `allocator`, for other devices if it moves or recomputes anything.
    What the dry run refuses is planned again. `progress` hears of layers as they are profiled.

    Raises:
        UsageError: an unknown name, numbers that do not go together, or a microbatch size that was not profiled.
        InfeasibleError: no plan fits; says by how much and what would.
    """
    if isinstance(cluster, str):
        from pipefit.files import load_cluster

        cluster = load_cluster(cluster)
    instance("cluster", cluster, Cluster, 'a name such as "4x-titan-rtx" will do')
    if training is not None:
        instance("training", training, Training, "or say batch_size and microbatches by name")
    check_names("plan", asked, Asked, ELSEWHERE)
    check_arguments(Asked, asked)
    check_arguments(_Own, {"target": target, "certify": certify, "progress": progress})
    if isinstance(model, ModelProfile):
        return plan_of_profile(model, cluster, training, **asked)
    from pipefit.capture import Task
    from pipefit.fake.apart import apart

    instance("model", model, Task, "or a ModelProfile; pipefit.Task says how a module is trained")
    kernels: Target = target or cluster.target
    return apart(kernels, lambda: _plan_of_task(model, cluster, training, kernels, certify, allocator, progress, asked))


def _plan_of_task(
    model: Task,
    cluster: Cluster,
    training: Training | None,
    kernels: Target,
    certify: bool,
    allocator: AllocatorSettings | None,
    progress: Progress | None,
    asked: Asked,
) -> Plan:
    """The plan of a task, whose profiles are made on the way."""
    _check(model, asked)
    from pipefit.fitting.on_the_way import Proposal, in_order, plan_on_the_way, sizes_asked
    from pipefit.profiler.on_demand import OnDemand

    sizes = sizes_asked(training, asked)
    ahead = in_order(sizes, training, asked, len(cluster.devices))
    known = OnDemand(model, target=kernels, progress=progress, sizes=sizes, ahead=ahead)

    for_gpus = kernels == cluster.backend == "cuda"
    runs_dry = certify and not asked.get("allow_infeasible") and (for_gpus or cluster.backend != "cuda")

    def make(within: Cluster, **other: Unpack[Asked]) -> Proposal:
        shards, along = (asked.get("tensor") or 1,), bool(asked.get("sequences"))
        ask: Asked = {**asked, **other}
        forks = runs_dry and for_gpus
        return plan_on_the_way(known, within, training, shards=shards, along=along, runs_dry=forks, **ask)

    if not runs_dry:
        return make(cluster).settled()
    from pipefit.fitting.reserving import plan_reserving

    means = asked.get("means", Means())
    fewer = [replace(means, spill=False), replace(means, spill=False, state=False)]
    fewer.append(replace(fewer[-1], host=False, peers=False))
    tried = [partial(make, means=one) for one in dict.fromkeys(fewer) if one != means]
    return plan_reserving(model, cluster, make, allocator, known.chains, progress, target=kernels, fewer=tried)


def _check(model: Task, asked: Asked) -> None:
    """Check, before a profile is made, what is known of a task besides.

    Raises:
        UsageError: it cannot be planned as asked.
    """
    if asked.get("sequences") and asked.get("tensor") is None:
        raise UsageError(
            "a model is profiled with sequence parallelism for as many shards as are asked for: say how many, as by "
            "--tensor 2 --sequences (tensor=2, sequences=True)"
        )
    if asked.get("planner") in ON_RUNS:
        raise UsageError(
            f"the {asked['planner']} planner takes what training runs measured: profile the model with --runs "
            "incremental or --runs trimmed, and plan that profile, or use the exact planner, which needs no runs"
        )
    Training(  # of one sample: schedule, precision, clipping and versions do or do not go together
        batch_size=1,
        microbatches=1,
        schedule=asked.get("schedule") or "1f1b",
        precision=model.precision or "float32",
        clip_norm=asked.get("clip_norm"),
        versions=asked.get("versions", "weights"),
    )
