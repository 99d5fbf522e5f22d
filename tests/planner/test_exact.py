"""The exact planner against the exhaustive one, a separate search, and against its claims."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, combinations, pairwise, permutations
from random import Random

import pytest

from pipefit.errors import UsageError
from pipefit.lowering import ENDLESS
from pipefit.lowering.passes.recomputation import Recompute, recompute_decisions
from pipefit.planner import PlanOptions, exact, plan
from pipefit.planner.baselines.simple import exhaustive
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Measurement
from pipefit.schema.training import Training
from pipefit.simulator import Simulation, simulate
from support.gallery_samples import seeds
from support.planner_calls import asked
from support.storage_account import peaks
from support.synthetic_models import (
    WHOLE_STAGES,
    alike,
    any_training,
    block_sizes,
    devices,
    hostile,
    measurement,
    plain,
    profile,
    skewed,
    training,
    vgg_like,
)

AMPLE = 1 << 40


def both(
    chain: Measurement,
    cluster: Cluster,
    how: Training,
    stages: int | None = None,
    recompute: Recompute = "never",
) -> tuple[Plan, Plan]:
    options = PlanOptions(stages=stages, recompute=recompute, allow_infeasible=True)
    question = (profile(chain), cluster, how, options)
    return asked(exact, *question), asked(exhaustive, *question)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_exact_finds_the_best_of_all_3654_splits_of_vgg(schedule: str) -> None:
    """For 30 layers on 4 devices the plan equals that of trying every split, and reports so."""
    found, best = both(vgg_like(), devices(*[AMPLE] * 4), training(schedule, 12))
    assert best.provenance and best.provenance.evaluated == 3654
    assert found.stages == best.stages
    assert found.prediction == best.prediction


@pytest.mark.sample(10)
@pytest.mark.parametrize("seed", seeds(60, of=120))
def test_exact_is_exhaustive_on_equal_devices(seed: int) -> None:
    """With small integer costs, so that peaks tie in every column, the split is the same down to the
    tie-break.
    """
    rng = Random(seed)
    count = rng.randrange(1, 11)
    cluster = devices(*[AMPLE] * rng.randrange(1, 6))
    stages = rng.choice((None, rng.randrange(1, min(count, len(cluster.devices)) + 1)))
    chain = rng.choice((plain, hostile))(rng, count, size=rng.choice((2, 4, 30)))
    found, best = both(chain, cluster, any_training(rng), stages, rng.choice(WHOLE_STAGES))
    assert found.stages == best.stages


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", seeds(50, of=100))
def test_exact_is_exhaustive_on_mixed_devices(seed: int) -> None:
    """Devices of two or three sizes, in any order, some of them unused, give the same stages and devices."""
    rng = Random(seed)
    count = rng.randrange(2, 9)
    cluster = devices(*(rng.choice((60, 100, 100, 175)) for _ in range(rng.randrange(2, 6))))
    stages = rng.choice((None, rng.randrange(1, min(count, len(cluster.devices)) + 1)))
    chain = rng.choice((plain, hostile))(rng, count, size=rng.choice((2, 4, 30)))
    found, best = both(chain, cluster, any_training(rng), stages, rng.choice(WHOLE_STAGES))
    assert found.stages == best.stages


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", seeds(20, of=60))
def test_exact_is_exhaustive_where_blocks_are_recomputed_by_themselves(seed: int) -> None:
    """The highest peak is that of the best of all splits, and proven if the plan says so."""
    rng = Random(seed)
    count, cluster = rng.randrange(2, 8), devices(*[AMPLE] * rng.randrange(1, 4))
    chain = plain(rng, count, size=rng.choice((4, 30)))
    found, best = both(chain, cluster, any_training(rng), None, "always")
    assert found.prediction and best.prediction and found.provenance
    assert max(found.prediction.peak_bytes) == max(best.prediction.peak_bytes) == found.provenance.value
    assert found.provenance.bound == found.provenance.value


@pytest.mark.sample(5)
@pytest.mark.parametrize("schedule", ENDLESS)
@pytest.mark.parametrize("seed", seeds(25, of=40))
def test_exact_is_exhaustive_under_endless_schedules(schedule: str, seed: int) -> None:
    """If early stages hold more weight versions, stages and simulated peaks are still those of exhaustive
    search.
    """
    rng = Random(seed)
    count = rng.randrange(1, 10)
    cluster = devices(*(rng.choice((60, 100, 100)) for _ in range(rng.randrange(1, 5))))
    stages = rng.randrange(1, min(count, len(cluster.devices)) + 1)
    how = training(schedule, rng.randrange(stages if schedule == "pipedream-2bw" else 1, 9))
    how = replace(how, versions=rng.choice(("weights", "everything")))
    chain = hostile(rng, count, size=rng.choice((2, 4, 30)), shared=0)
    found, best = both(chain, cluster, how, stages, rng.choice(("never", "stages")))
    assert found.stages == best.stages
    assert found.prediction
    assert found.prediction.peak_bytes == Simulation(found).peak_bytes


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", seeds(30, of=60))
def test_exact_is_exhaustive_where_layers_differ_by_orders_of_magnitude(seed: int) -> None:
    """A layer that is too large for one stage of 1F1B may fit a later one, which holds fewer microbatches."""
    rng = Random(seed)
    stages = rng.randrange(3, 8)
    found, best = both(
        skewed(rng, rng.randrange(stages, 13)), devices(*[AMPLE] * stages), training("1f1b", 8)
    )
    assert found.stages == best.stages


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", seeds(16, of=60))
def test_exact_is_the_best_of_all_splits_between_blocks(seed: int) -> None:
    """Layers of one block stay on one stage, with any saved and aliased storages; the oracle is the account
    of all such splits.
    """
    rng = Random(seed)
    blocks = rng.randrange(3, 7)
    sizes = block_sizes(rng, rng.randrange(blocks, 13), blocks)
    asked_of = profile(rng.choice((plain, hostile, skewed))(rng, sum(sizes)), blocks=sizes)
    recompute = rng.choice(WHOLE_STAGES)
    question = (asked_of, devices(*[AMPLE] * 3), any_training(rng), PlanOptions(recompute=recompute))
    found, best = asked(exact, *question), asked(exhaustive, *question)
    assert found.stages == best.stages
    inner = list(accumulate(sizes))[:-1]
    splits = [(0, *cuts, sum(sizes)) for cuts in combinations(inner, 2)]
    assert (0, *accumulate(found.split)) in splits
    assert fullest(found) == min(fullest(with_edges(found, edges, recompute)) for edges in splits)


def with_edges(plan: Plan, edges: Sequence[int], recompute: Recompute) -> Plan:
    """Return the plan with other stages, all with the same recomputation."""
    stages = tuple(
        Stage(start=start, stop=stop, grid=stage.grid)
        for stage, (start, stop) in zip(plan.stages, pairwise(edges), strict=True)
    )
    how = plan.training
    decisions = recompute_decisions(stages, plan.profile.edges, recompute, how.schedule, how.microbatches)
    return replace(plan, stages=stages, decisions=decisions)


def test_exact_is_exhaustive_where_every_layer_is_alike() -> None:
    """Splits of equal layers tie; the documented rule decides, in both planners equally."""
    found, best = both(alike(12), devices(*[AMPLE] * 5), training("1f1b", 3))
    assert found.stages == best.stages


def test_a_heavy_layer_leaves_the_others_balanced() -> None:
    """One layer decides the fullest device in every split; the rest is still balanced."""
    chain = plain(Random(5), 12)
    layers = list(chain.costs)
    layers[4] = replace(layers[4], parameters=(replace(layers[4].parameters[0], nbytes=5000),))
    found, best = both(measurement(layers, chain.loss), devices(*[AMPLE] * 5), training("1f1b", 4))
    assert found.stages == best.stages


@pytest.mark.gallery
@pytest.mark.parametrize("seed", seeds(1, of=15))
def test_no_split_is_below_the_bound(seed: int) -> None:
    """Bound and value are the peak of the fullest device, by the account; no split in any order has less."""
    rng = Random(seed)
    chain, cluster = hostile(rng, 6), devices(100, 150, 100)
    found = asked(exact, profile(chain), cluster, training("1f1b", 3), PlanOptions(allow_infeasible=True))
    assert found.provenance and found.provenance.bound == found.provenance.value
    assert fullest(found) == found.provenance.value
    for cuts in combinations(range(1, 6), 2):
        for order in permutations(range(3)):
            edges = (0, *cuts, 6)
            stages = tuple(Stage(start=edges[s], stop=edges[s + 1], grid=Grid.of(order[s])) for s in range(3))
            assert fullest(replace(found, stages=stages)) >= found.provenance.bound


def fullest(plan: Plan) -> float:
    """Return the fullest device of a plan, as a share of its budget, by the account."""
    return max(peak / budget for peak, budget in zip(peaks(plan), plan.cluster.budgets, strict=True))


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", seeds(20, of=30))
def test_predicted_peaks_are_what_the_simulator_finds(seed: int) -> None:
    """Predicted peaks match the simulator to the byte, on every device, over two steps, under any schedule
    and recomputation, and so does the time.
    """
    rng = Random(seed)
    options = PlanOptions(stages=3, recompute=rng.choice(WHOLE_STAGES))
    plan = asked(exact, profile(hostile(rng, 7)), devices(*[AMPLE] * 4), any_training(rng), options)
    assert plan.prediction
    assert plan.prediction.peak_bytes == simulate(plan, steps=2).peak_bytes
    assert plan.prediction.peak_bytes[3] == 0
    assert plan.prediction.step_seconds == simulate(plan).step_seconds[-1]


def test_the_same_question_has_the_same_answer() -> None:
    """A plan is deterministic except for its planning time."""
    question = (
        profile(plain(Random(1), 20)),
        devices(70, 70, 90, 90),
        training(),
        PlanOptions(allow_infeasible=True),
    )
    first, second = asked(exact, *question), asked(exact, *question)
    assert first.provenance and second.provenance
    assert replace(first, provenance=replace(first.provenance, seconds=0.0)) == replace(
        second, provenance=replace(second.provenance, seconds=0.0)
    )


def test_one_device_holds_everything() -> None:
    """A single device holds a pipeline of one stage."""
    plan = asked(exact, profile(plain(Random(2), 9)), devices(AMPLE), training("gpipe", 3))
    assert plan.split == (9,)


@pytest.mark.sample(4)
@pytest.mark.parametrize("planner", ["exact", "uniform", "time", "joint"])
@pytest.mark.parametrize("schedule", ENDLESS)
@pytest.mark.parametrize("seed", range(4))
def test_layers_that_share_a_parameter_are_in_one_stage_under_endless_schedules(
    planner: str, schedule: str, seed: int
) -> None:
    """Asynchronous stages update separately, so layers that share a parameter form one block, with all layers
    between them. Exact is exhaustive over the remaining splits.
    """
    rng = Random(seed)
    chain = hostile(rng, rng.randrange(3, 8), shared=1)
    cluster, how = devices(*[AMPLE] * 3), training(schedule, 4)
    made = plan(profile(chain), cluster, how, planner=planner)
    spans = [one.users for one in chain.shared if one.gradient_bytes]
    cuts = {stage.stop for stage in made.stages[:-1]}
    assert not any(users[0] < cut <= users[-1] for users in spans for cut in cuts)
    assert made.prediction and made.prediction.peak_bytes == Simulation(made).peak_bytes
    if planner == "exact":
        found, best = both(chain, cluster, how)
        assert found.stages == best.stages == made.stages
    inside = sum(any(users[0] < cut <= users[-1] for users in spans) for cut in range(1, len(chain.layers)))
    if inside:
        with pytest.raises(
            UsageError, match=r"share a parameter, .* in one stage.*plan with at most \d+ stages?"
        ):
            plan(profile(chain), devices(*[AMPLE] * 9), how, planner=planner, stages=len(chain.layers))
