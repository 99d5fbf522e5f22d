"""Predictions of a GPU's reserved memory from a few microbatches under asynchronous schedules."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any
from unittest import mock

import pytest

from pipefit.errors import UsageError
from pipefit.lowering import ENDLESS, step_programs
from pipefit.memory.cuda_allocator import AllocatorSettings
from pipefit.runtime import certify
from pipefit.runtime.dry_run import certify as dry_run
from pipefit.runtime.dry_run.asynchronous import EndlessLives, Label, LabelledAction, fewer, labels
from pipefit.schema.actions import Action, Kind
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.trace import Trace
from support.random_decisions import compacted
from support.small_tasks import plan_of
from support.two_pool_model import on_gpus, wide, wide_profile

DEFAULT = AllocatorSettings()


@pytest.fixture(scope="module")
def found() -> ModelProfile:
    """Return the profile of `wide` on a GPU."""
    return wide_profile()


def random_plan(found: ModelProfile, schedule: str, rng: Random) -> Plan:
    """Return one to four stages in up to twelve microbatches, with random decisions."""
    stages = rng.randint(1, 4)
    cuts = [0, *sorted(rng.sample(range(1, 6), stages - 1)), 6]
    split = [stop - start for start, stop in pairwise(cuts)]
    number = rng.randint(stages if schedule == "pipedream-2bw" else 1, 12)
    plan = plan_of(
        wide(),
        split,
        size=700,
        microbatches=number,
        schedule=schedule,
        profiled=found,
        devices=max(stages, 2),
    )
    plan = replace(
        plan, training=replace(plan.training, versions=rng.choice(["weights", "weights", "everything"]))
    )
    return on_gpus(compacted(plan, rng))


def told(plan: Plan, **options: Any) -> tuple[Trace, bool]:
    """Return a dry run with the allocator, and whether it had to run all microbatches."""
    whole = dry_run.Rehearsal._whole
    with mock.patch.object(dry_run.Rehearsal, "_whole", autospec=True, side_effect=whole) as again:
        return certify(wide(), plan, allocator=DEFAULT, **options), again.called


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("schedule", ENDLESS)
def test_few_microbatches_reserve_what_all_do(found: ModelProfile, schedule: str, seed: int) -> None:
    """Few microbatches reserve the same three numbers per device, and the same samples, as all, under
    recomputation and offload.
    """
    plan = random_plan(found, schedule, Random(seed))
    assert told(plan)[0] == told(plan, fold=False)[0]


@pytest.mark.gallery
@pytest.mark.parametrize("seed", range(2, 60))
@pytest.mark.parametrize("schedule", ENDLESS)
def test_they_do_in_many_plans(found: ModelProfile, schedule: str, seed: int) -> None:
    """Many more random plans agree too."""
    try:
        plan = random_plan(found, schedule, Random(seed))
    except UsageError:
        pytest.skip("the draw is no plan")
    assert told(plan)[0] == told(plan, fold=False)[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ENDLESS)
@pytest.mark.parametrize(("split", "microbatches"), [([6], 3), ([2, 4], 4), ([1] * 6, 12), ([2, 2, 2], 9)])
def test_plain_plans_need_no_second_run(
    found: ModelProfile, schedule: str, split: list[int], microbatches: int
) -> None:
    """Plans without decisions need no second run, with more stages than fit and with one."""
    plan = plan_of(wide(), split, size=700, microbatches=microbatches, schedule=schedule, profiled=found)
    folded, again = told(on_gpus(plan))
    assert not again
    assert folded == told(on_gpus(plan), fold=False)[0]


def test_a_device_stops_when_it_has_told_all(found: ModelProfile) -> None:
    """Of 40 microbatches on six stages the first stage stops after nine backwards, and the last, which holds
    none, after five.
    """
    plan = plan_of(wide(), [1] * 6, size=700, microbatches=40, schedule="pipedream", profiled=found)
    executed = fewer(plan, step_programs(plan), again=True)
    backwards = [
        sum(action.kind is Kind.BACKWARD for program in executed for action in program.actions[device])
        for device in range(6)
    ]
    assert backwards == sorted(backwards, reverse=True)
    assert (backwards[0], backwards[-1]) == (9, 5)
    beginning = labels(plan, executed)[0][0]
    assert beginning == labels(plan, step_programs(plan))[0][0][: len(beginning)]


# ---------------------------------------------------------------- constructed lives


def forward(microbatch: int) -> LabelledAction:
    return LabelledAction(Label(0, (Action(Kind.FORWARD, 0, None),), None), (0, microbatch))


def backward(microbatch: int) -> LabelledAction:
    path = Action(Kind.FORWARD, 0, None), Action(Kind.BACKWARD, 0, None)
    return LabelledAction(Label(0, path, (True, 0)), (0, microbatch))


def microbatch(number: int) -> list[LabelledAction]:
    return [forward(number), backward(number)]


def test_what_is_freed_is_found_by_where_it_was_born() -> None:
    """A forward's activations die in its microbatch's backward, and weights (8 bytes) in the backward after
    the next; the first weights are born before the first step.
    """
    lives = EndlessLives()
    run = [one for number in range(4) for one in microbatch(number)]
    seen = []
    for number in range(4):
        name = 10 * (number + 1)
        freed = [(1, 0), (2, 0), (11, 0), (21, 0)][number]
        seen += [((name, 5),), ((name + 1, 8), (name, 0), freed)]
    lives.learn(run, ((1, 8), (2, 8)), seen)
    wanted = [one for number in range(6) for one in microbatch(number)]
    lives.unfold([wanted], dict.fromkeys({one.label for one in wanted}, 1))
    assert lives.consistent
    born = {name: nbytes for name, nbytes in lives.events if nbytes}
    order = [name for name, nbytes in lives.events if not nbytes and born[name] == 8]
    weights = [name for name, nbytes in lives.events if nbytes == 8]
    assert order == weights[: len(order)]
    assert (len(weights), len(order)) == (8, 6)
    activations = [name for name, nbytes in lives.events if born[name] == 5]
    assert activations == [name for one in activations[::2] for name in (one, one)]


@pytest.mark.parametrize(
    ("freed", "turn"),
    [
        ([1, 11, 21, 21], 1),  # dead storages
        ([1, 2, 11, 12], 1),  # the last two differ
        ([1, 2, 3, 4], 1),  # all from the beginning
    ],
)
def test_what_cannot_be_repeated_is_noticed(freed: list[int], turn: int) -> None:
    """A pattern that cannot be repeated is detected, and all microbatches are run."""
    lives = EndlessLives()
    run = [backward(number) for number in range(4)]
    seen = []
    for number in range(4):
        births = ((10 * (number + 1) + 1, 8), (10 * (number + 1) + 2, 8))
        living = {1, 2, 3, 4, *(10 * (n + 1) + k for n in range(number + 1) for k in (1, 2))} - set(
            freed[:number]
        )
        seen.append((*births, *([(freed[number], 0)] if freed[number] in living else [])))
    lives.learn(run, tuple((name, 8) for name in (1, 2, 3, 4)), seen)
    wanted = [backward(number) for number in range(8)]
    lives.unfold([wanted], {wanted[0].label: turn})
    assert not lives.consistent
