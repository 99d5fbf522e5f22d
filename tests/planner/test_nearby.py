"""Neighbours of the plans with the fastest estimates: none is faster than the answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from random import Random
from typing import get_args

import pytest

from pipefit.planner import PlanOptions, Question
from pipefit.planner.evaluation import Simulated
from pipefit.planner.mixed_degrees import mixed
from pipefit.planner.neighbours import Simulations
from pipefit.planner.problem import Split, plan_of
from pipefit.schema.grids import Grid, Sharding
from pipefit.schema.plan import Plan
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from support.microbatch_size_profiles import sized, written
from support.synthetic_models import AMPLE, devices, plain, skewed
from support.tight_questions import uneven_case


def question(seed: int) -> Question:
    """Build a small question, with slow links in every other one."""
    rng = Random(seed)
    profile = sized(rng.choice((plain, skewed))(rng, rng.randrange(2, 6)), 4, 2, 1)
    cluster = devices(*[rng.choice((AMPLE, AMPLE, 900))] * rng.randrange(2, 5))
    if seed % 2:
        links = tuple(replace(link, bytes_per_second=link.bytes_per_second / 1000) for link in cluster.links)
        cluster = replace(cluster, links=links)
    return Question(profile=profile, cluster=cluster, training=Training(batch_size=12, microbatches=3))


def even(asked: Question) -> Iterator[Plan]:
    """Split into stages of equal numbers of layers and one degree, on all devices, as Megatron does."""
    layers, count = len(asked.profile.layers), len(asked.cluster.devices)
    for data in (1, 2, 4):
        stages = min(layers, count // data)
        edges = [
            sum(layers // stages + (n < layers % stages) for n in range(stop)) for stop in range(stages + 1)
        ]
        if stages:
            yield written(asked.profile, asked.cluster, asked.training, edges, [data] * stages, "never")


def moved(made: Plan) -> Iterator[Plan]:
    """Return the plan with one cut moved by a layer."""
    for number, (front, behind) in enumerate(pairwise(made.stages)):
        for cut in (front.stop - 1, front.stop + 1):
            if front.start < cut < behind.stop:
                stages = list(made.stages)
                stages[number : number + 2] = replace(front, stop=cut), replace(behind, start=cut)
                yield replace(made, stages=tuple(stages))


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(12))
def test_no_plan_of_equal_degrees_and_none_with_a_cut_moved_is_faster(seed: int) -> None:
    """No neighbour is faster, though estimates leave messages out."""
    asked = question(seed)
    best = mixed(asked)
    simulated = [Simulation(plan) for plan in even(asked)]
    fitting = [one for one in simulated if all(map(int.__le__, one.peak_bytes, asked.cluster.budgets))]
    if best is None:
        assert not fitting
        return
    made = plan_of(asked, best.split, decisions=best.decisions or None)
    beside = [
        one
        for one in map(Simulation, moved(made))
        if all(map(int.__le__, one.peak_bytes, asked.cluster.budgets))
    ]
    assert Simulation(made).step_seconds[-1] == best.seconds
    assert all(best.seconds <= one.step_seconds[-1] for one in (*fitting, *beside))


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(12))
def test_a_plan_within_what_another_takes_is_found_as_without_that(seed: int) -> None:
    """If the best plan is faster than a known one it is found; otherwise none is invented."""
    asked = question(seed)
    best = mixed(asked)
    if best is None:
        assert mixed(asked, 1.0) is None
        return
    within = mixed(asked, 1.02 * best.seconds)
    assert within is not None
    assert within.seconds <= 1.01 * best.seconds
    above = mixed(asked, 0.1 * best.seconds)
    assert above is None or above.seconds >= best.seconds


def test_gradients_are_summed_beside_the_backward_where_that_is_faster() -> None:
    """Two replicas on slow links sum in several buckets, and no number of them is faster by a tenth."""
    asked = question(6)
    slow = tuple(replace(link, bytes_per_second=1.0) for link in asked.cluster.links)
    asked = replace(asked, cluster=replace(asked.cluster, links=slow), options=PlanOptions(data=2, stages=1))
    best = mixed(asked)
    assert best is not None
    made = plan_of(asked, best.split, decisions=best.decisions or None)
    seconds = [Simulation(in_buckets(made, buckets)).step_seconds[-1] for buckets in range(1, 17)]
    assert best.seconds < seconds[0]
    assert best.seconds <= 1.1 * min(seconds)


def in_buckets(made: Plan, buckets: int) -> Plan:
    """Return the plan with its gradients summed in `count` runs of layers."""
    stages = (replace(stage, grid=replace(stage.grid, buckets=buckets)) for stage in made.stages)
    return replace(made, stages=tuple(stages))


def test_replicas_divide_their_state_where_updates_of_all_of_it_take_longer() -> None:
    """On fast links replicas divide their state, as in FSDP: no division, in up to 64 buckets, is faster by a
    hundredth.
    """
    asked = replace(question(6), options=PlanOptions(data=2, stages=1))
    best = mixed(asked)
    assert best is not None
    whole = plan_of(asked, best.split)
    others = []
    for shard, buckets in product(get_args(Sharding), (1, 4, 64)):
        grids = (replace(stage.grid, shard=shard, buckets=buckets) for stage in whole.stages)
        made = replace(
            whole, stages=tuple(replace(s, grid=g) for s, g in zip(whole.stages, grids, strict=True))
        )
        others.append(Simulation(made).step_seconds[-1])
    assert best.split.grids[0].shard != "none"
    assert best.seconds <= 1.01 * min(others)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("seed", "factor"), [(12, 1), (38, 1), (52, 10), (39, 1000), (49, 1000)])
def test_no_plan_of_equal_degrees_is_faster_whatever_its_replicas_divide(seed: int, factor: int) -> None:
    """No plan of equal degrees is faster in any number of buckets, though its split is slower while replicas
    sum after the last backward.
    """
    asked = question(seed)
    slow = tuple(
        replace(link, bytes_per_second=link.bytes_per_second / factor) for link in asked.cluster.links
    )
    asked = replace(asked, cluster=replace(asked.cluster, links=slow))
    best = mixed(asked)
    assert best is not None
    for made, shard, buckets in product(even(asked), get_args(Sharding), (1, 4, 16)):
        grids = (
            replace(one.grid, shard=shard, buckets=buckets) if one.grid.data > 1 else one.grid
            for one in made.stages
        )
        stages = tuple(replace(one, grid=grid) for one, grid in zip(made.stages, grids, strict=True))
        found = Simulation(replace(made, stages=stages))
        if all(map(int.__le__, found.peak_bytes, asked.cluster.budgets)):
            assert best.seconds <= found.step_seconds[-1] * (1 + 1e-9)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(12))
def test_no_step_is_shorter_than_its_lower_bound(seed: int) -> None:
    """Passes and collectives bound the steps of plans that divide state in any number of buckets, on slow
    links too.
    """
    asked, rng = question(seed), Random(seed)
    factor = rng.choice((1, 1000, 100_000))
    slow = tuple(
        replace(link, bytes_per_second=link.bytes_per_second / factor) for link in asked.cluster.links
    )
    asked = replace(asked, cluster=replace(asked.cluster, links=slow))
    for made, shard, buckets in product(even(asked), get_args(Sharding), (1, 2, 16)):
        grids = [
            replace(one.grid, shard=shard, buckets=buckets) if one.grid.data > 1 else one.grid
            for one in made.stages
        ]
        edges = (0, *(stage.stop for stage in made.stages))
        split = Split(edges, tuple(grid.devices[0] for grid in grids), tuple(grids))
        simulations = Simulations(asked)
        assert simulations.least(split) <= simulations.of(split).seconds * (1 + 1e-9)


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("seed", range(12))
def test_the_lower_bound_holds_for_replicas_on_unequal_devices(seed: int, microbatches: int) -> None:
    """Replicas of stages on fast and slow devices, in any order, take no less than the bound."""
    rng = Random(seed)
    case = uneven_case(rng, ("1f1b", "eager-1f1b", "gpipe"), layers=4, devices=4)
    links = tuple(replace(link, bytes_per_second=1e6, latency_seconds=0.0) for link in case.cluster.links)
    there = tuple(replace(device, memory_bytes=AMPLE) for device in case.cluster.devices)
    asked = Question(
        profile=sized(case.profile.measurements[0], 2, 1),
        cluster=replace(case.cluster, devices=there, links=links),
        training=replace(case.training, batch_size=2 * microbatches, microbatches=microbatches),
    )
    grids = [Grid(devices=pair, data=2) for pair in ((0, 1), (2, 3))]
    for split in (Split((0, 2, 4), (0, 2), tuple(grids)), Split((0, 4), (0,), tuple(grids[:1]))):
        simulations = Simulations(asked)
        assert simulations.least(split) <= simulations.of(split).seconds * (1 + 1e-9)


def test_less_effort_simulates_fewer_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches around the fastest splits scale their budgets with the question's effort."""
    asked, counts, of = question(1), list[int](), Simulations.of
    for effort in (1.0, 1e-3):
        made = list[Split]()

        def counted(one: Simulations, split: Split, *args: object, made: list[Split] = made) -> Simulated:
            made.append(split)
            return of(one, split, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(Simulations, "of", counted)
        assert mixed(replace(asked, options=replace(asked.options, effort=effort))) is not None
        counts.append(len(made))
    assert 0 < counts[1] < counts[0] / 2
