"""Made-up plans of stages on grids: a layer for each stage, measured at all sizes and degrees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipefit.schema.grids import Grid, Stage
from pipefit.schema.layer_costs import Collective
from pipefit.schema.plan import Plan
from pipefit.schema.training import Training
from support.pipelines import equal_profile, make_cluster
from support.replica_profiles import resized

Degrees = tuple[int, int]  # replicas, and shards of each


def sharded(
    *degrees: Degrees,
    samples: int = 4,
    microbatches: int = 1,
    schedule: str = "1f1b",
    together: tuple[Collective, ...] = (),
    links: Any = None,
    **measured: Any,
) -> Plan:
    """Return a stage of one layer for each degree, on consecutive devices. Ranks do `together` in every
    forward; other arguments belong to the measurements.
    """
    profile = equal_profile(len(degrees), forward_seconds=1.0, backward_seconds=2.0)
    alone = replace(profile.measurements[0], **measured)
    kinds = tuple(replace(kind, forward=replace(kind.forward, collectives=together)) for kind in alone.kinds)
    divided = replace(alone, kinds=kinds)
    wanted = dict.fromkeys([(samples, 1), *((samples // data, tensor) for data, tensor in degrees)])
    counts = [data * tensor for data, tensor in degrees]
    starts = [sum(counts[:number]) for number in range(len(counts))]
    return Plan(
        profile=replace(
            profile,
            measurements=tuple(
                replace(resized(alone if tensor == 1 else divided, size), tensor=tensor)
                for size, tensor in wanted
            ),
        ),
        cluster=make_cluster(sum(counts), **(links or {})),
        training=Training(batch_size=samples * microbatches, microbatches=microbatches, schedule=schedule),
        stages=tuple(
            Stage(
                start=n,
                stop=n + 1,
                grid=Grid(devices=tuple(range(first, first + count)), data=data, tensor=tensor),
            )
            for n, (first, count, (data, tensor)) in enumerate(zip(starts, counts, degrees, strict=True))
        ),
    )
