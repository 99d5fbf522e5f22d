"""The joint planner against every plan of small questions, and its guarantees for any question."""

from __future__ import annotations

import sys
from dataclasses import replace
from random import Random

import pytest

from pipefit.errors import InfeasibleError
from pipefit.memory.arenas import check_room, room_needed
from pipefit.planner import PlanOptions, Question, exact, plan, solved, time
from pipefit.planner.evaluation import Candidate, Evaluation, Evaluator
from pipefit.planner.joint import JointSearch, joint
from pipefit.schema.devices import Host, Member
from pipefit.schema.plan import Plan
from pipefit.simulator import Simulation
from pipefit.simulator.assembled import assembled
from support.gallery_samples import seeds
from support.synthetic_models import (
    AMPLE,
    any_training,
    devices,
    hostile,
    profile,
    small_first,
    training,
    vgg_like,
)
from support.tight_questions import Case, fastest, random_case

SCHEDULES = ("1f1b", "gpipe", "torchgpipe", "eager-1f1b")
GAP = 0.10  # above the fastest of all plans, if all can be tried


def planned(case: Case, *, allow_infeasible: bool = False) -> Plan:
    options = PlanOptions(allow_infeasible=allow_infeasible)
    question = Question(profile=case.profile, cluster=case.cluster, training=case.training, options=options)
    return solved(question, joint, name="joint")


def check(case: Case, found: Plan) -> None:
    """Check that the plan fits and takes its predicted seconds in a separate simulation, and respects its
    bound.
    """
    simulation = Simulation(found)
    assert found.prediction and found.provenance
    assert simulation.peak_bytes == found.prediction.peak_bytes
    assert all(p <= b for p, b in zip(simulation.peak_bytes, case.cluster.budgets, strict=True))
    assert found.prediction.step_seconds == assembled(found).seconds == found.provenance.value
    assert found.provenance.bound is not None and found.provenance.bound <= found.provenance.value


def within_the_gap(seed: int, layers: int) -> None:
    case = random_case(Random(seed), SCHEDULES, layers=layers)
    best = fastest(case)
    if best is None:
        return
    found = planned(case)
    check(case, found)
    assert found.prediction is not None and found.prediction.step_seconds <= best * (1 + GAP)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", seeds(8, of=16))
def test_it_is_close_to_the_fastest_of_all_plans(seed: int) -> None:
    """If any enumerated plan fits, the answer is within the gap, for three layers on one or two devices."""
    within_the_gap(seed, 3)


@pytest.mark.gallery
@pytest.mark.parametrize("layers", [4, 5])
@pytest.mark.parametrize("seed", range(100, 125))
def test_it_is_close_to_the_fastest_of_thousands_of_plans(seed: int, layers: int) -> None:
    """The answer is close to the fastest of thousands of plans, for four and five layers."""
    within_the_gap(seed, layers)


def test_a_device_frees_memory_so_that_it_may_lend() -> None:
    """A plan that is as fast as the fastest of all frees memory of the first device, and lends it to the second,
    whose layer keeps much.
    """
    case = random_case(Random(36), ("torchgpipe",))
    found = planned(case)
    check(case, found)
    assert {(str(d.place), d.stage) for d in found.decisions if d.place} > {("device0", 1)}
    assert any(d.stage == 0 for d in found.decisions)
    assert found.prediction is not None and found.prediction.step_seconds <= fastest(case)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", seeds(6, of=12))
def test_it_does_nothing_that_it_does_not_need(seed: int) -> None:
    """Without any one technique of any one stage, the plan would not fit or be slower."""
    case = random_case(Random(seed), SCHEDULES, layers=4)
    found = planned(case, allow_infeasible=True)
    fits = Simulation(found)
    if any(p > b for p, b in zip(fits.peak_bytes, case.cluster.budgets, strict=True)):
        return
    for stage, kind in {(d.stage, (d.what, type(d.subject))) for d in found.decisions}:
        kept = tuple(d for d in found.decisions if (d.stage, (d.what, type(d.subject))) != (stage, kind))
        without = Simulation(replace(found, decisions=kept))
        over = any(p > b for p, b in zip(without.peak_bytes, case.cluster.budgets, strict=True))
        assert over or without.step_seconds[-1] > fits.step_seconds[-1], (stage, kind)


OTHERS = ("exact", "time", "uniform", "parameters", "first_last", "bisection")


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", seeds(6, of=12))
def test_it_is_never_slower_than_another_planner_whose_split_fits(seed: int) -> None:
    """`joint` is never slower, for any layers, schedule and memory, including asynchronous schedules and odd
    costs.
    """
    rng = Random(seed)
    chain = hostile(rng, 4 + small_first(seed, largest=6), shared=0)
    how = any_training(rng) if seed % 3 else training(rng.choice(("pipedream", "pipedream-2bw")), 4)
    roomy = plan(profile(chain), devices(*[AMPLE] * 3), how, planner="exact")
    assert roomy.prediction
    budget = round(max(roomy.prediction.peak_bytes) * rng.choice((1.0, 1.2, 2.0)))
    case = Case(profile(chain), devices(*[budget] * 3), how)
    found = planned(case)
    check(case, found)
    assert found.prediction
    for name in OTHERS:
        other = plan(case.profile, case.cluster, how, planner=name, allow_infeasible=True)
        assert other.prediction
        if max(other.prediction.peak_bytes) <= budget:
            assert found.prediction.step_seconds <= other.prediction.step_seconds * (1 + 1e-9)


