"""State that planners divide among replicas, against every simulated plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations, pairwise, permutations, product
from random import Random

import pytest

from pipefit.errors import UsageError
from pipefit.lowering import ENDLESS, Recompute
from pipefit.memory.model_state import share_among
from pipefit.memory.stage import Costs
from pipefit.planner import plan
from pipefit.planner.hybrid.divided_state import buckets_of
from pipefit.planner.hybrid.programme import Floats, Way
from pipefit.planner.hybrid.search import searches
from pipefit.planner.hybrid.tables import DegreeTables
from pipefit.planner.neighbours import Mixed, Simulations
from pipefit.planner.problem import Degree, PlanOptions, Question, Split, plan_of
from pipefit.schema.actions import Action, Kind
from pipefit.schema.grids import SHARDINGS, Grid, Sharding, Stage
from pipefit.schema.json_io import load_cluster
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from pipefit.simulator.assembled import assembled
from support.every_plan import IN_BLOCKS, every_plan, simulated
from support.microbatch_size_profiles import sized
from support.synthetic_models import (
    AMPLE,
    WHOLE_STAGES,
    copied,
    devices,
    heavy,
    hostile,
    keeping,
    plain,
    skewed,
)

SCHEDULES = "gpipe", "torchgpipe", "1f1b", "eager-1f1b"


def lowest(found: Simulation, budgets: tuple[int, ...]) -> float:
    """Return a plan's highest peak; if budgets differ, its lowest possible share of budgets over all choices
    of devices.
    """
    peaks = [max(found.peak_bytes[device] for device in stage.devices) for stage in found.plan.stages]
    if len(set(budgets)) == 1:
        return max(peaks)
    ends = [0, *accumulate(stage.grid.data for stage in found.plan.stages)]
    return min(
        max(peak / min(order[a:b]) for peak, (a, b) in zip(peaks, pairwise(ends), strict=True))
        for order in set(permutations(budgets, ends[-1]))
    )


def check(seed: int, schedule: str | None = None) -> None:
    rng = Random(seed)
    size, count = rng.choice((2, 4, 6)), rng.randrange(1, 4)
    profile = sized(
        rng.choice((plain, hostile, skewed))(rng, count), size, size // 2, *([1] if size == 4 else [])
    )
    sizes = [rng.choice((300, 500, 500, 900)) for _ in range(rng.randrange(2, 5))]
    cluster = devices(*(sizes if rng.random() < 0.5 else [AMPLE] * len(sizes)))
    microbatches = 3 if schedule is None else 4
    how = Training(
        batch_size=size * microbatches, microbatches=microbatches, schedule=schedule or rng.choice(SCHEDULES)
    )
    recompute = rng.choice(
        (*WHOLE_STAGES, "never", "never") if schedule is None else ("stages", "never", "never")
    )
    made = plan(profile, cluster, how, objective="peak", recompute=recompute, allow_infeasible=True)
    every = [lowest(one, cluster.budgets) for one in simulated(every_plan(profile, cluster, how, recompute))]
    assert made.provenance and made.prediction
    assert made.provenance.value == made.provenance.bound == min(every)
    assert made.prediction.peak_bytes == Simulation(made).peak_bytes


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(6))
def test_no_plan_has_a_lower_peak_whatever_its_replicas_divide(seed: int) -> None:
    """No choice of cuts, replicas, divided state and devices of several sizes has a lower peak."""
    check(seed)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("schedule", ENDLESS)
def test_no_plan_has_a_lower_peak_under_schedules_without_end(schedule: str, seed: int) -> None:
    """No asynchronous plan has a lower peak, with weight versions on every replica and without divided
    parameters.
    """
    check(seed, schedule)


@pytest.mark.parametrize("data", [4, 8])
def test_bounds_hold_where_copies_are_gathered(data: int) -> None:
    """For eight equal layers of plain SGD with half-precision copies, a replica holds the copies of at most
    two buckets, and no bound is higher.
    """
    equal = keeping(Random(0), widths=[1 << 4] * 9, weights=[(1 << 20) + 6] * 8)
    model = replace(equal, kinds=tuple(replace(copied(kind), state_bytes=0) for kind in equal.kinds))
    assert all(one.cast_only for cost in model.costs for one in cost.parameters)
    profile, how = sized(model, 8, 8 // data), Training(batch_size=24, microbatches=3)
    cluster, options = devices(*[AMPLE] * data), PlanOptions(recompute="never")
    made = plan(
        profile, cluster, how, objective="peak", stages=1, data=data, shard="parameters", recompute="never"
    )
    tables = DegreeTables(
        Question(profile=profile, cluster=cluster, training=how, options=options), Degree(data, 1)
    )
    assert tables.peak(1, Way(shard="parameters"), 0, 8) <= max(Simulation(made).peak_bytes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_of_one_range_is_that_of_the_tables(seed: int) -> None:
    """A bound computed for one range alone equals its place in the tables of all ranges."""
    profile = sized(hostile(Random(seed), 7, shared=3), 4, 2, blocks=(1, 2, 1, 1, 2))
    how = Training(batch_size=12, microbatches=3)
    question = Question(profile=profile, cluster=devices(AMPLE, AMPLE), training=how, options=PlanOptions())
    recomputed: tuple[Recompute, ...] = ("never", "always", "stages")
    for degree in question.degrees:
        tables = DegreeTables(question, degree)
        for shard, recompute in product(SHARDINGS if degree.data > 1 else ("none",), recomputed):
            way = Way(shard=shard, recompute=recompute)
            for start, stop in combinations(range(question.blocks + 1), 2):
                assert tables.least(2, way, start, stop) == tables.peak(2, way, start, stop)


@pytest.mark.parametrize("seed", range(6))
def test_replicas_exchange_as_many_bytes_as_the_simulator_says(seed: int) -> None:
    """Replicas exchange the simulator's bytes, with shared or frozen parameters: gradients; after an update
    the trained parameters; and, if owners keep the only copy, half-precision copies if all readers are half
    precision.
    """
    profile = sized(hostile(Random(seed), 7, shared=3), 4, 2, blocks=(1, 2, 1, 1, 2))
    how = Training(batch_size=12, microbatches=3)
    question = Question(profile=profile, cluster=devices(AMPLE, AMPLE), training=how, options=PlanOptions())
    tables, costs = (
        DegreeTables(question, Degree(2, 1)),
        Costs(profile.measurements[0], how, profile.measurements),
    )
    brought: dict[Sharding, Floats] = {"gradients": tables.trained, "parameters": tables.gathered}
    for (start, stop), shard in product(combinations(range(question.blocks + 1), 2), brought):
        layers = question.edges[start], question.edges[stop]
        place = Stage(start=layers[0], stop=layers[1], grid=Grid(devices=(0, 1), data=2, shard=shard))
        share = share_among(place, 0, (0,) * (layers[1] - layers[0]))
        stage = costs.stage(*layers, question.cluster.devices[0].kind, data=2, share=share)
        assert brought[shard][start, stop] == stage.collective_bytes(Action(Kind.UNSHARD, 0, layers=layers))
        inside = set(range(*layers))
        split = [
            one
            for one in profile.measurements[0].shared
            if inside & set(one.users) and set(one.users) - inside
        ]
        apart = sum(one.gradient_bytes for one in split)  # summed with those of other stages
        assert (
            tables.gradients[start, stop]
            == stage.collective_bytes(Action(Kind.REDUCE, 0, layers=layers)) + apart
        )


@pytest.mark.gallery
@pytest.mark.parametrize("seed", range(6, 206))
def test_no_plan_of_many_has_a_lower_peak_whatever_its_replicas_divide(seed: int) -> None:
    """No plan has a lower peak in two hundred more questions."""
    check(seed)


@pytest.mark.parametrize("stages", [1, 2])
def test_peaks_that_few_microbatches_show_are_those_of_all(stages: int) -> None:
    """Peaks from a few microbatches are those of a 1F1B step of twenty, including twenty losses on the last
    stage.
    """
    profile = sized(heavy(4, times=3), 2, 1)
    how = Training(batch_size=40, microbatches=20)
    made = plan(
        profile, devices(*[AMPLE] * 4), how, objective="peak", stages=stages, data=2, shard="parameters"
    )
    assert made.provenance and made.prediction
    assert made.provenance.value == max(Simulation(made).peak_bytes)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(2))
def test_the_fastest_plan_that_fits_may_divide_state(seed: int) -> None:
    """If whole replicas do not fit, the fastest plan divides state: its bound holds for every plan that fits,
    and no pin is faster by a hundredth.
    """
    rng = Random(seed)
    profile, how = sized(plain(rng, 3), 4, 2), Training(batch_size=12, microbatches=3)
    ample = devices(*[AMPLE] * 3)
    peaks = {
        shard: plan(profile, ample, how, objective="peak", shard=shard).provenance for shard in ("none", None)
    }
    budget = sum(int(made.value) for made in peaks.values() if made) // 2
    cluster = devices(*[budget] * 3)
    made = plan(profile, cluster, how)
    assert made.provenance and made.provenance.bound is not None and made.prediction
    assert max(Simulation(made).peak_bytes) <= budget
    fit = [one for one in simulated(every_plan(profile, cluster, how)) if max(one.peak_bytes) <= budget]
    assert made.provenance.bound <= min(
        (one.step_seconds[-1] for one in fit), default=made.provenance.bound
    ) * (1 + 1e-9)
    for shard in SHARDINGS:
        pinned = plan(profile, cluster, how, shard=shard, allow_infeasible=True)
        assert pinned.prediction
        if max(pinned.prediction.peak_bytes) <= budget:
            assert made.prediction.step_seconds <= pinned.prediction.step_seconds * 1.0101


@pytest.mark.sample(2)
@pytest.mark.parametrize("planner", ["joint", "exact", "capture", "alpa", "uniform", "time"])
def test_every_planner_gives_replicas_what_they_are_asked_to_divide(planner: str) -> None:
    """Every planner divides the requested state, in one bucket per block for gradients or parameters, and
    reports the peak of whole replicas.
    """
    profile, cluster = sized(plain(Random(1), 5), 4, 2), devices(*[AMPLE] * 5)
    for shard in SHARDINGS:
        made = plan(
            profile, cluster, batch_size=8, microbatch_size=4, planner=planner, stages=2, data=2, shard=shard
        )
        assert {stage.grid.shard for stage in made.stages} == {shard}
        blocks = [stage.stop - stage.start if shard in IN_BLOCKS else 1 for stage in made.stages]
        assert [stage.grid.buckets for stage in made.stages] == blocks or planner == "joint"
        assert made.prediction and made.prediction.peak_bytes == Simulation(made).peak_bytes
        grids = (replace(stage.grid, shard="none") for stage in made.stages)
        stages = tuple(replace(stage, grid=grid) for stage, grid in zip(made.stages, grids, strict=True))
        peaks = Simulation(replace(made, stages=stages)).peak_bytes
        said = f"device {peaks.index(max(peaks))} would need {max(peaks)} B"
        assert (said in " ".join(made.provenance.remarks if made.provenance else ())) == (shard != "none")


def test_there_have_to_be_replicas_that_divide() -> None:
    """Division is refused if no stage can have two replicas, or under asynchronous schedules."""
    profile, cluster = sized(plain(Random(1), 3), 4, 2), devices(*[AMPLE] * 4)
    for planner in ("joint", "exact", "uniform"):
        with pytest.raises(
            UsageError,
            match="sharding parameters needs two replicas of a stage, which microbatches of 2 samples do not allow",
        ):
            plan(profile, cluster, batch_size=4, microbatch_size=2, planner=planner, shard="parameters")
        with pytest.raises(UsageError, match="schedule pipedream updates with microbatches in flight"):
            plan(
                profile,
                cluster,
                batch_size=8,
                microbatch_size=4,
                planner=planner,
                shard="parameters",
                schedule="pipedream",
            )


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(8))
def test_a_search_that_ends_early_is_no_worse_than_one_for_whole_replicas(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search that ends before its proof still considers the plan of whole replicas, a candidate from the
    start.
    """
    monkeypatch.setattr("pipefit.planner.hybrid.search.WORK", 0)
    rng = Random(seed)
    profile = sized(rng.choice((plain, hostile, skewed))(rng, rng.randrange(2, 5)), 4, 2, 1)
    how, cluster = Training(batch_size=12, microbatches=3), devices(*[AMPLE] * 4)
    made = plan(profile, cluster, how, objective="peak")
    whole = plan(profile, cluster, how, objective="peak", shard="none")
    assert made.provenance and whole.provenance
    assert made.provenance.bound and made.provenance.bound <= made.provenance.value <= whole.provenance.value


