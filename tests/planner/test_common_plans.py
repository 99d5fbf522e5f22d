"""Common plans are found: fully sharded, with every block recomputed on its own."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from made_up import AMPLE, devices, keeping
from pipefit.lowering.passes.recomputation import recompute_decisions
from pipefit.planner import plan
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from slice_sizes import sized


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_plan_that_is_fully_sharded_and_recomputed_by_block_is_found(seed: int, number: int) -> None:
    """On devices with exactly the memory of such a plan, both joint and the requested planner find a plan."""
    rng, count = Random(seed), 6
    widths = [rng.randrange(20, 40)] * (count + 1)
    profile = sized(keeping(rng, widths=widths, weights=[rng.randrange(60, 90)] * count), number, 1)
    how = Training(batch_size=2 * number, microbatches=2)
    grid = Grid(devices=tuple(range(number)), data=number, shard="parameters", buckets=count)
    stages = (Stage(start=0, stop=count, grid=grid),)
    by_hand = Plan(
        profile=profile,
        cluster=devices(*[AMPLE] * number),
        training=how,
        stages=stages,
        decisions=recompute_decisions(stages, profile.edges, "always", how.schedule, how.microbatches),
    )
    simulation = Simulation(by_hand)
    tight = devices(*[max(simulation.peak_bytes)] * number)
    asked = plan(profile, tight, how, stages=1, data=number, shard="parameters", recompute="always")
    assert (
        replace(asked, cluster=by_hand.cluster, prediction=None, provenance=None).decisions
        == by_hand.decisions
    )
    for found in (asked, plan(profile, tight, how)):
        assert all(map(int.__le__, Simulation(found).peak_bytes, tight.budgets))
        assert Simulation(found).step_seconds[-1] <= simulation.step_seconds[-1] * 1.0101