def test_with_ample_memory_nothing_is_moved_or_recomputed() -> None:
    """With ample memory the plan is a split alone, without a word about lending."""
    found = planned(Case(profile(vgg_like()), devices(*[AMPLE] * 4), training("1f1b", 8)))
    assert found.decisions == () and found.provenance and found.provenance.remarks == ()


def test_what_is_pinned_stays() -> None:
    """If the question pins recomputation, only splits are chosen."""
    case = Case(profile(vgg_like()), devices(*[AMPLE] * 4), training("1f1b", 8))
    question = Question(
        profile=case.profile,
        cluster=case.cluster,
        training=case.training,
        options=PlanOptions(recompute="stages"),
    )
    found = solved(question, joint, name="joint")
    assert [decision.why for decision in found.decisions] == ["requested by recompute=stages"] * 4


def test_it_trains_what_fits_under_no_split() -> None:
    """A chain of layers that keep much trains with half of the leanest split's memory."""
    case = random_case(Random(1), ("1f1b",), layers=3)
    with pytest.raises(InfeasibleError):
        plan(case.profile, case.cluster, case.training, planner="exact")
    check(case, planned(case))


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [2, 15])
def test_a_host_has_room_for_what_is_pinned(seed: int) -> None:
    """GPUs pin powers of two: if the host has a byte less, another plan is found that can run."""
    case = random_case(Random(seed), SCHEDULES[:2], layers=3)
    devices = tuple(replace(device, reserve_bytes=0) for device in case.cluster.devices)
    gpus = replace(case.cluster, backend="cuda", devices=devices)
    found = planned(case._replace(cluster=gpus))
    pinned = room_needed(found, Simulation(found).arenas)[Member.host(0)].total()
    less = replace(gpus, hosts=(Host(memory_bytes=pinned - 1),))
    other = planned(case._replace(cluster=less))
    check_room(other, Simulation(other).arenas)


def long_steps(schedule: str, count: int = 3) -> Question:
    """Build a hundred microbatches on `count` devices, each with less memory than the leanest split needs."""
    how = training(schedule, 100)
    leanest = plan(profile(vgg_like()), devices(*[AMPLE] * count), how, planner="exact").prediction
    assert leanest
    budget = round(0.8 * max(leanest.peak_bytes))
    return Question(profile=profile(vgg_like()), cluster=devices(*[budget] * count), training=how)


@pytest.mark.parametrize("schedule", [*SCHEDULES, "pipedream"])
def test_a_long_step_simulated_in_short_is_the_long_step(schedule: str) -> None:
    """Abridged simulation is exact: peaks to the byte, seconds to a thousandth for splits without techniques.

    Under eager 1F1B, microbatches in flight may hide a slow first stage from the last one for long.
    """
    evaluator = Evaluator(long_steps(schedule))
    for split in {planner(evaluator.question).split for planner in (exact, time)}:
        candidate = evaluator.kept(split)
        short, whole = evaluator.evaluate(candidate), evaluator.whole(candidate)
        assert short is not None
        assert short.peaks == whole.peaks
        assert short.seconds == pytest.approx(whole.seconds, rel=2e-2 if schedule == "eager-1f1b" else 1e-3)
        assert (short.simulation.actions < whole.simulation.actions / 4) == ("gpipe" not in schedule)


def test_where_a_few_microbatches_mislead_the_next_best_plan_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plan of a long step has the seconds of all microbatches, though the search simulated a few. If
    abridged simulation underestimates them, the next best plan is taken.
    """
    question, whole = long_steps("1f1b", 2), Evaluator.whole
    search = JointSearch(question)
    searched = search.best(1.0)
    made = solved(question, lambda _: search.told(searched), name="joint")
    check(Case(question.profile, question.cluster, question.training), made)
    first = searched.evaluation

    def longer(self: Evaluator, candidate: Candidate) -> Evaluation:
        found = whole(self, candidate)
        found.__dict__["seconds"] = found.seconds * (1.1 if candidate == first.candidate else 1.0)
        return found

    monkeypatch.setattr(Evaluator, "whole", longer)
    found = JointSearch(question).best(1.0).evaluation
    assert found.fits
    assert found.candidate != first.candidate
    assert first.seconds <= found.seconds < 1.1 * first.seconds


def test_a_search_that_a_budget_ends_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that a budget ends still answers, with a plan that fits."""
    case = random_case(Random(1), ("1f1b",), layers=3)
    monkeypatch.setattr(sys.modules["pipefit.planner.joint"], "_IMPROVING", 300)
    found = planned(case)
    check(case, found)
    assert found.provenance and "stopped at its work limit" in str(found.provenance)
