"""Changes of single blocks, layers and stages of a plan."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from pipefit.planner import Question
from pipefit.planner.evaluation import Budget, Candidate, Evaluation, Evaluator
from pipefit.planner.filling import Filler, FillingSetting
from pipefit.planner.improvement import Changes, wandered
from pipefit.planner.memory_choices import (
    TO_HOST,
    Menu,
    Movable,
    Recipe,
    StageChoice,
    decisions_of,
    parts_of,
)
from pipefit.planner.options import Means, PlanOptions
from pipefit.planner.problem import Split
from pipefit.schema.devices import MemberKind, parse_place
from pipefit.simulator import Simulation
from support.tight_questions import random_case

HOST = parse_place("host")


def start_and_result(means: Means, seed: int = 1, *, work: int = 4_000) -> tuple[Evaluation, Evaluation]:
    """Return an uneven split that keeps everything on tight devices, and the result of random changes."""
    case = random_case(Random(seed), ("1f1b",), layers=6)
    question = Question(
        profile=case.profile,
        cluster=case.cluster,
        training=case.training,
        options=PlanOptions(means=means),
    )
    filler = Filler(Evaluator(question))
    start = filler.evaluator.kept_at(Split((0, 5, 6), (0, 1)))
    return start, wandered(filler, start, budget=Budget(filler.evaluator, work), at_least=0.0)


@pytest.mark.parametrize("seed", [2, 18, 20])
def test_a_filled_split_fits_if_recomputing_everything_does(seed: int) -> None:
    """Of all splits into two stages, those fit after filling that fit with everything recomputed, and are no slower."""
    case, count = random_case(Random(seed), ("1f1b",), layers=6), 0
    question = Question(
        profile=case.profile,
        cluster=case.cluster,
        training=case.training,
        options=PlanOptions(means=Means(host=False, peers=False), stages=2),
    )
    filler = Filler(Evaluator(question))
    for cut in range(1, question.blocks):
        split = Split((0, cut, question.blocks), (0, 1))
        menus = filler.evaluator.stage_menus(split)
        recipes = (tuple(len(menu.recipes) - 1 for menu in of_stage) for of_stage in menus)
        least = [StageChoice(one, (0,) * len(one)) for one in recipes]
        everything = filler.evaluator.evaluate(Candidate(split, tuple(least)))
        if everything is not None and everything.fits:
            filled, count = filler.fill(FillingSetting(split, 0.0)), count + 1
            assert filled is not None and filled.fits and filled.seconds <= everything.seconds * (1 + 1e-9)
            alone = [Filler(Evaluator(question)) for _ in range(2)]
            limits = (1 + 1e-9) * filled.seconds, 0.9 * filled.seconds
            near, far = (
                one.fill(FillingSetting(split, 0.0), None, limit)
                for one, limit in zip(alone, limits, strict=True)
            )
            assert near is not None and near.candidate == filled.candidate
            assert far is None or not far.fits, "a plan that is slower than the limit is given up"
    assert count


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "means", [Means(), Means(recompute="never"), Means(host=False), Means(host=False, peers=False)]
)
def test_random_changes_lead_to_a_better_plan(means: Means) -> None:
    """The search finds a plan that lacks fewer bytes or is faster, uses allowed techniques only, and is the same
    in a second search.
    """
    start, result = start_and_result(means)
    assert (result.over_bytes, result.seconds) < (start.over_bytes, start.seconds)
    assert result.candidate == start_and_result(means)[1].candidate
    plan = result.simulation.plan
    assert Simulation(plan).peak_bytes == result.peaks
    assert means.recompute != "never" or all(d.what.value != "recompute" for d in plan.decisions)
    places = {member.kind for d in plan.decisions for member in (d.place.members if d.place else ())}
    assert means.host or MemberKind.HOST not in places
    assert means.peers or MemberKind.DEVICE not in places


@pytest.mark.sample(3)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "eager-1f1b", "pipedream", "pipedream-2bw"])
def test_fewest_seconds_are_never_above_a_step(schedule: str) -> None:
    """No simulated candidate is faster than the lower bound of its stages' passes and recomputation."""
    case = random_case(Random(3), (schedule,), layers=6)
    filler = Filler(Evaluator(Question(profile=case.profile, cluster=case.cluster, training=case.training)))
    start = filler.evaluator.kept_at(Split((0, 3, 6), (0, 1)))
    wandered(filler, start, budget=Budget(filler.evaluator, 4_000), at_least=0.0)
    known = [found for found in filler.evaluator.known.values() if found is not None]
    again = [found for found in known if any(any(choice.recipes) for choice in found.candidate.choices)]
    assert again
    for found in known:
        assert filler.fewest_seconds(*found.candidate) <= found.seconds * (1 + 1e-9)


