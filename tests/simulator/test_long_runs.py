"""Seconds of a step in a long run, against the simulation of many steps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from random import Random

import numpy as np
import pytest

from pipefit.errors import UsageError
from pipefit.models import build
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.simulator import Simulation
from pipefit.simulator.assembled import assembled
from pipefit.simulator.clock import mean_cycle, repeating
from support.known_profiles import profile
from support.random_offloads import moving
from support.random_state_offloads import moving_states
from support.random_trainings import random_plan

MANY = 40
CASES = {"1f1b": 5, "gpipe": 5, "eager-1f1b": 5, "pipedream": 6, "pipedream-2bw": 8}


@cache
def small() -> ModelProfile:
    """Profile a chain of a few small layers."""
    return profile(
        build("gpt", layers=3, hidden=16, heads=2, vocabulary=32, sequence=4), microbatch_size=(2, 1)
    )


def with_moved_state(schedule: str, rng: Random) -> Plan:
    """Draw a plan that moves tensors and state over links of any rate to the host."""
    plan = random_plan(small(), rng, microbatches=rng.choice((3, 4, 6, 8)), schedule=schedule)
    kinds = ("optimizer", "gradients", "parameters")[: rng.randint(1, 3)]
    plan = moving_states(moving(plan, rng), rng, kinds)
    slower = rng.choice((1, 1e-2, 1e-3, 1e-4, 1e-5))
    links = (
        replace(link, bytes_per_second=slower * link.bytes_per_second)
        if any(member.kind != "device" for member in link.members)
        else link
        for link in plan.cluster.links
    )
    return replace(plan, cluster=replace(plan.cluster, links=tuple(links)))


@pytest.mark.sample(3)
@pytest.mark.parametrize("schedule", CASES)
def test_a_step_takes_the_mean_of_many(schedule: str) -> None:
    """A step takes as long as many on average, also if its updates and transfers reach into the next one."""
    rng, compared = Random(f"long {schedule}"), 0
    for _ in range(CASES[schedule]):
        plan = with_moved_state(schedule, rng)
        try:
            many = Simulation(plan, steps=MANY).step_seconds
        except UsageError:  # this state cannot be moved
            continue
        assert assembled(plan).seconds == pytest.approx(np.mean(many[MANY // 2 : -4]), rel=1e-6)
        compared += 1
    assert compared


def test_cycles_repeat_after_several() -> None:
    """Cycles that alternate take their mean, and cycles that a later end could still delay are not known."""
    ends = np.cumsum([1.0, 5.0, 2.0, 3.0, 2.0, 3.0, 2.0, 3.0])
    assert repeating([(ends, range(9))], window=2) == pytest.approx(2.5)
    assert repeating([(ends[:4], range(5))], window=2) is None
    early = np.array([1.0, 2.0, 3.0])
    assert repeating([(ends, range(9)), (early, range(4))], window=2) is None
    assert mean_cycle([(ends, range(9))]) == pytest.approx(2.5)
