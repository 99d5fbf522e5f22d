"""Plans of tasks: profiles are made on the way, for the microbatch sizes and shards that planning looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from pipefit.cluster import Cluster
from pipefit.errors import InfeasibleError
from pipefit.fit.attempts import attempt
from pipefit.planner import Asked
from pipefit.planner import plan as plan_of_profile
from pipefit.planner.spaces import sizes_of
from pipefit.plans import Plan
from pipefit.profiler.on_demand import OnDemand
from pipefit.profiles import ModelProfile
from pipefit.training import Training


def sizes_asked(training: Training | None, asked: Asked) -> tuple[int, ...]:
    """The microbatch sizes that may be asked for, slices of them included."""
    batch, size, count = asked.get("batch_size"), asked.get("microbatch_size"), asked.get("microbatches")
    if training is not None:
        size = training.microbatch_size
    elif size is None:
        size = batch // count if batch and count else batch
    return sizes_of(size) if isinstance(size, int) and size > 0 else (1,)


def plan_on_the_way(
    known: OnDemand,
    cluster: Cluster,
    training: Training | None = None,
    *,
    shards: Sequence[int] = (),
    **asked: Unpack[Asked],
) -> Plan:
    """A plan whose profiles, as far as it has them, are those of traces; layers may be divided between `shards` ranks.

    Other arguments are those of `pipefit.planner.plan`.

    Raises:
        InfeasibleError: no plan fits, by such profiles.
    """

    def profiles(size: int) -> ModelProfile:
        return known(size, shards)

    try:
        made = plan_of_profile(profiles, cluster, training, **asked)
    except InfeasibleError:
        if known.as_traced():
            raise
    else:
        used = (made.measured(stage).microbatch_size for stage in range(len(made.stages)))
        if known.as_traced(used if attempt(0, made).fits else None):
            return made
    return plan_of_profile(profiles, cluster, training, **asked)
