"""Common plans are found: fully sharded, with every block recomputed on its own."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import nn

import pipefit
from pipefit.errors import InfeasibleError, UsageError
from pipefit.lowering.passes.recomputation import recompute_decisions
from pipefit.planner import Question, Simulations, arrangements, plan
from pipefit.planner import common_plans as common_plans_module
from pipefit.planner.arrangements import Trials
from pipefit.planner.common_plans import AWAY, CommonSearch, _without_state, common_plans
from pipefit.planner.open_choices import space_of
from pipefit.planner.options import Means, PlanOptions
from pipefit.runtime import certify
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import Host, Link, Member
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from support.known_profiles import profile
from support.microbatch_size_profiles import sized
from support.small_tasks import task_of
from support.synthetic_models import AMPLE, devices, keeping


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_plan_that_is_fully_sharded_and_recomputed_by_block_is_found(seed: int, number: int) -> None:
    """On devices with exactly the memory of such a plan, both joint and the requested planner find a plan."""
    rng, count = Random(seed), 4
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


def fully_sharded(number: int, samples: int) -> Plan:
    """Return the plan of six heavy layers on replicas of this many devices, recomputed by block."""
    count = 6
    profile = sized(keeping(Random(0), widths=[24] * (count + 1), weights=[75] * count), number, 1)
    how = Training(batch_size=samples, microbatches=samples // number)
    grid = Grid(devices=tuple(range(number)), data=number, shard="parameters", buckets=count)
    stages = (Stage(start=0, stop=count, grid=grid),)
    again = recompute_decisions(stages, profile.edges, "always", how.schedule, how.microbatches)
    cluster = devices(*[AMPLE] * number)
    plan = Plan(profile=profile, cluster=cluster, training=how, stages=stages, decisions=again)
    budget = max(Simulation(plan).peak_bytes)
    return replace(plan, cluster=devices(*[budget] * number))


def test_replicas_on_all_devices_are_known_before_a_long_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large question begins with the sizes of which every device computes samples, though they are the last
    in the order of sizes; unless reading its many devices would take longer than the search.
    """
    monkeypatch.setattr(arrangements, "is_small", lambda _: False)
    wanted, of = fully_sharded(4, 16), keeping(Random(0), widths=[24] * 7, weights=[75] * 6)
    options = PlanOptions(planner="joint", batch_size=16)
    space = space_of(lambda size: sized(of, size), wanted.cluster, None, options)
    trials = Trials(space)
    trials._replicate()
    assert trials.sizes == (1, 4, 8, 16)
    best = min(trials.mixed, key=lambda found: found.seconds)
    assert best.seconds <= Simulation(wanted).step_seconds[-1]
    assert next(trials._visited(slices=True)) == best.question.training.microbatch_size
    monkeypatch.setattr(arrangements, "_REPLICATED", 4 * 6 * 2)  # devices, blocks and microbatches
    less = Trials(space)
    less._replicate()
    assert less.mixed and all(found.question.training.microbatch_size > 4 for found in less.mixed)
    monkeypatch.setattr(arrangements, "_REPLICATED", 4 * 6 - 1)
    none = Trials(space)
    none._replicate()
    assert not none.mixed


def test_one_budget_serves_the_common_plans_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a search has spent the budget, the next size is only searched if nothing is known to fit."""
    wanted = fully_sharded(4, 16)
    question = Question(profile=wanted.profile, cluster=wanted.cluster, training=wanted.training)
    search = CommonSearch()
    first = search.fastest(question, float("inf"))
    assert first is not None
    monkeypatch.setattr(common_plans_module, "_WORK", search.work - 1)
    assert search.fastest(question, 2 * first.seconds) is None
    assert CommonSearch().fastest(question, 2 * first.seconds) is not None
    again = search.fastest(question, float("inf"))
    assert again is not None and again.seconds >= first.seconds


def test_ranks_whose_hosts_have_state_are_found() -> None:
    """Eight ranks of four linear layers of 64 x 64 need 36 KiB with the state of AdamW, and less without it: joint
    finds a plan in 30 KiB, and the dry run confirms it.
    """
    task = task_of(
        lambda: [nn.Linear(64, 64) for _ in range(4)], inputs=64, outputs=64, optimizer=torch.optim.AdamW
    )
    costs, small = profile(task, microbatch_size=1, tensor=(8,)), Cluster.emulated((8, 30 << 10))
    kept = plan(
        costs, small, microbatches=2, tensor=8, objective="peak", planner="exact", allow_infeasible=True
    )
    assert kept.prediction is not None and max(kept.prediction.peak_bytes) > 30 << 10
    found = plan(costs, small, microbatches=2, tensor=8)
    assert {stage.grid.tensor for stage in found.stages} == {8} and found.decisions
    assert max(certify(task, found).peak_bytes) <= 30 << 10
    means = Means(state=False)
    with pytest.raises(InfeasibleError, match="no plan was found that fits"):
        plan(costs, small, microbatches=2, tensor=8, means=means)


def test_a_refusal_names_what_ranks_need_and_a_proof() -> None:
    """A plan fits the memory that ranks are said to need; without room for a layer, the message has the proof."""
    wide = task_of(lambda: [nn.Linear(16, 512), nn.ReLU(), nn.Linear(512, 16)], inputs=16, outputs=16)
    with pytest.raises(InfeasibleError) as refusal:
        pipefit.plan(wide, Cluster.emulated((2, 20 << 10)), batch_size=1)
    [need] = re.findall(r"With 2 tensor-parallel ranks, a device would need ([\d.]+) KiB", str(refusal.value))
    found = pipefit.plan(wide, Cluster.emulated((2, round((float(need) + 0.01) * 1024))), batch_size=1)
    assert found.stages[0].grid.tensor == 2
    with pytest.raises(InfeasibleError, match=r"No plan fits this cluster: layer \S+ needs at least"):
        pipefit.plan(wide, Cluster.emulated((2, 4 << 10)), batch_size=1)


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
            peaks = Simulations(question).of(split, decisions).peaks
        except UsageError:
            continue
        tight = replace(question, cluster=devices(*[max(peaks)] * number))
        bound = Simulations(_without_state(tight) if moves else tight)
        assert bound.may_fit(split, recompute, without_parameters=moves == AWAY)
        seen.add(str(moves))
    assert len(seen) == 3
