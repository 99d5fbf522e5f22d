"""All plans for a small question, with simulated peaks: cuts, replicas, and sharding choices."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, combinations, pairwise, product

from pipefit.errors import UsageError
from pipefit.lowering.passes.recomputation import Recompute, recompute_decisions
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import SHARDINGS, Grid, Sharding, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Simulation

IN_BLOCKS = ("gradients", "parameters")  # planners shard a stage with a bucket for each block


def every_plan(
    profile: ModelProfile, cluster: Cluster, how: Training, recompute: Recompute = "never"
) -> Iterator[Plan]:
    """Yield all cuts, replicas of every stage, and sharding choices, on devices in order."""
    layers, most = len(profile.layers), len(cluster.devices)
    sizes = {one.microbatch_size for one in profile.measurements}
    degrees = [
        d for d in range(1, most + 1) if how.microbatch_size % d == 0 and how.microbatch_size // d in sizes
    ]
    stages = [(degree, shard) for degree in degrees for shard in SHARDINGS if degree > 1 or shard == "none"]
    for count in range(1, min(layers, most) + 1):
        for cuts, chosen in product(combinations(range(1, layers), count - 1), product(stages, repeat=count)):
            if sum(degree for degree, _ in chosen) <= most:
                yield _written(profile, cluster, how, (0, *cuts, layers), chosen, recompute)


def _written(
    profile: ModelProfile,
    cluster: Cluster,
    how: Training,
    edges: tuple[int, ...],
    chosen: tuple[tuple[int, Sharding], ...],
    recompute: Recompute,
) -> Plan:
    firsts = [0, *accumulate(degree for degree, _ in chosen)]
    stages = tuple(
        Stage(
            start=start,
            stop=stop,
            grid=Grid(
                devices=tuple(range(first, last)),
                data=degree,
                shard=shard,
                buckets=stop - start if shard in IN_BLOCKS else 1,
            ),
        )
        for (start, stop), (first, last), (degree, shard) in zip(
            pairwise(edges), pairwise(firsts), chosen, strict=True
        )
    )
    decisions = recompute_decisions(stages, profile.edges, recompute, how.schedule, how.microbatches)
    return Plan(profile=profile, cluster=cluster, training=how, stages=stages, decisions=decisions)


def simulated(plans: Iterator[Plan]) -> Iterator[Simulation]:
    """Return the plans that can run."""
    for one in plans:
        try:
            found = Simulation(one)
            assert found.peak_bytes
        except UsageError:
            continue
        yield found