@pytest.mark.parametrize(
    ("weight", "machine"), [(1 << 20, "hgx-h100"), (1 << 26, "hgx-h100"), (1 << 20, "4x-rtx-4090")]
)
@pytest.mark.parametrize("shard", ["optimizer", "gradients", "parameters"])
def test_estimated_seconds_are_near_the_simulated_ones(weight: int, machine: str, shard: Sharding) -> None:
    """A stage on all devices whose passes wait for collectives of every block takes about as long as estimated."""
    cluster = load_cluster(machine)
    count = len(cluster.devices)
    layers = keeping(Random(0), widths=[1 << 20] * 7, weights=[weight] * 6)
    how = Training(batch_size=24 * count, microbatches=24, schedule="1f1b")
    question = Question(profile=sized(layers, count, 1), cluster=cluster, training=how)
    (search,) = searches(question, (shard,))
    choice = next(one for one in search.choices if one.degree.data == count)
    estimated = search.seconds(choice, Way(shard)).step[0, question.blocks]
    grid = Grid(
        devices=tuple(range(count)), data=count, shard=shard, buckets=buckets_of(shard, question.blocks)
    )
    seconds = assembled(plan_of(question, Split((0, question.blocks), (0,), (grid,)))).seconds
    assert 0.88 * seconds <= estimated <= 1.1 * seconds


@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b"])
@pytest.mark.parametrize("seed", range(3))
def test_long_steps_are_extrapolated_to_all_microbatches(seed: int, schedule: str) -> None:
    """Plans with few simulated microbatches have the peaks of complete simulations, and about their seconds."""
    rng = Random(seed)
    profile = sized(rng.choice((plain, skewed))(rng, 4), 2, 1)
    how = Training(batch_size=2 * 150, microbatches=150, schedule=schedule)
    question = Question(profile=profile, cluster=devices(*[AMPLE] * 4), training=how)
    for data in (1, 2):
        grids = (
            Grid(devices=tuple(range(data)), data=data),
            Grid(devices=tuple(range(data, 2 * data)), data=data),
        )
        split = Split((0, rng.randrange(1, question.blocks), question.blocks), (0, data), grids)
        short = Simulations(question).of(split)
        complete = Mixed(question, split, short).completed()
        assert not short.is_complete and complete.simulation.is_complete
        assert short.peaks == complete.peaks
        assert short.seconds == pytest.approx(complete.seconds, rel=0.07)
