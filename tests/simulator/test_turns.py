"""Long steps extrapolated from short ones, against lowering and reading all of their actions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import permutations
from random import Random
from typing import get_args

import pytest

from pipefit.errors import UsageError
from pipefit.lowering import rank_programs
from pipefit.memory.stage import Costs
from pipefit.memory.storages import effect
from pipefit.models import build
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
from support.gallery_samples import sampled
from support.known_profiles import profile
from support.random_offloads import moving
from support.random_state_offloads import moving_states
from support.random_trainings import ROOM, random_plan

MICROBATCHES = 24
SCHEDULES = "1f1b", "eager-1f1b", "pipedream"
DEVICES = 24


@cache
def small() -> ModelProfile:
    return profile(
        build("gpt", layers=5, hidden=16, heads=2, vocabulary=32, sequence=8), microbatch_size=(2, 1)
    )


def plans(schedule: str, count: int, *, shares: bool = False, replicas: bool = False) -> list[Plan]:
    """Build random plans with recomputation and offloaded tensors and state, for all or some microbatches; on
    devices, or in `replicas`.
    """
    rng, found = Random(f"turns {schedule}"), []
    for _ in range(count):
        plan = random_plan(small(), rng, microbatches=MICROBATCHES, schedule=schedule)
        plan = replicated(plan, rng) if replicas else plan
        plan = moving_states(
            moving(plan, rng), rng, ("optimizer", "gradients", "parameters")[: rng.randint(1, 3)]
        )
        if schedule != "pipedream" and rng.random() < 0.5:  # adds an action common to all stages
            plan = replace(plan, training=replace(plan.training, clip_norm=1.0))
        each = Microbatches(1, 2) if shares else Microbatches()
        made = (d if isinstance(d.subject, State) else replace(d, microbatches=each) for d in plan.decisions)
        found.append(replace(plan, decisions=tuple(made)))
    return found


def replicated(plan: Plan, rng: Random) -> Plan:
    """Return the plan with two replicas of some stages on separate devices, optionally with divided state."""
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
    """Return the parts of stages of similar plans: under PipeDream a single step, in which the pipeline
    fills.
    """
    return Parts(Costs.of(plan), 1 if plan.training.endless else None)


def told(plan: Plan, parts: Parts) -> tuple[object, ...] | str:
    """Return peaks, arenas and seconds of the first step, the passes' times on every device, and the work; or
    a refusal.
    """
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
    """Return the numbers of microbatches in the lowered steps, one for each rank."""
    found = list[int]()

    def counted(plan: Plan, rank: int, steps: int, devices: Sequence[int]) -> object:
        found.append(plan.training.microbatches)
        return rank_programs(plan, rank, steps, devices)

    monkeypatch.setattr(lowering, "rank_programs", counted)
    return found


def whole(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> tuple[object, ...] | str:
    """Return the results with all actions lowered."""
    with monkeypatch.context() as context:
        context.setattr(lowering, "shortened", lambda *_: None)
        return told(plan, parts_of(plan))


@pytest.mark.sample(1)
@pytest.mark.parametrize("replicas", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", sampled([7, 20], often=[7]))
def test_a_short_step_tells_a_long_one(
    count: int, schedule: str, replicas: bool, monkeypatch: pytest.MonkeyPatch, lowered: list[int]
) -> None:
    """Results and counted work equal those of lowering all actions, though most ranks are lowered for a few
    microbatches.
    """
    compared, counts = 0, list[int]()
    for plan in plans(schedule, 2 * count if schedule == "pipedream" else count, replicas=replicas):
        expected = whole(plan, monkeypatch)
        lowered.clear()
        assert told(plan, parts_of(plan)) == expected, plan.decisions
        compared += not isinstance(expected, str)
        counts += lowered
    assert compared >= count / 2
    assert counts.count(MICROBATCHES) <= len(counts) / 2


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_a_short_step_tells_one_with_collectives(
    shard: Sharding, monkeypatch: pytest.MonkeyPatch, lowered: list[int]
) -> None:
    """Stages whose replicas reduce or gather for every microbatch are lowered for a few microbatches."""
    for found in plans("1f1b", 12, replicas=True):
        kept = tuple(decision for decision in found.decisions if decision.place is None)
        shards: list[Sharding] = [shard if stage.grid.data > 1 else "none" for stage in found.stages]
        stages = (
            replace(stage, grid=replace(stage.grid, shard=own))
            for stage, own in zip(found.stages, shards, strict=True)
        )
        plan = replace(found, stages=tuple(stages), decisions=kept)
        expected = whole(plan, monkeypatch)
        lowered.clear()
        assert told(plan, parts_of(plan)) == expected
        assert MICROBATCHES not in lowered


def test_a_plan_on_other_devices_is_not_lowered_again(lowered: list[int]) -> None:
    """A plan on other devices reuses the stages' known parts; times and places follow the devices."""
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
    """Decisions for a share of the microbatches cause all to be lowered."""
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
    """If turns differ in text, times or memory, all microbatches are lowered; actions common to all stages at
    the end of a step are then counted again from the start.
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
    """Turns predict the peak of more turns if they have equal effects and restore the memory they find."""
    turns = Turns(2, 4, 9)
    grows, shrinks = effect(activations=5), effect(activations=-5)
    assert turns.tell([(0, grows), (1, shrinks), (2, grows), (3, shrinks), (4, grows)])
    assert not turns.tell([(0, grows), (2, grows), (4, grows)])
    assert not turns.tell([(0, grows), (1, shrinks), (4, grows)])
    assert not turns.tell([(0, grows), (1, shrinks), (2, grows), (3, effect(gradients=-5))])


def timed(joined: Sequence[int], begun: Sequence[Message | Collected | Own]) -> TimedDevice | None:
    """Return the times of five turns, each with a start, joins of these numbers, and a pass, when two were
    lowered between first and last.
    """
    codes, transfers = [POST, JOIN, COMPUTE] * 4, [n for turn in range(4) for n in (turn, joined[turn], -1)]
    return Turns(6, 9, 1).timed(TimedDevice(codes, [0.0, 0.0, 2.0] * 4, transfers, [*begun]))


@pytest.mark.parametrize(
    "own",
    [
        [Message(True, 1, microbatch, None, 0, 1) for microbatch in range(5)],
        [Collected("sum", turn, 4, 1, (0, 1), (2, 2), True) for turn in range(5)],
    ],
)
def test_what_the_clock_is_told_of_more_turns(own: list[Message | Collected | Own]) -> None:
    """Each turn starts and joins its message or collective, and later turns have the next numbers."""
    found = timed([0, 0, 1, 2], own[:4])
    assert found is not None
    assert found.codes == [POST, JOIN, COMPUTE] * 5
    assert found.seconds == [0.0, 0.0, 2.0] * 5
    assert found.transfers == [n for turn in range(5) for n in (turn, max(turn - 1, 0), -1)]
    assert found.started == own


def test_turns_that_differ_to_the_clock_do_not_tell() -> None:
    """Turns do not extrapolate if they join old messages, start messages that other devices count, or skip a
    microbatch's message.
    """
    own: list[Message | Collected | Own] = [Message(True, 1, number, None, 0, 1) for number in range(4)]
    assert timed([0, 0, 0, 0], own) is None
    assert timed([0, 0, 1, 0], own) is None
    assert timed([0, 1, 1, 2], own) is None
    assert timed([0, 0, 1, 2], [own[0], own[1], own[1], own[3]]) is None
    summed = Collected("sum", 0, 4, 1, (0, 1), None, True)
    assert timed([0, 0, 1, 2], [own[0], summed, summed, own[3]]) is None
    assert timed([0, 0, 1, 2], [*own[:3], summed]) is not None


def test_a_refusal_speaks_of_the_device_that_was_asked_for() -> None:
    """A refusal names the requested device, even after another device was refused for the same reason."""
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
