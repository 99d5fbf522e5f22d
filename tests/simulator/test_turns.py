"""Long steps that short ones tell, beside all of their actions lowered and read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import permutations
from random import Random
from typing import get_args

import pytest

from moving_plans import moving
from moving_states import moving_states
from pipefit.errors import UsageError
from pipefit.lowering import rank_programs
from pipefit.memory.stage import Costs
from pipefit.memory.storages import effect
from pipefit.models import build
from pipefit.profiler import profile
from pipefit.schema.actions import Message
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Microbatches, State
from pipefit.schema.grids import Grid, Sharding
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.simulator import Simulation
from pipefit.simulator import assembled as lowering
from pipefit.simulator.assembled import Assembled, Parts, Turns
from pipefit.simulator.timed_program import COMPUTE, JOIN, POST, Collected, Own, TimedDevice
from random_cases import ROOM, random_plan

MICROBATCHES = 24
SCHEDULES = "1f1b", "eager-1f1b", "pipedream"
DEVICES = 24


@cache
def small() -> ModelProfile:
    return profile(
        build("gpt", layers=5, hidden=16, heads=2, vocabulary=32, sequence=8), microbatch_size=(2, 1)
    )


def plans(schedule: str, count: int, *, shares: bool = False, replicas: bool = False) -> list[Plan]:
    """Random plans with recomputation and moves of tensors and of state: of all microbatches, or of shares of them; on
    devices, or in `replicas`.
    """
    rng, found = Random(f"turns {schedule}"), []
    for _ in range(count):
        plan = random_plan(small(), rng, microbatches=MICROBATCHES, schedule=schedule)
        plan = replicated(plan, rng) if replicas else plan
        plan = moving_states(
            moving(plan, rng), rng, ("optimizer", "gradients", "parameters")[: rng.randint(1, 3)]
        )
        if schedule != "pipedream" and rng.random() < 0.5:  # all stages do something together, too
            plan = replace(plan, training=replace(plan.training, clip_norm=1.0))
        each = Microbatches(1, 2) if shares else Microbatches()
        made = (d if isinstance(d.subject, State) else replace(d, microbatches=each) for d in plan.decisions)
        found.append(replace(plan, decisions=tuple(made)))
    return found


def replicated(plan: Plan, rng: Random) -> Plan:
    """The plan with two replicas of some stages, which may divide state, each on a device of its own."""
    free, grids = rng.sample(range(DEVICES), DEVICES), list[Grid]()
    for _ in plan.stages:
        data = rng.choice([1, 2, 2])
        shard = rng.choice(("none", "none", *get_args(Sharding))) if data > 1 else "none"
        buckets = rng.choice([1, 3]) if data > 1 else 1
        grids.append(
            Grid(devices=tuple(free.pop() for _ in range(data)), data=data, shard=shard, buckets=buckets)
        )
    stages = tuple(replace(stage, grid=grid) for stage, grid in zip(plan.stages, grids, strict=True))
    return replace(plan, stages=stages, cluster=Cluster.emulated((DEVICES, ROOM)))


def parts_of(plan: Plan) -> Parts:
    """What stages of plans like this one do: under PipeDream in a single step, in which the pipeline fills."""
    return Parts(Costs.of(plan), 1 if plan.training.endless else None)


def told(plan: Plan, parts: Parts) -> tuple[object, ...] | str:
    """Peaks, arenas and seconds of the first step, when passes ran on every device, and the work; or a refusal."""
    try:
        found = Assembled(plan, parts)
        used = sorted({device for stage in plan.stages for device in stage.devices})
        times = [(found.forwards_ended(device), found.backwards_run(device)) for device in used]
        seconds = found.step_seconds, found.utilisation, times
        return found.peak_bytes, found.arenas, seconds, found.actions, parts.actions
    except UsageError as error:
        return str(error)


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of microbatches in the steps that are lowered, one for each rank."""
    found = list[int]()

    def counted(plan: Plan, rank: int, steps: int, devices: Sequence[int]) -> object:
        found.append(plan.training.microbatches)
        return rank_programs(plan, rank, steps, devices)

    monkeypatch.setattr(lowering, "rank_programs", counted)
    return found


def whole(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...] | str:
    """The same of all actions, none of which is left out."""
    with monkeypatch.context() as context:
        context.setattr(lowering, "shortened", lambda *_: None)
        return told(plan, parts_of(plan))


@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_short_step_tells_a_long_one(
    schedule: str, replicas: bool, monkeypatch: pytest.MonkeyPatch, lowered: list[int]
) -> None:
    """All is as if all actions were lowered and read, and counts as much work, though most ranks are lowered for a few
    microbatches alone.
    """
    compared, counts = 0, list[int]()
    for plan in plans(schedule, 40 if schedule == "pipedream" else 20, replicas=replicas):
        expected = whole(plan, monkeypatch)
        lowered.clear()
        assert told(plan, parts_of(plan)) == expected, plan.decisions
        compared += not isinstance(expected, str)
        counts += lowered
    assert compared >= 10
    assert counts.count(MICROBATCHES) <= len(counts) / 2


