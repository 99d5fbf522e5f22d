"""Costs that are shared by several plans, as planners share them."""

from __future__ import annotations

from made_up import devices, layer, measurement, profile, training, value
from pipefit.cost.stage import Costs
from pipefit.decisions import Decision, SavedTensors, What
from pipefit.grids import Grid, Stage
from pipefit.layer_costs import Origin
from pipefit.places import parse_place
from pipefit.plans import Plan
from pipefit.simulator import Simulation

OWN = (Origin(kind="input", index=0), Origin(kind="own", index=1))


def test_plans_that_share_costs_do_not_share_bundles() -> None:
    """Two plans whose bundles have the same number and other tensors peak as each does with costs of its own."""
    plan = moved_plan(((0, 1), (1, 1)))
    other = moved_plan(((1, 1), (2, 1)))
    shared = Costs.of(plan)
    for one in (plan, other, plan):
        assert Simulation(one, costs=shared).peak_bytes == Simulation(one).peak_bytes


def moved_plan(tensors: tuple[tuple[int, int], ...]) -> Plan:
    """One stage of three layers that keep 10, 200 and 3000 bytes, of which some move to the host."""
    layers = [layer((value(1),), (value(1),), storages=(1, kept), saved=OWN) for kept in (10, 200, 3000)]
    return Plan(
        profile=profile(measurement(layers, layer((value(1), value(1)), (value(4),)))),
        cluster=devices(1 << 20),
        training=training("gpipe", 3),
        stages=(Stage(start=0, stop=3, grid=Grid.of(0)),),
        decisions=(
            Decision(stage=0, subject=SavedTensors(tensors=tensors), what=What.OFFLOAD, place=parse_place("host")),
        ),
    )
