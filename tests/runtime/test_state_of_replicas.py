"""State of replicas, offloaded or updated on their hosts: the numbers and bytes of replicas that keep it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch

from pipefit.errors import UsageError
from pipefit.lowering import lower
from pipefit.memory.arenas import arenas_of, lent_bytes
from pipefit.runtime import Trainer, certify, train
from pipefit.schema.actions import Kind, Subject
from pipefit.schema.decisions import Decision, StateKind, What
from pipefit.schema.devices import Member
from pipefit.schema.grids import Sharding
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.simulator import simulate
from support.known_profiles import profile
from support.local_batches import batches, equal, sliced_plan
from support.offloaded_state import away
from support.random_state_offloads import runs
from support.replicated_models import precise, replicated
from support.small_tasks import goes_on, in_one_process
from support.step_peaks import step_peaks

ALL: tuple[Sharding, ...] = ("none", "optimizer", "gradients", "parameters")
MOVED: dict[Sharding, tuple[StateKind, ...]] = {  # what may move of replicas that divide that much
    "none": ("optimizer", "parameters", "gradients"),
    "optimizer": ("optimizer",),
    "gradients": ("optimizer",),
    "parameters": ("optimizer", "parameters"),
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def profiled() -> ModelProfile:
    """Return the profile at the sizes of all local batches."""
    return profile(replicated("dropped"), microbatch_size=(12, 6, 4))


def moving(plan: Plan, rng: Random) -> Plan:
    """Return the plan with states of random runs of layers offloaded, or updated on the host, as far as
    replicas support it.
    """
    decisions = [one for number in range(len(plan.stages)) for one in _of_stage(plan, number, rng)]
    return replace(plan, decisions=tuple(decisions))


def _of_stage(plan: Plan, number: int, rng: Random) -> Iterator[Decision]:
    stage, updated = plan.stages[number], set[int]()
    shard = stage.grid.shard if stage.grid.data > 1 else "none"
    for kind in MOVED[shard]:
        for start, stop in runs(stage.start, stage.stop, rng):
            at_host = kind == "optimizer" and shard != "optimizer" and rng.random() < 0.4
            if rng.random() < 0.7 and updated.isdisjoint(range(start, stop)):
                what = What.UPDATE if at_host else What.OFFLOAD
                times = {"ahead": rng.choice([0, 1, 2]), "behind": rng.choice([0, 1, 2])}
                yield away(number, start, stop, what, kind=kind, **times)
                updated.update(range(start, stop) if at_host else ())


def random_plan(found: ModelProfile, shard: Sharding, seed: int) -> Plan:
    """Draw two stages of replicas that keep all state; the first has a given ZeRO level."""
    rng = Random(f"{shard} {seed}")
    return sliced_plan(
        found,
        [0, rng.choice([3, 4, 5]), 6],
        [rng.choice([2, 3]), rng.choice([1, 2])],
        microbatches=rng.randint(1, 3),
        schedule=rng.choice(["gpipe", "1f1b"]),
        shard=(shard, rng.choice(ALL)),
        buckets=(rng.choice([1, 2, 4]), 1),
        clip_norm=rng.choice([None, 0.1]),
    )


def assert_as_foretold(found: ModelProfile, shard: Sharding, seed: int) -> None:
    """Assert that a random plan trains the numbers of one without moves, with the predicted bytes."""
    task, still = replicated("dropped"), random_plan(found, shard, seed)
    plan = moving(still, Random(seed))
    kept, moved = Trainer(task, still), Trainer(task, plan)
    for batch in batches(task, plan, 3):
        assert kept.step(batch) == moved.step(batch)
    assert equal(kept.state_dict(optimizer=True), moved.state_dict(optimizer=True), relative=0)
    assert kept.evaluate(batch) == moved.evaluate(batch)
    peaks = step_peaks(task, plan)
    assert peaks.dry == peaks.metered == peaks.allocated == peaks.simulated


@pytest.mark.sample(1)
@pytest.mark.parametrize("shard", ALL)
def test_numbers_and_bytes_are_those_foretold(shard: Sharding, profiled: ModelProfile) -> None:
    """Losses, parameters and optimizer state equal replicas without moves bit by bit; simulator, dry run,
    meter and allocator have the same peaks in every step.
    """
    assert_as_foretold(profiled, shard, 0)


@pytest.mark.gallery
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("shard", ALL)
def test_more_plans_are_as_foretold(shard: Sharding, seed: int, profiled: ModelProfile) -> None:
    """Numbers and bytes of many random plans are as predicted."""
    assert_as_foretold(profiled, shard, seed)


def test_copies_of_half_precision_parameters_move_too() -> None:
    """Owners' float32 copies of half-precision parameters move as optimizer state, offloaded or on the host,
    and a step that overflows updates none.
    """
    task = precise("master-float16")
    still = sliced_plan(profile(task, microbatch_size=(4, 2)), [0, 5], [2], shard=("gradients",))
    plan = replace(still, decisions=(away(0, 0, 3, What.UPDATE), away(0, 3, 5)))
    kept, moved = Trainer(task, still), Trainer(task, plan)
    for step in range(3):
        torch.manual_seed(step)
        inputs, targets = task.batch(8)
        batch = (inputs * (1e4 if step == 1 else 1.0), targets)
        assert kept.step(batch) == pytest.approx(moved.step(batch), nan_ok=True)
    assert equal(kept.state_dict(optimizer=True), moved.state_dict(optimizer=True), relative=0)


def test_workers_move_their_state_as_one_process_does(profiled: ModelProfile) -> None:
    """Two workers with divided parameters, offloaded or updated on the host, have the losses and bytes of one
    process.
    """
    still = sliced_plan(profiled, [0, 6], [2], shard=("parameters",), buckets=(3,))
    decisions = away(0, 0, 4, What.UPDATE), away(0, 4, 6), away(0, 4, 6, kind="parameters", ahead=1)
    plan = replace(still, decisions=decisions)
    losses, trace = train(partial(replicated, "dropped"), plan, steps=2)
    alone, expected = in_one_process(replicated("dropped"), plan, 2)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert trace.peak_bytes == alone.trace.peak_bytes == certify(replicated("dropped"), plan).peak_bytes


def test_training_goes_on_from_what_was_away(profiled: ModelProfile, tmp_path: Path) -> None:
    """A checkpoint stores offloaded state of replicas once; plain replicas resume from it, and vice versa."""
    task, still = (
        replicated("dropped"),
        sliced_plan(profiled, [0, 6], [2], shard=("parameters",), buckets=(2,)),
    )
    plan = replace(
        still, decisions=(away(0, 0, 3, What.UPDATE), away(0, 3, 6), away(0, 3, 6, kind="parameters"))
    )
    plain = sliced_plan(profiled, [0, 3, 6], [1, 2])
    goes_on(task, [plan, plain, plan], batches(task, plan, 3), tmp_path)


@pytest.mark.parametrize(("shard", "times"), [("none", 2), ("optimizer", 1), ("gradients", 1)])
def test_hosts_keep_what_replicas_own(shard: Sharding, times: int, profiled: ModelProfile) -> None:
    """The host keeps the state of a layer once for each replica with that state."""
    plan = replace(
        sliced_plan(profiled, [0, 6], [2], shard=(shard,)), decisions=(away(0, 0, 3), away(0, 3, 6))
    )
    state = sum(cost.state_bytes for cost in plan.measured(0).costs)
    assert lent_bytes(arenas_of(plan, lower(plan)), Member.host(0)) == times * state
    assert sum(simulate(plan).peak_bytes) < sum(simulate(replace(plan, decisions=())).peak_bytes)


def test_an_owner_alone_takes_the_time_of_its_layers_on_the_host(profiled: ModelProfile) -> None:
    """Host updates of all owners together take the time of one device without replicas."""
    found = []
    for degree, shard in ((1, "none"), (2, "gradients")):
        plan = sliced_plan(profiled, [0, 6], [degree], shard=(shard,))
        host = replace(plan.cluster.hosts[0], memory_bandwidth=1e6)
        plan = replace(
            plan, cluster=replace(plan.cluster, hosts=(host,)), decisions=(away(0, 0, 6, What.UPDATE),)
        )
        events = [event for device in simulate(plan).devices for event in device.events]
        steps = [event for event in events if event.step == 1 and event.action == "0STEP@host"]
        found.append(sum(event.end_seconds - event.start_seconds for event in steps))
    assert found[0] == pytest.approx(found[1])


@pytest.mark.parametrize(
    ("shard", "decision", "message"),
    [
        (
            "optimizer",
            away(0, 0, 3, What.UPDATE),
            r"shard only the optimizer state, .* \(shard='gradients'\)",
        ),
        (
            "gradients",
            away(0, 0, 3, kind="gradients"),
            "shard gradients, whose gradients are reduced as soon as",
        ),
        ("gradients", away(0, 0, 3, kind="parameters"), r"hold all parameters, .* \(shard='parameters'\)"),
    ],
)
def test_what_not_every_replica_has_a_part_of_stays(
    shard: Sharding, decision: Decision, message: str, profiled: ModelProfile
) -> None:
    """State that some replicas lack a part of cannot be offloaded; the error names the state to divide."""
    plan = sliced_plan(profiled, [0, 6], [2], shard=(shard,))
    with pytest.raises(UsageError, match=message):
        lower(replace(plan, decisions=(decision,)))


def test_an_owner_keeps_parameters_until_it_has_sent_them(profiled: ModelProfile) -> None:
    """From an UNSHARD to its join an owner keeps its parameters, though the device computes other layers
    meanwhile.
    """
    still = sliced_plan(profiled, [0, 6], [2], microbatches=3, shard=("parameters",), buckets=(3,))
    plan = replace(
        still, decisions=tuple(away(0, n, n + 1, kind="parameters", behind=0) for n in (0, 3, 4, 5))
    )
    for actions in lower(plan).actions:
        texts, sending = list(map(str, actions)), set[tuple[int, int] | None]()
        assert "0F0[3:4]" in texts[texts.index("0UNSHARD[4:6]") : texts.index("0WAIT_UNSHARD[4:6]")]
        for action in actions:
            if action.kind is Kind.UNSHARD:
                (sending.discard if action.wait else sending.add)(action.layers)
            elif action.kind is Kind.OFFLOAD and isinstance(action.subject, Subject):
                assert not any(run and run[0] <= action.subject.layer < run[1] for run in sending)
