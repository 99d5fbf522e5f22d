"""The choices of `plan` among schedules, stages and microbatches, against every pinned choice, and the
alternatives it reports.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest

from pipefit.errors import InfeasibleError, UsageError
from pipefit.planner import PlanOptions, Question, answered, plan
from pipefit.planner.baselines.simple import time
from pipefit.planner.bounds import simple_bound
from pipefit.planner.evaluation import Evaluator
from pipefit.planner.open_choices import sizes_of
from pipefit.report import show
from pipefit.schema.cluster import Cluster
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from support.synthetic_models import (
    AMPLE,
    Settings,
    alike,
    chain,
    devices,
    layer,
    measurement,
    profile,
    training,
    value,
)
from support.tight_questions import cluster, keeping_layer

BATCH = 4
NEVER_SLOWER = 1 + 2e-3  # an arrangement must gain a thousandth, and so must each search step


def sized(rng: Random, layers: int) -> Callable[[int], ModelProfile]:
    """Build profiles of one made-up model: bytes grow with the microbatch, seconds at least as fast."""
    drawn = [(rng.randrange(30), rng.randrange(8), float(rng.randrange(1, 5))) for _ in range(layers)]
    fixed = rng.choice((0.0, 0.5))

    def at(size: int) -> ModelProfile:
        slower = fixed + (1 - fixed) * size
        costs = [
            keeping_layer(2 * size, kept * size, weight, seconds * slower) for kept, weight, seconds in drawn
        ]
        loss = layer((value(2 * size), value(size)), (value(4),), seconds=0.5 * slower)
        return profile(replace(measurement(costs, loss), microbatch_size=size))

    return at


def tight_cluster(rng: Random, profiles: Callable[[int], ModelProfile]) -> Cluster:
    """Build devices with a fraction of the memory that the leanest split of the smallest microbatches needs,
    or more.
    """
    count = rng.randrange(2, 4)
    leanest = plan(profiles(1), devices(*[AMPLE] * count), batch_size=BATCH, objective="peak").prediction
    assert leanest
    rate = rng.choice((1.0, 20.0, 100.0))
    budget = round(max(leanest.peak_bytes) * rng.uniform(0.7, 1.6))
    return cluster([budget] * count, host_rate=rate, peer_rate=4 * rate)


def seconds(made: Plan) -> float:
    assert made.prediction
    return made.prediction.step_seconds


def pinned(profiles: Callable[[int], ModelProfile], on: Cluster, **pins: object) -> Plan | None:
    try:
        return plan(profiles, on, batch_size=BATCH, **pins)
    except InfeasibleError:
        return None


def never_slower(seed: int, layers: int) -> None:
    rng = Random(seed)
    profiles = sized(rng, layers)
    on = tight_cluster(rng, profiles)
    made = pinned(profiles, on)
    counts = range(1, len(on.devices) + 1)
    others = [
        pinned(profiles, on, schedule=schedule, stages=stages, microbatch_size=size)
        for schedule, stages, size in product(("1f1b", "eager-1f1b", "gpipe"), counts, sizes_of(BATCH))
    ]
    fitting = [seconds(other) for other in others if other is not None]
    assert (made is None) == (not fitting)
    if made is not None:
        assert seconds(made) <= min(fitting) * NEVER_SLOWER
        assert made.provenance and made.provenance.bound is not None
        assert made.provenance.bound <= min(fitting) * (1 + 1e-9)


@pytest.mark.gallery
@pytest.mark.parametrize("seed", [1, 2])
def test_it_is_never_slower_than_with_any_choice_pinned(seed: int) -> None:
    """The chosen plan is no slower than under any schedule, number of stages and microbatch size, and its
    bound is below all of them.
    """
    never_slower(seed, 3)


@pytest.mark.gallery
@pytest.mark.parametrize("seed", range(100, 112))
def test_it_is_never_slower_with_more_layers(seed: int) -> None:
    """The chosen plan is never slower for four and five layers."""
    never_slower(seed, 4 + seed % 2)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [2, 5, 1])
def test_near_a_plan_its_own_arrangement_is_planned_again(seed: int) -> None:
    """With less memory, the plan near another is as fast as with all of its choices pinned, and keeps its bound."""
    rng = Random(seed)
    profiles = sized(rng, 4)
    on = tight_cluster(rng, profiles)
    made = plan(profiles, on, batch_size=BATCH)
    less = replace(on, devices=tuple(replace(one, memory_bytes=one.memory_bytes - 1) for one in on.devices))
    near = answered(profiles, less, None, PlanOptions(batch_size=BATCH), near=made).plan
    how, stages = made.training, len(made.stages)
    other = pinned(profiles, less, schedule=how.schedule, stages=stages, microbatch_size=how.microbatch_size)
    assert other is not None and (near.training, len(near.stages)) == (how, stages)
    assert seconds(near) == seconds(other)
    assert near.provenance and made.provenance and near.provenance.bound == made.provenance.bound
    assert near.provenance.options == made.provenance.options


def test_what_is_pinned_stays() -> None:
    """Schedule, stages, microbatches and their size can each be pinned while the others are chosen."""
    profiles, on = sized(Random(0), 4), cluster([1 << 20] * 2, host_rate=1.0, peer_rate=1.0)
    assert plan(profiles, on, batch_size=BATCH, schedule="gpipe").training.schedule == "gpipe"
    assert len(plan(profiles, on, batch_size=BATCH, stages=2).stages) == 2
    assert plan(profiles, on, batch_size=BATCH, microbatches=2).training.microbatch_size == 2
    assert plan(profiles, on, batch_size=BATCH, microbatch_size=2).training.microbatches == 2
    assert plan(profiles(2), on, batch_size=BATCH).training.microbatch_size == 2
    made = plan(
        profiles(2),
        on,
        training(
            "pipedream",
            4,
        ).__class__(batch_size=8, microbatches=4),
    )
    assert (made.training.schedule, made.training.microbatches) == ("1f1b", 4)


def test_asynchronous_schedules_are_only_taken_if_asked_for() -> None:
    """Asynchronous schedules change the numbers, so they are never a default."""
    profiles, on = sized(Random(1), 4), cluster([1 << 20] * 2, host_rate=100.0, peer_rate=100.0)
    free, endless = (plan(profiles, on, batch_size=BATCH, schedule=name) for name in (None, "pipedream-2bw"))
    assert free.training.schedule in ("1f1b", "eager-1f1b")
    assert endless.training.schedule == "pipedream-2bw"


def test_numbers_that_contradict_each_other_are_refused() -> None:
    """Contradictory numbers (three when two suffice, or a training next to numbers) are refused; a batch that
    works is named.
    """
    with pytest.raises(UsageError, match="microbatches of 4 samples: use 12 samples, or 16"):
        plan(profile(alike(4)), devices(AMPLE), batch_size=13, microbatch_size=4)
    with pytest.raises(UsageError, match="microbatches=3 of microbatch_size=4 do not make a batch of 8"):
        plan(profile(alike(4)), devices(AMPLE), batch_size=8, microbatches=3, microbatch_size=4)
    with pytest.raises(UsageError, match="not both"):
        plan(profile(alike(4)), devices(AMPLE), training("1f1b", 4), schedule="gpipe")


def test_a_size_that_cannot_be_profiled_is_left_out() -> None:
    """A microbatch size that cannot be profiled, such as one sample for batch norm, is skipped; if all fail,
    the first refusal is raised.
    """
    profiles, asked = sized(Random(2), 4), list[int]()

    def even(size: int) -> ModelProfile:
        asked.append(size)
        if size == 1:
            raise UsageError("one sample has no variance")
        return profiles(size)

    on = cluster([1 << 20] * 2, host_rate=1.0, peer_rate=1.0)
    assert plan(even, on, batch_size=BATCH).training.microbatch_size > 1
    assert 1 in asked

    def never(size: int) -> ModelProfile:
        raise UsageError(f"nothing can be had of {size}")

    with pytest.raises(UsageError, match="nothing can be had of 1"):
        plan(never, on, batch_size=BATCH)


def test_sizes_divide_the_batch_and_double_at_least() -> None:
    """Sizes range from one sample to the whole batch: powers of two that divide it."""
    for batch in range(1, 100):
        sizes = sizes_of(batch)
        assert sizes[0] == 1 and all(batch % size == 0 for size in sizes)
        assert all(other >= 2 * one for one, other in pairwise(sizes))
        assert not any(batch % size == 0 for size in range(2 * sizes[-1], batch + 1))
    assert sizes_of(64) == (1, 2, 4, 8, 16, 32, 64)
    assert sizes_of(1 << 32) == tuple(1 << power for power in range(33))  # computed without counting that far


@pytest.mark.parametrize("seed", range(20))
def test_no_split_takes_less_than_the_simple_bound(seed: int) -> None:
    """No split beats the simple bound, for any schedule, number of stages and microbatches, simulated without
    recomputation.
    """
    rng = Random(seed)
    chain = sized(rng, 5)(1)
    stages = rng.randrange(1, 5)
    schedule = rng.choice(("1f1b", "eager-1f1b", "gpipe", "torchgpipe", "pipedream", "pipedream-2bw"))
    how = training(schedule, rng.randrange(stages, 9))
    question = Question(
        profile=chain, cluster=devices(*[AMPLE] * stages), training=how, options=PlanOptions(stages=stages)
    )
    evaluator = Evaluator(question)
    assert simple_bound(question) <= evaluator.kept_at(time(question).split).seconds * (1 + 1e-9)


def asked_again(profiles: Callable[[int], ModelProfile], on: Cluster, words: str) -> Plan:
    """Return the plan for the command-line options of an alternative."""
    parts = shlex.split(words)
    pins: dict[str, object] = {}
    for name, text in zip(parts[::2], parts[1::2], strict=True):
        pins[name.removeprefix("--").replace("-", "_")] = int(text) if text.isdigit() else text
    how = {"microbatches": BATCH, "schedule": "1f1b"} | pins
    return plan(profiles, on, batch_size=BATCH, **how)


def test_alternatives_are_what_their_options_ask_for() -> None:
    """Alternatives include the fewest devices that fit and the leanest plan, with simulated peaks and
    seconds.
    """
    profiles = sized(Random(3), 4)
    most = plan(profiles(1), devices(*[AMPLE] * 4), batch_size=BATCH, objective="peak", stages=2).prediction
    assert most
    on = cluster([max(most.peak_bytes) * 5 // 4] * 4, host_rate=5.0, peer_rate=5.0)
    made = plan(profiles, on, batch_size=BATCH)
    assert {one.what for one in made.alternatives} == {"fewest devices", "leanest"}
    for one in made.alternatives:
        again = asked_again(profiles, on, one.asked_by)
        assert again.prediction
        assert (len(again.stages), again.training.microbatches) == (one.stages, one.microbatches)
        if one.what == "leanest":
            assert max(again.prediction.peak_bytes) == one.peak_bytes < max(made.prediction.peak_bytes)
            assert again.prediction.step_seconds == one.step_seconds
        else:
            assert one.devices < len(made.workers) and again.prediction.step_seconds <= one.step_seconds
        assert len(again.workers) == one.devices
        assert f"{one.what.capitalize()}: {one.devices} device" in show.text(made)


@pytest.mark.parametrize(("width", "leaner"), [(16, True), (4, False)])
def test_a_plan_that_is_hardly_leaner_is_no_alternative(width: int, leaner: bool) -> None:
    """A plan that saves less than a hundredth, in activations beside the parameters, is no alternative."""
    like = Settings(
        widths=[width] * 5,
        weights=[1010, *[10] * 3],
        states=[0] * 4,
        scratch=[0] * 4,
        seconds=[99.0] * 4,
    )
    costs = profile(chain(Random(0), like))
    made = plan(costs, devices(*[AMPLE] * 2), batch_size=8, stages=2)
    lean = plan(costs, devices(*[AMPLE] * 2), batch_size=8, stages=2, objective="peak", recompute="always")
    assert (
        made.prediction
        and lean.prediction
        and max(lean.prediction.peak_bytes) < max(made.prediction.peak_bytes)
    )
    assert ("leanest" in {one.what for one in made.alternatives}) is leaner


def test_a_single_arrangement_has_no_alternatives() -> None:
    """Without choices nothing is priced and no choices are reported."""
    made = plan(profile(alike(8)), devices(*[AMPLE] * 2), batch_size=8, schedule="1f1b", stages=2)
    assert made.alternatives == () and "chosen from" not in show.text(made)


@pytest.mark.parametrize(
    ("overhead", "backend", "size"), [(0.005, "cuda", 2), (0.005, "emulated", 4), (0.1, "cuda", 4)]
)
def test_a_gpu_is_left_room_unless_that_costs_a_hundredth(overhead: float, backend: str, size: int) -> None:
    """The largest and fastest of three sizes fills a GPU; it is chosen when faster by over one per cent, not
    by a quarter.
    """

    def at(size: int) -> ModelProfile:
        cost = replace(keeping_layer(2 * size, 1000 * size, 10, size + overhead), update=once.update)
        loss = layer((value(2 * size), value(size)), (value(4),), seconds=0.5 * size)
        return profile(replace(measurement([cost, cost], loss), microbatch_size=size))

    once = keeping_layer(1, 1, 10, 1.0)
    ample = plan(at, devices(AMPLE), batch_size=BATCH, microbatch_size=4).prediction
    assert ample
    tight = replace(devices(round(ample.peak_bytes[0] / 0.97)), backend=backend).reserving([0])
    made = plan(at, tight, batch_size=BATCH)
    assert made.training.microbatch_size == size