def test_a_spent_budget_changes_nothing() -> None:
    """Without work left, the start is the result."""
    start, result = start_and_result(Means(), work=0)
    assert result is start


def test_a_candidate_that_is_too_slow_is_not_read() -> None:
    """A step that is not below a limit has no evaluation, but has one with a higher limit."""
    start, _ = start_and_result(Means(), work=0)
    case = random_case(Random(1), ("1f1b",), layers=6)
    question = Question(profile=case.profile, cluster=case.cluster, training=case.training)
    evaluator = Evaluator(question)
    candidate = Candidate(start.candidate.split, start.candidate.choices)
    assert evaluator.evaluate(candidate, below=start.seconds) is None
    found = evaluator.evaluate(candidate, below=start.seconds * 1.01)
    assert found is not None and found.seconds == start.seconds and found.peaks == start.peaks


def test_state_and_tensors_of_single_layers_move() -> None:
    """Each part of a block's state may be on the device, at the host, updated there, or at a peer; adjacent
    parts move together. Tensors of single layers of a moved block may stay.
    """
    tensors = tuple(Movable(layer, 1, 10, (layer,)) for layer in range(4))
    menu = Menu(0, 4, (Recipe(),), tensors, ((0, 1), (1, 2), (2, 4)))
    choice = StageChoice.keep(1)._replace(states=parts_of([menu]), updates=frozenset({2}))

    def chosen(choice: StageChoice) -> list[str]:
        return [str(decision) for decision in decisions_of(0, choice, [menu], HOST)]

    assert chosen(choice) == [
        "stage 0: update optimizer of layers 2 to 3 on host",
        "stage 0: offload optimizer of layers 0 to 1 to host",
    ]
    lent = StageChoice.keep(1)._replace(lent=frozenset({0, 2}), peers=parse_place("device1"))
    assert chosen(lent) == [
        "stage 0: offload optimizer of layer 0 to device1",
        "stage 0: offload optimizer of layers 2 to 3 to device1",
    ]
    away = StageChoice.keep(1)._replace(places=(TO_HOST,), near=1, staying=frozenset({1, 2}))
    assert chosen(away) == ["stage 0: offload saved 0.1, 3.1 to host"]


@pytest.mark.parametrize(("latest", "order"), [(False, [2, 0, 3, 1]), (True, [2, 0, 1, 3])])
def test_stages_that_end_late_are_changed_early(latest: bool, order: list[int]) -> None:
    """The stage that lacks memory comes first, then the busiest; stage 1 computes least and ends last."""
    changes: Any = Changes.__new__(Changes)
    simulation = SimpleNamespace(utilisation=(0.9, 0.1, 0.2, 0.3), last_ends={0: 1.0, 1: 9.0, 2: 5.0, 3: 7.0})
    changes._best = SimpleNamespace(over=(-1, -1, 5, -1), simulation=simulation)
    changes._split, changes._latest = SimpleNamespace(devices=(0, 1, 2, 3)), latest
    assert changes._in_order == order
