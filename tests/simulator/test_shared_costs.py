"""Costs shared by several plans, as planners share them."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from random import Random

from pipefit.memory.stage import Costs
from pipefit.schema.decisions import Decision, SavedTensors, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.layer_costs import Origin
from pipefit.schema.plan import Plan
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from support.microbatch_size_profiles import sized
from support.synthetic_models import AMPLE, devices, layer, measurement, plain, profile, training, value

OWN = (Origin(kind="input", index=0), Origin(kind="own", index=1))


def test_plans_that_share_costs_do_not_share_bundles() -> None:
    """Two plans whose bundles have equal numbers but different tensors peak as with separate costs."""
    plan = moved_plan(((0, 1), (1, 1)))
    other = moved_plan(((1, 1), (2, 1)))
    shared = Costs.of(plan)
    for one in (plan, other, plan):
        assert Simulation(one, costs=shared).peak_bytes == Simulation(one).peak_bytes


def test_plans_that_share_costs_do_not_share_who_owns_what() -> None:
    """Replicas that divide optimizer state, gradients or parameters assign owners by other layer sizes."""
    of = sized(plain(Random(1), 7, size=50), 4, 2)
    how, on = Training(batch_size=12, microbatches=3), devices(*[AMPLE] * 2)
    plans = [
        Plan(
            profile=of,
            cluster=on,
            training=how,
            stages=(Stage(start=0, stop=7, grid=Grid(devices=(0, 1), data=2, shard=shard)),),
        )
        for shard in ("optimizer", "gradients", "parameters")
    ]
    alone = [Simulation(one).peak_bytes for one in plans]
    for order in permutations(range(3)):
        shared = Costs.of(plans[0])
        assert [Simulation(plans[n], costs=shared).peak_bytes for n in order] == [alone[n] for n in order]


def test_shards_that_share_costs_do_not_share_how_often_they_send() -> None:
    """A shard frees an unsent output immediately, and one with two receivers after both have it."""
    one = plain(Random(2), 4, size=50)
    of = profile(one)
    of = replace(of, measurements=(*of.measurements, *(replace(one, tensor=ranks) for ranks in (2, 4))))
    plans = [
        Plan(
            profile=of,
            cluster=devices(*[AMPLE] * 6),
            training=training("1f1b", 3),
            stages=(
                Stage(start=0, stop=2, grid=Grid(devices=(0, 1), tensor=2)),
                Stage(start=2, stop=4, grid=Grid(devices=tuple(range(2, 2 + ranks)), tensor=ranks)),
            ),
        )
        for ranks in (1, 2, 4)
    ]
    alone = [Simulation(one).peak_bytes for one in plans]
    assert len({peaks[1] for peaks in alone}) > 1
    for order in permutations(range(3)):
        shared = Costs.of(plans[0])
        assert [Simulation(plans[n], costs=shared).peak_bytes for n in order] == [alone[n] for n in order]


def moved_plan(tensors: tuple[tuple[int, int], ...]) -> Plan:
    """Build one stage of three layers that keep 10, 200 and 3000 bytes, some offloaded to the host."""
    layers = [layer((value(1),), (value(1),), storages=(1, kept), saved=OWN) for kept in (10, 200, 3000)]
    return Plan(
        profile=profile(measurement(layers, layer((value(1), value(1)), (value(4),)))),
        cluster=devices(1 << 20),
        training=training("gpipe", 3),
        stages=(Stage(start=0, stop=3, grid=Grid.of(0)),),
        decisions=(
            Decision(
                stage=0, subject=SavedTensors(tensors=tensors), what=What.OFFLOAD, place=parse_place("host")
            ),
        ),
    )
