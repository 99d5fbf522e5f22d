"""What a plan would need if replicas divided nothing: the price of dividing state, in a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipefit.plans import Plan
from pipefit.simulator.assembled import assembled
from pipefit.units import format_bytes, format_seconds


def undivided(plan: Plan) -> Iterator[str]:
    """The peak of the fullest device and the seconds of a step of the same stages in whole replicas."""
    if any(stage.grid.shard != "none" for stage in plan.stages):
        grids = (replace(stage.grid, shard="none") for stage in plan.stages)
        whole = replace(plan, stages=tuple(replace(s, grid=grid) for s, grid in zip(plan.stages, grids, strict=True)))
        simulation, budgets = assembled(whole), plan.cluster.budgets
        peaks = simulation.peak_bytes
        fullest = max(range(len(peaks)), key=lambda device: peaks[device] / budgets[device])
        yield (
            f"If replicas divided nothing, device {fullest} would need {format_bytes(peaks[fullest])} and a step would "
            f"take {format_seconds(simulation.step_seconds[-1])}."
        )
