"""Every planner against every case, and the promise of each baseline."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from itertools import combinations, pairwise
from math import comb
from random import Random
from typing import get_type_hints

import pytest

from pipefit.errors import UsageError
from pipefit.planner import PLANNERS, PlanArguments, PlanOptions, exact, plan
from pipefit.planner.baselines.simple import lightest_parts
from pipefit.schema.profile import AdditiveCosts, Measurement, ModelProfile
from pipefit.schema.training import Training
from support.gallery_samples import sampled
from support.planner_calls import asked
from support.synthetic_models import alike, devices, hostile, plain, profile, training, vgg_like

AMPLE = 1 << 40
CASES = {
    "vgg": (vgg_like(), devices(*[AMPLE] * 4), training("1f1b", 8), None),
    "one layer": (plain(Random(0), 1), devices(*[AMPLE] * 3), training("gpipe", 2), None),
    "as many layers as devices": (plain(Random(1), 4), devices(*[AMPLE] * 4), training("1f1b", 1), None),
    "fewer layers than devices": (plain(Random(2), 3), devices(*[AMPLE] * 5), training("1f1b", 4), None),
    "fewer stages than devices": (hostile(Random(3), 9), devices(*[AMPLE] * 5), training("gpipe", 4), 3),
    "one device": (hostile(Random(4), 9), devices(AMPLE), training("1f1b", 4), None),
    "unlike devices": (hostile(Random(5), 8), devices(AMPLE, 2 * AMPLE, AMPLE), training("1f1b", 9), None),
    "all alike": (alike(11), devices(*[AMPLE] * 3), training("gpipe", 3), None),
    "PipeDream": (hostile(Random(7), 9, shared=0), devices(*[AMPLE] * 4), training("pipedream", 3), None),
    "two versions": (
        hostile(Random(8), 8, shared=0),
        devices(*[AMPLE] * 3),
        training("pipedream-2bw", 5),
        None,
    ),
    "devices too small": (plain(Random(6), 8), devices(1, 1, 2), training("1f1b", 2), None),
}


SLOW = ("bayesian", "mcap_bo")  # tried on a few cases in every run, on all in the gallery
EVERY = [(planner, case) for planner in PLANNERS for case in CASES]
OFTEN = [
    (p, c)
    for p, c in EVERY
    if p not in SLOW or c in ("fewer stages than devices", "unlike devices", "PipeDream")
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("planner", "case"), sampled(EVERY, often=OFTEN))
def test_a_plan_holds_every_layer_once_and_predicts_every_device(
    planner: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every planner's plan has all layers in order, a device for each stage and peaks, and
    never beats exact.
    """
    if planner in SLOW:
        pytest.importorskip("skopt")
        monkeypatch.setattr(
            sys.modules["pipefit.planner.baselines.mcap"], "EVALUATIONS", 11
        )  # all 75 take a minute
    chain, cluster, how, stages = CASES[case]
    options = PlanOptions(stages=stages, allow_infeasible=True)
    made = asked(PLANNERS[planner], with_runs(chain, how), cluster, how, options)
    assert [layer for s in made.stages for layer in range(s.start, s.stop)] == list(range(len(chain.layers)))
    assert len(made.stages) == (stages or min(len(chain.layers), len(cluster.devices)))
    assert made.prediction and made.provenance and made.provenance.planner == planner
    used = {stage.device for stage in made.stages}
    assert all((peak > 0) == (device in used) for device, peak in enumerate(made.prediction.peak_bytes))
    assert made.prediction.step_seconds > 0
    best = asked(exact, profile(chain), cluster, how, options)
    assert best.prediction
    assert made.decisions or fullness(best) <= fullness(
        made
    )  # recomputation and offload may empty them further


def with_runs(chain: Measurement, how: Training) -> ModelProfile:
    """Return the profile with the outputs' bytes as results of training runs under the requested training."""
    found = profile(chain)
    sizes = tuple(sum(value.nbytes for value in cost.outputs) for cost in chain.costs)
    return replace(found, additive=AdditiveCosts(mem_isolated=sizes, mem_added=sizes, training=how))


def fullness(made) -> list[float]:
    """Return each device's share of memory in use, the fullest first."""
    return sorted(
        (p / b for p, b in zip(made.prediction.peak_bytes, made.cluster.budgets, strict=True)), reverse=True
    )


@pytest.mark.parametrize("seed", range(60))
def test_the_heaviest_part_is_as_light_as_any_split_allows(seed: int) -> None:
    """The heaviest part is as light as any split allows, with zeros among the weights."""
    rng = Random(seed)
    weights = [rng.choice((0, 1, rng.randrange(50))) for _ in range(rng.randrange(1, 10))]
    parts = rng.randrange(1, len(weights) + 1)
    heaviest, edges = lightest_parts(weights, parts)
    assert len(edges) == parts + 1 and all(a < b for a, b in pairwise(edges))
    splits = [(0, *cuts, len(weights)) for cuts in combinations(range(1, len(weights)), parts - 1)]
    assert (
        heaviest == max(heaviness(weights, edges)) == min(max(heaviness(weights, split)) for split in splits)
    )


