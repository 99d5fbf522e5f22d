"""Common plans are found: fully sharded, with every block recomputed on its own."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from made_up import AMPLE, devices, keeping
from pipefit.errors import UsageError
from pipefit.lowering.passes.recomputation import recompute_decisions
from pipefit.planner import Question, Simulations, plan
from pipefit.planner.common_plans import AWAY, _without_state, common_plans
from pipefit.schema.devices import Host, Link, Member
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


@pytest.mark.parametrize("seed", range(2))
def test_bounds_of_memory_keep_every_common_plan_that_fits(seed: int) -> None:
    """No plan whose peaks a cluster has is left out, whatever moves to hosts."""
    profile = sized(keeping(Random(seed), widths=[1 << 5] * 5, weights=[1 << 8] * 4), 4, 2, 1)
    number = 4
    bare = devices(*[AMPLE] * number)
    links = [Link(members=(Member.device(n), Member.host(0)), bytes_per_second=1e4) for n in range(number)]
    links.append(Link(members=tuple(map(Member.device, range(number))), bytes_per_second=1e4))
    ample = replace(bare, links=tuple(links), hosts=(Host(memory_bytes=1 << 40, memory_bandwidth=1e4),))
    how = Training(batch_size=8, microbatches=2)
    question, seen = Question(profile=profile, cluster=ample, training=how), set[str]()
    for split, recompute, moves, decisions in common_plans(question):
        try:
            peaks = Simulations(question).of(split, decisions).peak_bytes
        except UsageError:
            continue
        tight = replace(question, cluster=devices(*[max(peaks)] * number))
        bound = Simulations(_without_state(tight) if moves else tight)
        assert bound.may_fit(split, recompute, without_parameters=moves == AWAY)
        seen.add(str(moves))
    assert len(seen) == 3
