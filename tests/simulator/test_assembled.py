"""Plans assembled from per-device parts, against simulations of whole programs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from random import Random
from typing import get_args

import pytest

from pipefit.errors import UsageError
from pipefit.lowering import ENDLESS, SCHEDULES
from pipefit.memory.stage import Costs
from pipefit.models import build
from pipefit.schema.decisions import Decision, Run, What
from pipefit.schema.grids import Grid, Sharding, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.simulator import Simulation
from pipefit.simulator.assembled import Assembled, Parts
from support.known_profiles import profile
from support.random_offloads import moving
from support.random_state_offloads import moving_states
from support.random_trainings import random_plan

Answer = tuple[object, ...]


@cache
def model() -> ModelProfile:
    return profile(
        build("gpt", layers=4, hidden=16, heads=2, vocabulary=32, sequence=8), microbatch_size=(2, 1)
    )


def variants(plan: Plan, rng: Random) -> list[Plan]:
    """Return the plan with random decisions, without those of single stages, and as first given."""
    kinds = ("optimizer", "gradients") if plan.training.endless else ("optimizer", "parameters", "gradients")
    whole = moving_states(moving(plan, rng), rng, kinds)
    stages = rng.sample(range(len(plan.stages)), min(2, len(plan.stages)))
    fewer = [
        replace(whole, decisions=tuple(d for d in whole.decisions if d.stage != stage)) for stage in stages
    ]
    return [whole, *fewer, plan, whole]


def told(plan: Plan, parts: Parts | None) -> Answer | str:
    """Return peaks, arenas, seconds and utilisation, or the refusal."""
    try:
        found = Simulation(plan) if parts is None else Assembled(plan, parts)
        return found.peak_bytes, found.arenas, found.step_seconds, found.utilisation
    except UsageError:
        return "refused"


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", [*SCHEDULES, *ENDLESS])
def test_a_plan_put_together_is_as_its_whole_program(schedule: str) -> None:
    """An assembled plan equals its whole program after any other plans with other decisions or splits: peaks,
    arenas, seconds and utilisation.
    """
    rng, parts, compared = Random(f"assembled {schedule}"), dict[object, Parts](), 0
    for _ in range(7):
        plan = random_plan(model(), rng, microbatches=6, schedule=schedule)
        costs = parts.setdefault(plan.training, Parts(Costs.of(plan)))
        for one in variants(plan, rng):
            whole = told(one, None)
            assert told(one, costs) == whole, one.decisions
            compared += whole != "refused"
    assert compared >= 10


def test_replicas_are_put_together_too() -> None:
    """Two replicas of a stage, which exchange separate rows and sum both gradients, are assembled too, after
    plans with other divided state, buckets, cuts, or no replicas.
    """
    plan = random_plan(model(), Random(0), microbatches=4, schedule="1f1b")
    count, parts = len(plan.profile.layers), Parts(Costs.of(plan))
    for shard, buckets, cut in product(get_args(Sharding), (1, 3), (3, 4)):
        grids = Grid(devices=(0, 1), data=2, shard=shard, buckets=buckets), Grid(devices=(2,))
        stages = tuple(
            Stage(start=at, stop=at + cut if not n else count, grid=grids[n]) for n, at in enumerate((0, cut))
        )
        made = replace(plan, stages=stages, decisions=())
        assert told(made, parts) == told(made, None) != "refused"


def test_replicas_that_move_tensors_are_put_together_too() -> None:
    """So are replicas that move tensors and state to a host, or to devices."""
    rng, compared = Random("replicas that move"), 0
    plan = random_plan(model(), Random(0), microbatches=4, schedule="1f1b")
    grids, count = (Grid(devices=(0, 1), data=2), Grid(devices=(2,))), len(plan.profile.layers)
    stages = tuple(Stage(start=3 * n, stop=(3, count)[n], grid=grid) for n, grid in enumerate(grids))
    for _ in range(12):
        made = moving(replace(plan, stages=stages, decisions=()), rng)
        one = moving_states(made, rng, ("optimizer", "parameters", "gradients"))
        whole = told(one, None)
        assert told(one, Parts(Costs.of(one))) == whole, one.decisions
        compared += whole != "refused"
    assert compared >= 6


def test_what_is_known_is_not_read_again() -> None:
    """Without the decisions of one stage, only that stage's actions are new; with them again, none are."""
    edges, recompute = (0, 2, 3, len(model().layers)), What.RECOMPUTE
    stages = tuple(Stage(start=a, stop=b, grid=Grid.of(n)) for n, (a, b) in enumerate(pairwise(edges)))
    again = tuple(Decision(stage=n, subject=Run(start=n * 2, stop=n * 2 + 1), what=recompute) for n in (0, 1))
    plan = replace(
        random_plan(model(), Random(0), microbatches=6, schedule="1f1b"), stages=stages, decisions=again
    )
    parts, other = Parts(Costs.of(plan)), replace(plan, decisions=again[1:])
    Assembled(plan, parts)
    known = parts.actions
    Assembled(other, parts)
    assert parts.actions - known == len(Simulation(other).program.actions[0])
    known = parts.actions
    Assembled(plan, parts)
    assert parts.actions == known