def test_a_plan_on_other_devices_is_not_lowered_again(lowered: list[int]) -> None:
    """What stages do is known then, and times and places follow their devices."""
    plan = next(plan for plan in plans("1f1b", 24) if len(plan.stages) > 2 and plan.decisions)
    ways = permutations(range(4), len(plan.stages))
    turned = (
        replace(
            plan, stages=tuple(replace(s, grid=Grid.of(n)) for s, n in zip(plan.stages, way, strict=True))
        )
        for way in ways
    )
    moved = next(one for one in turned if one != plan and not isinstance(told(one, parts_of(one)), str))
    parts = parts_of(plan)
    before = told(plan, parts)
    lowered.clear()
    after = told(moved, parts)
    assert not lowered
    assert after[:-1] == told(moved, parts_of(plan))[:-1] != before[:-1]


def test_microbatches_that_differ_are_all_read(monkeypatch: pytest.MonkeyPatch, lowered: list[int]) -> None:
    """Where decisions are for a share of the microbatches, all are lowered."""
    for plan in plans("pipedream", 8, shares=True):
        expected = whole(plan, monkeypatch)
        lowered.clear()
        assert told(plan, parts_of(plan)) == expected
        halves = {decision.stage for decision in plan.decisions if decision.microbatches.every > 1}
        assert isinstance(expected, str) or lowered.count(MICROBATCHES) == len(halves)


@pytest.mark.parametrize("method", ["of", "timed", "tell"])
def test_what_turns_do_not_tell_is_read_whole(
    method: str, monkeypatch: pytest.MonkeyPatch, lowered: list[int]
) -> None:
    """Where turns differ, to the eye, to the clock or to the ledger, all microbatches are lowered after all; what all
    stages do together at the end of a step is then counted from the first time again.
    """
    plan = next(
        p for p in plans("1f1b", 24) if len(p.stages) > 2 and not isinstance(whole(p, monkeypatch), str)
    )
    plan = replace(plan, training=replace(plan.training, clip_norm=1.0))
    expected = whole(plan, monkeypatch)
    monkeypatch.setattr(Turns, method, lambda *_: None)
    lowered.clear()
    assert told(plan, parts_of(plan)) == expected
    assert lowered.count(MICROBATCHES) == len(plan.stages)


def test_effects_that_grow_or_differ_do_not_tell() -> None:
    """Turns tell the peak of more of them if they do the same and leave what they find."""
    turns = Turns(2, 4, 9)
    grows, shrinks = effect(activations=5), effect(activations=-5)
    assert turns.tell([(0, grows), (1, shrinks), (2, grows), (3, shrinks), (4, grows)])
    assert not turns.tell([(0, grows), (2, grows), (4, grows)])
    assert not turns.tell([(0, grows), (1, shrinks), (4, grows)])
    assert not turns.tell([(0, grows), (1, shrinks), (2, grows), (3, effect(gradients=-5))])


def timed(joined: Sequence[int], begun: Sequence[Message | Collected | Own]) -> TimedDevice | None:
    """What the clock is told of five turns, each of which begins something, joins what these numbers say, and computes,
    where two were lowered between the first and the last.
    """
    codes, transfers = [POST, JOIN, COMPUTE] * 4, [n for turn in range(4) for n in (turn, joined[turn], -1)]
    return Turns(6, 9, 1).timed(TimedDevice(codes, [0.0, 0.0, 2.0] * 4, transfers, [*begun]))


def test_what_the_clock_is_told_of_more_turns() -> None:
    """Each begins and joins its own message, and those behind it have the next numbers."""
    own = [Message(True, 1, microbatch, None, 0, 1) for microbatch in range(5)]
    found = timed([0, 0, 1, 2], own[:4])
    assert found is not None
    assert found.codes == [POST, JOIN, COMPUTE] * 5
    assert found.seconds == [0.0, 0.0, 2.0] * 5
    assert found.transfers == [n for turn in range(5) for n in (turn, max(turn - 1, 0), -1)]
    assert found.started == own


def test_turns_that_differ_to_the_clock_do_not_tell() -> None:
    """They join what began long before, or begin what other devices count too, or not the next microbatch's message."""
    own: list[Message | Collected | Own] = [Message(True, 1, number, None, 0, 1) for number in range(4)]
    assert timed([0, 0, 0, 0], own) is None
    assert timed([0, 0, 1, 0], own) is None
    assert timed([0, 1, 1, 2], own) is None
    assert timed([0, 0, 1, 2], [own[0], own[1], own[1], own[3]]) is None
    summed = Collected("sum", 0, 4, 1, (0, 1), None, True)
    assert timed([0, 0, 1, 2], [own[0], summed, summed, own[3]]) is None
    assert timed([0, 0, 1, 2], [*own[:3], summed]) is not None


def test_a_refusal_speaks_of_the_device_that_was_asked_for() -> None:
    """Also where another device has been refused the same before."""
    refused = 0
    for plan in plans("pipedream", 20):
        parts = parts_of(plan)
        said = told(plan, parts)
        if isinstance(said, str):
            assert told(plan, parts) == said
            with pytest.raises(UsageError, match=re.escape(said)):
                _ = Simulation(plan).peak_bytes
            refused += "device" in said
    assert refused
