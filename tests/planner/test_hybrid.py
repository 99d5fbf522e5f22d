"""The exact search over grids of devices, against every simulated plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, combinations, pairwise, permutations, product
from random import Random
from typing import Any

import numpy as np
import pytest

from pipefit.errors import UsageError
from pipefit.planner import PlanOptions, exact, plan
from pipefit.planner.closed_forms.surroundings import surroundings
from pipefit.planner.hybrid import tables
from pipefit.planner.hybrid.tables import together_seconds
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import State
from pipefit.schema.grids import dividing
from pipefit.schema.layer_costs import Collective
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from pipefit.timing import Group, Line
from support.microbatch_size_profiles import sized, written
from support.planner_calls import asked
from support.synthetic_models import AMPLE, WHOLE_STAGES, devices, hostile, plain, skewed

SCHEDULES = "gpipe", "torchgpipe", "1f1b", "eager-1f1b"


def instance(seed: int) -> tuple[ModelProfile, Cluster, Training, PlanOptions]:
    """Build a small question whose stages may have several devices, equal or not."""
    rng = Random(seed)
    count, size = rng.randrange(1, 5), rng.choice((2, 4, 6))
    chain = rng.choice((plain, hostile, skewed))(rng, count)
    slices = [size, size // 2, *(size // data for data in (3, 4) if size % data == 0 and rng.random() < 0.8)]
    sizes = [rng.choice((300, 500, 500, 900)) for _ in range(rng.randrange(2, 5))]
    how = Training(batch_size=size * 3, microbatches=3, schedule=rng.choice(SCHEDULES))
    stages = rng.choice((None, None, rng.randrange(1, min(count, len(sizes)) + 1)))
    options = PlanOptions(
        stages=stages, recompute=rng.choice(WHOLE_STAGES), allow_infeasible=True, shard="none"
    )
    fixed = [value.nbytes for cost in chain.costs[:2] for value in cost.inputs] if rng.random() < 0.3 else []
    cluster = devices(*(sizes if rng.random() < 0.6 else [AMPLE] * len(sizes)))
    return sized(chain, *slices, fixed=fixed), cluster, how, options


def every_plan(
    profile: ModelProfile, cluster: Cluster, how: Training, options: PlanOptions
) -> Iterator[tuple[Plan, tuple[int, ...]]]:
    """Enumerate all plans up to the choice of devices, each with the peaks of its stages."""
    layers, most = len(profile.layers), len(cluster.devices)
    sizes = {one.microbatch_size for one in profile.measurements}
    degrees = [
        d for d in range(1, most + 1) if how.microbatch_size % d == 0 and how.microbatch_size // d in sizes
    ]
    for stages in range(1, min(layers, most) + 1) if options.stages is None else [options.stages]:
        for cuts in combinations(range(1, layers), stages - 1):
            for chosen in product(degrees, repeat=stages):
                if sum(chosen) <= most:
                    made = written(profile, cluster, how, (0, *cuts, layers), chosen, options.recompute)
                    try:
                        peaks = Simulation(made).peak_bytes
                    except UsageError:  # their exchanged values cannot be divided, or held by replicas
                        continue
                    yield made, tuple(peaks[stage.devices[0]] for stage in made.stages)


def lowest(profile: ModelProfile, cluster: Cluster, how: Training, options: PlanOptions) -> float:
    """Return the lowest peak of all plans on all choices of devices, as a share of budgets that differ."""
    best, budgets = float("inf"), cluster.budgets
    equal = len(set(budgets)) == 1
    for made, peaks in every_plan(profile, cluster, how, options):
        degrees = [stage.grid.data for stage in made.stages]
        firsts = [0, *accumulate(degrees)]
        orders = {tuple(range(firsts[-1]))} if equal else set(permutations(budgets, firsts[-1]))
        for order in orders:
            units = [1 if equal else min(order[a:b]) for a, b in pairwise(firsts)]
            best = min(best, max(peak / unit for peak, unit in zip(peaks, units, strict=True)))
    return best


def check(seed: int) -> None:
    question = instance(seed)
    found = asked(exact, *question)
    assert found.provenance
    assert found.provenance.value == lowest(*question)
    peaks, budgets = Simulation(found).peak_bytes, found.cluster.budgets
    equal = len(set(budgets)) == 1
    shares = [peak / (1 if equal else budget) for peak, budget in zip(peaks, budgets, strict=True)]
    assert max(shares) == found.provenance.value
    assert found.prediction and found.prediction.peak_bytes == peaks


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(40))
def test_no_plan_has_a_lower_peak(seed: int) -> None:
    """No choice of cuts, stages, replicas and devices of several sizes has a lower peak, and the simulator
    agrees.
    """
    check(seed)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(40))
def test_no_plan_has_a_lower_peak_than_by_bands_of_few_starts(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where bands have only the ranges that begin where stages can start."""
    monkeypatch.setattr(tables, "_MANY_RANGES", 0)
    check(seed)


