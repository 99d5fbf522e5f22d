"""Made-up plans of stages with several replicas: a layer for each stage, measured at the sizes of all local
batches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipefit.schema.decisions import Decision
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.layer_costs import SharedParameter, Value
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Measurement
from pipefit.schema.training import Training
from support.pipelines import equal_profile, make_cluster


def resized(made: Measurement, samples: int) -> Measurement:
    """Return the measurement as if values had their samples along the first dimension."""

    def value(one: Value) -> Value:
        return replace(one, shape=(samples, one.nbytes), nbytes=samples * one.nbytes)

    def values(ones: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(map(value, ones))

    kinds = tuple(
        replace(kind, inputs=values(kind.inputs), outputs=values(kind.outputs)) for kind in made.kinds
    )
    return replace(
        made, kinds=kinds, loss=replace(made.loss, inputs=values(made.loss.inputs)), microbatch_size=samples
    )


def gridded(
    *degrees: int,
    samples: int = 4,
    microbatches: int = 1,
    schedule: str = "1f1b",
    shared: tuple[SharedParameter, ...] = (),
    clip_norm: float | None = None,
    decisions: tuple[Decision, ...] = (),
    seconds: float = 1.0,
    **links: Any,
) -> Plan:
    """Return a stage of one layer for each degree, on consecutive devices. A pass takes `seconds`, a backward
    twice that; `links` are the rates between devices.
    """
    profile = equal_profile(len(degrees), forward_seconds=seconds, backward_seconds=2 * seconds)
    sizes = dict.fromkeys([samples, *(samples // degree for degree in degrees)])
    alone = replace(profile.measurements[0], shared=shared)
    starts = [sum(degrees[:number]) for number in range(len(degrees))]
    return Plan(
        profile=replace(profile, measurements=tuple(resized(alone, size) for size in sizes)),
        cluster=make_cluster(sum(degrees), **links),
        training=Training(
            batch_size=samples * microbatches,
            microbatches=microbatches,
            schedule=schedule,
            clip_norm=clip_norm,
        ),
        stages=tuple(
            Stage(start=n, stop=n + 1, grid=Grid(devices=tuple(range(first, first + degree)), data=degree))
            for n, (first, degree) in enumerate(zip(starts, degrees, strict=True))
        ),
        decisions=decisions,
    )