def heaviness(weights: list[int], edges: tuple[int, ...]) -> list[int]:
    return [sum(weights[a:b]) for a, b in pairwise(edges)]


@pytest.mark.parametrize(("layers", "stages"), [(10, 3), (9, 3), (7, 7), (30, 4)])
def test_uniform_stages_differ_by_at_most_one_layer(layers: int, stages: int) -> None:
    """Uniform stages differ by at most one layer, and the longer ones come first."""
    made = plan(profile(alike(layers)), devices(*[AMPLE] * stages), batch_size=4, planner="uniform")
    assert max(made.split) - min(made.split) <= 1
    assert list(made.split) == sorted(made.split, reverse=True)


def test_parameters_weighs_parameters_and_time_weighs_seconds() -> None:
    """`parameters` and `time` disagree on this chain: each is best by its measure and reports its value."""
    chain = vgg_like()
    weigh = {
        "parameters": [cost.parameter_bytes for cost in chain.costs],
        "time": [cost.forward.seconds + cost.backward.seconds for cost in chain.costs],
    }
    weigh["time"][-1] += chain.loss.forward.seconds + chain.loss.backward.seconds
    made = {name: plan(profile(chain), devices(*[AMPLE] * 4), batch_size=8, planner=name) for name in weigh}
    for name, weights in weigh.items():
        heaviest = {other: max(heaviness(weights, (0, *made[other].boundaries, 30))) for other in made}
        assert heaviest[name] == min(heaviest.values())
        assert made[name].provenance.value == pytest.approx(heaviest[name])
    assert made["parameters"].split != made["time"].split


# ------------------------------------------------------------------ the question


def test_the_training_follows_from_profile_and_cluster() -> None:
    """By default a batch is four microbatches of the profiled size for each device; `exact`
    plans for 1f1b.
    """
    made = plan(profile(alike(8)), devices(*[AMPLE] * 4), objective="peak")
    assert made.training == Training(batch_size=16, microbatches=16, schedule="1f1b")


@pytest.mark.parametrize(
    ("said", "follows"),
    [
        ({"batch_size": 12}, (12, 12)),
        ({"microbatches": 5}, (5, 5)),
        ({"batch_size": 6, "microbatches": 6}, (6, 6)),
    ],
)
def test_what_is_said_of_the_batch_decides_the_rest(said: dict[str, int], follows: tuple[int, int]) -> None:
    """Batch size and number of microbatches follow from either or both."""
    made = plan(profile(alike(8)), devices(*[AMPLE] * 4), **said)
    assert (made.training.batch_size, made.training.microbatches) == follows


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"planner": "best"}, "unknown planner 'best': choose one of joint, mpress, exact, exhaustive"),
        ({"objective": "best"}, "objective must be 'throughput' or 'peak', not 'best'"),
        ({"schedule": "zigzag"}, "unknown schedule 'zigzag'"),
        ({"stages": 9, "cluster": devices(*[AMPLE] * 9)}, "has 8 layers, too few for 9 stages"),
        ({"stages": 5}, "has 4 devices, too few for 5 stages"),
        ({"stages": 0}, "at least one stage"),
        ({"batch_size": 8, "microbatches": 4}, "was profiled at microbatch size 1, not 2"),
        ({"training": training(), "batch_size": 8}, "not both"),
    ],
)
def test_a_wrong_question_is_refused(wrong: dict[str, object], says: str) -> None:
    """A wrong question is refused with the numbers, before any planning."""
    with pytest.raises(UsageError, match=says):
        plan(profile(alike(8)), **{"cluster": devices(*[AMPLE] * 4), **wrong})


@pytest.mark.sample(2)
@pytest.mark.parametrize("planner", ["joint", "exact"])
@pytest.mark.parametrize("batch", [5, 100])
def test_a_batch_that_microbatches_do_not_divide_is_refused_with_ones_that_they_do(
    batch: int, planner: str
) -> None:
    """A batch that microbatches do not divide is refused with sizes that can be planned."""
    costs = replace(
        profile(alike(8)), measurements=(replace(profile(alike(8)).measurements[0], microbatch_size=32),)
    )
    cluster = devices(*[AMPLE] * 4)
    with pytest.raises(
        UsageError, match=f"a batch of {batch} is not a whole number of microbatches of 32"
    ) as refusal:
        plan(costs, cluster, batch_size=batch, planner=planner)
    named = re.findall(r"[0-9]+", str(refusal.value).partition(": use ")[2])
    assert named
    for size in map(int, named):
        assert plan(costs, cluster, batch_size=size, planner=planner).training.microbatches * 32 == size


def test_the_exhaustive_planner_refuses_what_it_cannot_finish() -> None:
    """The exhaustive planner refuses too many splits, with their number and an alternative."""
    with pytest.raises(
        UsageError, match=f"100 layers on 16 stages split in {comb(99, 15):,} ways.*exact planner"
    ):
        plan(profile(alike(100)), devices(*[AMPLE] * 16), planner="exhaustive")


def test_the_keyword_arguments_of_plan_are_the_fields_of_its_options() -> None:
    """Type checkers see a TypedDict with the names and types of the frozen options."""
    assert get_type_hints(PlanArguments) == get_type_hints(PlanOptions)