@pytest.mark.gallery
@pytest.mark.parametrize("seed", range(40, 240))
def test_no_plan_of_many_has_a_lower_peak(seed: int) -> None:
    """No plan has a lower peak in two hundred more questions."""
    check(seed)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_stage_meets_depends_on_the_stages_behind_it_alone(schedule: str) -> None:
    """A stage's surroundings depend only on later stages, so one search serves every number of stages."""
    for stages, stage, count in product(range(1, 6), range(5), (1, 2, 3, 7)):
        if stage < stages:
            met = surroundings(schedule, stage, stages, count)
            assert set(met) == set(surroundings(schedule, 0, stages - stage, count))


def seconds(made: Plan) -> float:
    assert made.prediction
    return made.prediction.step_seconds


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(8))
def test_the_fastest_plan_is_within_its_bound_of_every_other(seed: int) -> None:
    """No plan with replicas beats the bound, and none of single devices is faster than the answer."""
    rng = Random(seed)
    size, count = 4, rng.randrange(1, 5)
    profile = sized(rng.choice((plain, skewed))(rng, count), 4, 2, 1)
    cluster = devices(*[AMPLE] * rng.randrange(2, 5))
    how = Training(batch_size=size * 3, microbatches=3)
    found = plan(profile, cluster, how)
    assert found.provenance and found.provenance.bound is not None
    others = [seconds_of(other) for other, _ in every_plan(profile, cluster, how, PlanOptions())]
    assert found.provenance.bound <= min(others) * (1 + 1e-9)
    assert seconds(found) <= seconds(plan(profile, cluster, how, data=1)) * (1 + 1e-9)


def seconds_of(made: Plan) -> float:
    return Simulation(made).step_seconds[-1]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "planner", ["joint", "exact", "uniform", "parameters", "time", "exhaustive", "mpress"]
)
def test_every_planner_gives_all_stages_the_replicas_that_are_asked_for(planner: str) -> None:
    """Every planner gives all stages the requested two replicas on separate devices, and none if grids are
    refused.
    """
    profile, cluster = sized(plain(Random(1), 5), 4, 2), devices(*[AMPLE] * 5)
    for data in (1, 2):
        made = plan(profile, cluster, batch_size=8, microbatch_size=4, planner=planner, stages=2, data=data)
        assert [stage.grid.data for stage in made.stages] == [data, data]
        assert made.prediction and made.prediction.peak_bytes == Simulation(made).peak_bytes


@pytest.mark.parametrize("planner", ["joint", "exact", "lean", "alpa", "capture"])
def test_a_layer_that_no_replicas_can_have_is_told_where_all_stages_have_them(planner: str) -> None:
    """If no replicas can hold a layer, the sentence names the layer, not the search's tables."""
    chain = plain(Random(1), 4)
    last = replace(chain.kinds[chain.layers[-1]], fed_back=("running",))
    chain = replace(chain, kinds=(*chain.kinds, last), layers=(*chain.layers[:-1], len(chain.kinds)))
    words = (
        "cannot be planned with at most 2 stages" if planner == "capture" else "layer3 computes with running"
    )
    with pytest.raises(UsageError, match=words):
        plan(
            sized(chain, 4, 2),
            devices(*[AMPLE] * 4),
            batch_size=8,
            microbatch_size=4,
            planner=planner,
            data=2,
        )


def test_replicas_that_keep_too_much_recompute_and_move_saved_tensors() -> None:
    """A plan with replicas that fits only by techniques offloads tensors, and state only if the
    replicas divide it.
    """
    profile = sized(plain(Random(3), 4), 4, 2)
    ample = plan(profile, devices(*[AMPLE] * 4), batch_size=16, microbatch_size=4, data=2)
    assert ample.prediction
    budget = max(ample.prediction.peak_bytes) - 1
    made = plan(
        profile, devices(*[budget] * 4), batch_size=16, microbatch_size=4, data=2, stages=len(ample.stages),
        allow_infeasible=True,
    )  # fmt: skip
    states = [decision for decision in made.decisions if isinstance(decision.subject, State)]
    assert all(made.stages[decision.stage].grid.shard != "none" for decision in states)
    assert Simulation(made).step_seconds


REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("4 replicas cannot split microbatches of 6 samples evenly: use microbatches of 4 or 12", {"data": 4}),
    (
        "3 replicas compute local batches of 2 samples, but synthetic was profiled at 3, 6: profile it at 6 and 2",
        {"data": 3},
    ),
    ("data must be 1 or more, not 0", {"data": 0}),
    (
        "schedule pipedream updates with microbatches in flight",
        {"shard": "parameters", "schedule": "pipedream"},
    ),
    ("has 4 devices, too few for 3 stages of 2 devices: use 2 or fewer", {"data": 2, "stages": 3}),
    ("a stage of 5 replicas of 1 shard each needs 5 devices, but there are 4", {"data": 5}),
)


def test_degrees_that_are_not_possible_are_refused() -> None:
    """Impossible degrees are refused with a degree that works, in one sentence each."""
    profile, cluster = sized(plain(Random(1), 3), 6, 3), devices(*[AMPLE] * 4)
    for planner, asked_for in product(("joint", "exact", "uniform"), REFUSED):
        words, options = asked_for
        with pytest.raises(UsageError, match=words):
            plan(profile, cluster, batch_size=12, microbatch_size=6, planner=planner, **options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("planner", ["joint", "exact"])
@pytest.mark.parametrize("on_demand", [False, True])
def test_sizes_that_the_replicas_that_are_asked_for_cannot_divide_are_left_out(
    planner: str, on_demand: bool
) -> None:
    """Chosen microbatch sizes skip those below the requested number of replicas."""
    whole = sized(plain(Random(3), 3), 4, 2, 1)

    def at(size: int) -> ModelProfile:
        return replace(whole, measurements=(whole.at(size),))

    made = plan(at if on_demand else whole, devices(*[AMPLE] * 4), batch_size=16, planner=planner, data=2)
    assert made.training.microbatch_size in (2, 4)
    assert {stage.grid.data for stage in made.stages} == {2}


def test_the_first_size_that_is_profiled_on_demand_brings_its_slices() -> None:
    """A profile function is called for local batches too, for up to as many replicas as devices."""
    whole, asked_of = sized(plain(Random(2), 3), 8, 4, 2, 1), list[int]()

    def at(size: int) -> ModelProfile:
        asked_of.append(size)
        return replace(whole, measurements=(whole.at(size),))

    made = plan(at, devices(*[AMPLE] * 4), batch_size=8, microbatch_size=8)
    assert set(asked_of) == {8, 4, 2}
    assert made.training.microbatch_size == 8


@pytest.mark.parametrize(
    ("size", "data", "batch", "advice"),
    [
        (4, 3, None, "microbatches of 3 or 6 samples"),
        (2, 3, None, "microbatches of 3 samples"),
        (4, 3, 24, "microbatches of 3 or 6 samples"),
        (16, 3, 24, "microbatches of 12 or 24 samples"),
        (1, 3, 16, "a batch of 15 or 18 samples"),
        (15, 2, 15, "a batch of 14 or 16 samples"),
        (1, 4, 3, "a batch of 4 samples"),
    ],
)
def test_advice_about_replicas_can_be_followed(size: int, data: int, batch: int | None, advice: str) -> None:
    """The suggested replicas divide the microbatches, and these divide the requested batch."""
    assert dividing(size, data, batch) == advice


def test_a_sum_of_replicas_takes_the_way_of_its_size() -> None:
    """A sum of few bytes uses trees, of more bytes a ring, and of zero bytes takes no time, for replicas as
    for shards.
    """
    ways, sizes = (Line(3.0, 1.0), Line(1.0, 2.0)), [1, 2, 3, 50]
    found = together_seconds(ways, np.array([0, *sizes]))
    assert [*found] == [0, 3, 5, 6, 53]
    group = Group(members=4, sums=ways, halves=(Line(1.5, 0.5),))
    assert [group.seconds([Collective("all_reduce", nbytes)]) for nbytes in sizes] == [*found[1:]]
    assert group.seconds([Collective("all_gather", 2), Collective("reduce_scatter", 4)]) == 2.5 + 3.5
