"""State offload and updates on the host: the numbers and predicted bytes of plans without moves."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from torch import nn

from pipefit.errors import OutOfMemory
from pipefit.lowering import lower
from pipefit.memory.arenas import arenas_of, lent_bytes
from pipefit.runtime import Trainer, certify, train
from pipefit.schema.decisions import Decision, What
from pipefit.schema.devices import Host, Member
from pipefit.schema.trace import Trace
from pipefit.simulator import simulate
from support.allocator_events import measured_peaks
from support.memory_samples import samples, step_peaks_of
from support.offloaded_state import (
    EACH,
    KINDS,
    STEPS,
    assert_same,
    away,
    clipping,
    found,
    one_stage,
    task_named,
    trained,
)
from support.random_offloads import make_chain, moving
from support.random_state_offloads import moving_states
from support.random_trainings import random_plan
from support.small_tasks import plan_of, task_of


def without_agreements(trace: Trace) -> Trace:
    """Return the trace without the exchanges before an update.

    They are few bytes, which the simulator leaves out, and the check for overflows is not part of a dry run.
    """
    devices = (
        replace(device, memory=tuple(sample for sample in device.memory if "AGREE" not in sample.action))
        for device in trace.devices
    )
    return replace(trace, devices=tuple(devices))


def assert_as_foretold(kind: str, seed: int) -> None:
    """Assert that a random plan with random state moves trains the expected numbers in the expected bytes."""
    rng = Random(f"{kind} {seed}")
    task, still = (
        task_named(kind),
        clipping(random_plan(found(kind), rng, microbatches=rng.randint(1, 4)), kind),
    )
    plan = moving_states(moving(still, rng) if rng.random() < 0.5 else still, rng)
    losses, state, trace = trained(task, plan)
    expected, wanted, _ = trained(task, still)
    assert losses == expected
    assert_same(state, wanted)
    folded, whole = (
        without_agreements(certify(task, plan, steps=STEPS, fold=fold)) for fold in (True, False)
    )
    assert samples(without_agreements(trace)) == samples(folded) == samples(whole)
    assert step_peaks_of(folded) == step_peaks_of(without_agreements(simulate(plan, steps=STEPS)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_state_is_moved_numbers_and_bytes_are_those_foretold(kind: str) -> None:
    """Losses, parameters, buffers and optimizer state equal a plan without moves bit by bit.

    Every measured sample equals the dry run's, folded or not; the peak of every step is the simulator's.
    """
    assert_as_foretold(kind, 0)


@pytest.mark.gallery
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("kind", KINDS)
def test_more_plans_that_move_state_are_as_foretold(kind: str, seed: int) -> None:
    """Numbers and bytes of many random plans with moved state are as predicted."""
    assert_as_foretold(kind, seed)


@pytest.mark.sample(1)
@EACH
def test_the_allocator_sees_what_state_leaves_and_comes_back(decisions: tuple[Decision, ...]) -> None:
    """The allocator's events have the peaks of the dry run: offloaded state takes no device memory."""
    task, plan = task_named("adamw"), one_stage(*decisions)
    dry, still = certify(task, plan), certify(task, replace(plan, decisions=()))
    assert measured_peaks(task, plan) == [[dry.devices[0].step_peak_bytes(step) for step in range(2)]]
    assert dry.devices[0].step_peak_bytes(1) < still.devices[0].step_peak_bytes(1)


def test_a_host_pays_for_state_gradients_parameters_and_the_update_itself() -> None:
    """A host holds, for two layers updated with AdamW, four bytes a number for the gradient, four for the
    parameter and eight of state, the counters, and the memory of the largest update. One byte less is
    refused.
    """
    task, plan = task_named("adamw"), one_stage(away(0, 7, 9, What.UPDATE))
    costs = plan.measurement.costs[7:9]
    numbers = [cost.parameter_bytes // 4 for cost in costs]
    counters = 4 * sum(len(cost.parameters) for cost in costs)
    first = numbers[0] * 8 + 2 * 4 + costs[1].update_first_peak_bytes, costs[0].update_first_peak_bytes
    later = sum(numbers) * 8 + counters + max(cost.update_peak_bytes for cost in costs)
    needed = sum(numbers) * 8 + max(*first, later)
    assert lent_bytes(arenas_of(plan, lower(plan)), Member.host(0)) == needed
    for run in (Trainer, certify):
        for room in (needed, needed - 1):
            host = Host(memory_bytes=room, memory_bandwidth=1e10)
            tight = replace(plan, cluster=replace(plan.cluster, hosts=(host,)))
            if room == needed:
                run(task, tight)
            else:
                with pytest.raises(OutOfMemory, match=r"host0 has .* would need .* 1 B too much"):
                    run(task, tight)


@pytest.mark.parametrize("place", ["host", "device1", "host*1+device1*2"])
def test_homes_are_as_large_as_the_state(place: str) -> None:
    """The optimizer state of layers 0 and 5 to 8 is kept in two homes of its size from the second step on."""
    plan = one_stage(away(0, 0, 1, place=place), away(0, 5, 9, place=place))
    costs = plan.measurement.costs
    lent = sum(arena.nbytes for arena in arenas_of(plan, lower(plan)))
    assert lent == costs[0].state_bytes + sum(cost.state_bytes for cost in costs[5:9])


def test_equal_layers_that_move_nothing_are_still_folded() -> None:
    """Of 24 equal layers, two with offloaded optimizer state, the others are still folded."""
    task = task_of(lambda: [nn.Linear(8, 8) for _ in range(24)], outputs=8, optimizer=torch.optim.AdamW)
    still = plan_of(task, [12, 12], microbatches=3)
    decisions = away(1, 17, 19), away(1, 23, 24, What.UPDATE)
    plan = replace(still, decisions=decisions)
    assert certify(task, plan) == certify(task, plan, fold=False)


def test_workers_move_state_and_update_on_the_host_as_one_process_does() -> None:
    """Two workers that move state to the host and to each other, and update on the host, have the losses and
    samples of one process.
    """
    task, still = make_chain(), plan_of(make_chain(), [3, 3], microbatches=2)
    decisions = (
        away(0, 0, 1, place="device1*1+host*1", ahead=1),
        away(0, 2, 3, What.UPDATE),
        away(0, 0, 1, kind="parameters"),
        away(1, 5, 6, What.UPDATE),
        away(1, 3, 5, kind="gradients", place="device0"),
    )
    plan = replace(still, decisions=decisions)
    losses, trace = train(make_chain, plan, steps=3)
    torch.manual_seed(0)
    alone = Trainer(task, plan)
    expected = []
    for step in range(3):
        torch.manual_seed(step)
        expected.append(alone.step(task.batch(plan.training.batch_size)))
    assert losses == expected
    assert samples(trace) == samples(alone.trace)
