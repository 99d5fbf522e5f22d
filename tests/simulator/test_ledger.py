"""What devices hold: sums by hand, closed forms, categories, and programs that use what is not there."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger import walk
from pipefit.cost.memory import StageMemory

from pipefit.cost.effects import effect
from pipefit.errors import UsageError
from pipefit.plans import Grid, Plan
from pipefit.program import Action, Kind, Program, parse_program
from pipefit.schedule import SCHEDULES, lower
from pipefit.simulator import Costs, Simulation, simulate
from pipefit.trace import Category, MemorySample
from pipelines import equal_profile, make_cluster, make_plan, random_profile

# Device 0 of two, under GPipe with two microbatches. One layer: parameters 32, input 8 (saved), output 8 (not saved),
# kept 16, scratch 4. So a forward peaks at 8 + 16 + 4 = 28 and leaves 24 saved; a backward peaks at 8 + 32 + 4 = 44 the
# first time and at 8 + 32 + 8 = 48 later. On the first stage it sends no gradient back. Optimizer state is 64, with
# 4 of scratch.
BY_HAND = {  # the highest total during the action: first step, later steps (64 bytes of state more, no growth in STEP)
    "0LOAD0": 32 + 8,
    "0F0": 40 + 28,
    "0RECV_B0": 32 + 24 + 8 + 8,
    "0LOAD1": 72 + 8,
    "0F1": 80 + 28,
    "0WAIT_SEND_F0": 32 + 2 * 24 + 2 * 8 + 8,
    "0RECV_B1": 32 + 2 * 24 + 8 + 2 * 8,
    "0B0": 104 + 44,
    "0WAIT_SEND_F1": 32 + 32 + 24 + 8 + 8,
    "0B1": 96 + 48,
    "0STEP": 32 + 32 + 68,
}


def test_a_small_program_adds_up_as_by_hand() -> None:
    """Every sample of a stage, in the first step and in the second, is the sum written down from the layer's sizes."""
    plan = make_plan(equal_profile(2), [1, 1], microbatches=2, schedule="gpipe")
    samples = simulate(plan, steps=2).devices[0].memory
    assert {s.action: s.total_bytes for s in samples if s.step == 0} == BY_HAND
    later = {action: nbytes + 64 for action, nbytes in BY_HAND.items()} | {"0STEP": 32 + 32 + 64 + 4}
    assert {s.action: s.total_bytes for s in samples if s.step == 1} == later


def test_categories_say_what_the_bytes_are_for() -> None:
    """At a backward's peak: parameters, the gradients it leaves, what it consumes, what travels, and scratch."""
    trace = simulate(make_plan(equal_profile(2), [1, 1], microbatches=2, schedule="gpipe"), steps=1)
    found = {sample.action: sample.by_category for sample in trace.devices[0].memory}
    assert found["0F0"] == {
        Category.PARAMETERS: 32, Category.ACTIVATIONS: 24, Category.BOUNDARY: 8, Category.TEMPORARY: 4
    }  # fmt: skip
    assert found["0B0"] == {
        Category.PARAMETERS: 32, Category.GRADIENTS: 32, Category.ACTIVATIONS: 48, Category.BOUNDARY: 24,
        Category.TEMPORARY: 12,
    }  # fmt: skip
    assert found["0STEP"] == {
        Category.PARAMETERS: 32, Category.GRADIENTS: 32, Category.OPTIMIZER: 64, Category.TEMPORARY: 4
    }  # fmt: skip


@given(st.integers(0, 100), st.integers(-50, 50), st.integers(-50, 50), st.integers(-50, 50), st.integers(-50, 50))
def test_an_effect_splits_its_peak_without_remainder(
    above: int, gradients: int, optimizer: int, activations: int, boundary: int
) -> None:
    """Categories add up to the peak; none has lost more than the action consumes; temporary is never negative."""
    changes = (gradients, optimizer, activations, boundary)
    found = effect(
        peak_bytes=sum(changes) + above,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        boundary=boundary,
    )
    assert sum(found.at_peak) == found.peak_bytes == max(0, sum(changes) + above)
    assert found.after == changes
    assert found.at_peak[4] >= 0
    assert all(min(0, change) <= there <= max(0, change) for there, change in zip(found.at_peak, changes, strict=False))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 5), st.integers(1, 6), st.integers(0, 1 << 30))
def test_categories_add_up_and_end_where_they_began(schedule: str, stages: int, microbatches: int, seed: int) -> None:
    """For random layers, no category is negative, a device's peak is its highest sample, and nothing leaks."""
    plan = make_plan(random_profile(2 * stages, seed), [2] * stages, microbatches=microbatches, schedule=schedule)
    simulation = Simulation(plan, steps=3)
    trace = simulation.trace()
    assert trace.peak_bytes == simulation.peak_bytes == walk(plan)
    for device in trace.devices:
        assert all(min(sample.bytes) >= 0 for sample in device.memory)
        second, third = ([s.bytes for s in device.memory if s.step == step] for step in (1, 2))
        assert second == third


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 4, 12])
def test_activations_are_those_of_the_microbatches_in_flight(schedule: str, stages: int, microbatches: int) -> None:
    """Stage s holds the activations of M microbatches under GPipe, of min(M, P-s) under 1F1B."""
    plan = make_plan(equal_profile(stages), [1] * stages, microbatches=microbatches, schedule=schedule)
    for stage, device in enumerate(simulate(plan).devices):
        memory = StageMemory(plan.measurement, stage, stage + 1)
        retained = memory.forward().after_bytes + memory.input_bytes + memory.target_bytes - memory.sent_bytes
        most = max(sample.by_category.get(Category.ACTIVATIONS, 0) for sample in device.memory)
        in_flight = microbatches if schedule == "gpipe" else min(microbatches, stages - stage)
        assert most == in_flight * retained


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1 << 30))
def test_cutting_stages_into_segments_changes_no_peak(stages: int, layers: int, microbatches: int, seed: int) -> None:
    """Forwards and backwards layer by layer peak exactly where whole ones do, whatever the layers share."""
    plan = make_plan(random_profile(stages * layers, seed), [layers] * stages, microbatches=microbatches)
    whole, cut = Simulation(plan, steps=2), Simulation(plan, program=segmented(plan), steps=2)
    assert cut.peak_bytes == whole.peak_bytes
    assert cut.step_seconds == pytest.approx(whole.step_seconds)


def segmented(plan: Plan) -> Program:
    """The plan's program with every forward and backward cut into single layers."""
    program = lower(plan)
    pieces = [[piece for action in actions for piece in cut(plan, action)] for actions in program.actions]
    return Program(placement=program.placement, microbatches=program.microbatches, actions=tuple(map(tuple, pieces)))


def cut(plan: Plan, action: Action) -> list[Action]:
    """The action layer by layer, backwards from the last."""
    stage = plan.stages[action.stage]
    ranges = list(pairwise(range(stage.start, stage.stop + 1)))
    if action.kind is Kind.FORWARD:
        return [action._replace(layers=layers) for layers in ranges]
    return [action._replace(layers=layers) for layers in reversed(ranges)] if action.kind is Kind.BACKWARD else [action]


def test_the_losses_of_all_microbatches_lie_in_the_boundary_buffers() -> None:
    """The last stage holds four bytes for each microbatch, from the start."""
    sample = simulate(make_plan(equal_profile(2), [1, 1], microbatches=5)).devices[1].memory[0]
    assert sample == MemorySample(step=0, action="1RECV_F0", seconds=0.0, bytes=(32, 0, 0, 0, 0, 4 * 5 + 8, 0, 0))


def test_costs_may_be_shared_by_plans() -> None:
    """Plans of one profile and training, on whatever devices, get from shared costs the figures that they get alone."""
    cluster = make_cluster(2)
    slow = replace(cluster.devices[1].kind, memory_bandwidth=1e9)
    cluster = replace(cluster, devices=(cluster.devices[0], replace(cluster.devices[1], kind=slow)))
    profile = equal_profile(6, forward_seconds=None, parameter_bytes=100)
    plans = [make_plan(profile, split, cluster=cluster) for split in ([3, 3], [2, 4], [5, 1])]
    plans.append(replace(plans[0], stages=tuple(replace(s, grid=Grid.of(1 - s.device)) for s in plans[0].stages)))
    shared, different = Costs.of(plans[0]), set()
    for plan in plans:
        alone, together = Simulation(plan), Simulation(plan, costs=shared)
        assert (alone.peak_bytes, alone.step_seconds) == (together.peak_bytes, together.step_seconds)
        different.add(alone.step_seconds)
    assert len(different) == len(plans)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0", "0F0 has no data: 0LOAD0 must come before it"),
        ("0LOAD0 0LOAD0", "0LOAD0 loads what is there already"),
        ("0LOAD0 0F0 0F0", "0F0 is out of order"),
        ("0LOAD0 0F0[1:2]", "out of order: the next layer forward is 0"),
        ("0LOAD0 0F0[0:3]", "outside its stage, which holds layers 0 to 1"),
        ("0LOAD0 0F0[0:1] 0B0[0:1]", "out of order: the next layer backward is 1"),
        ("0LOAD0 0F0 0B0[0:1]", "out of order: the next layer backward is 1"),
        ("0LOAD0 0F0 0B0 0B0", "out of order"),
        ("0LOAD0 0F0 0STEP", "0STEP has no gradients"),
        ("0LOAD0 0F0 0B0[1:2] 0STEP", "0STEP has no gradients"),
        ("0LOAD0 0F0 0B0 0STEP0", "asynchronous, which is not supported by the simulator yet"),
        ("0LOAD0 0N0 0B0 0STEP", "needs 0R0 before it"),
        ("0LOAD0 0F0 0R0", "nothing to run again"),
        ("0LOAD2", "0LOAD2 needs the number of a microbatch, 0 to 1"),
        ("0LOAD", "needs the number of a microbatch"),
        ("0LOAD0 0LOAD1 0F0 0F1 0B0[1:2] 0B1[1:2] 0B1[0:1] 0B0[0:1] 0STEP", None),
        ("0LOAD0 0LOAD1 0F0 0F1 0B0[1:2] 0B1 0B0[0:1]", "first backward of the step for some of its layers only"),
    ],
)
def test_a_program_that_uses_what_is_not_there_is_refused(text: str, message: str | None) -> None:
    """One stage of two layers: the error names device, action and what is missing; segments may interleave."""
    plan = make_plan(equal_profile(2), [2], microbatches=2)
    program = parse_program(f"device 0: {text}", placement=((0,),), microbatches=2)
    if message is None:
        assert Simulation(plan, program=program).peak_bytes[0] > 0
    else:
        with pytest.raises(UsageError, match=f"device 0: .*{message}"):
            simulate(plan, program=program)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("0SEND_F0 0WAIT_SEND_F0", "1RECV_F0 1WAIT_RECV_F0"), "0SEND_F0 comes before the forward of layer 0"),
        (("0LOAD0 0F0", "1F0"), "1F0 has no inputs: 1WAIT_RECV_F0 must come before it"),
        (("0LOAD0 0F0 0SEND_F0 0WAIT_SEND_F0", "1RECV_F0 1F0 1WAIT_RECV_F0"), "1F0 has no inputs"),
        (("0LOAD0 0F0 0SEND_F0 0WAIT_SEND_F0", "1RECV_F0 1WAIT_RECV_F0 1F0"), "1F0 has no data: 1LOAD0 must"),
        (("0LOAD0 0F0 0B0", ""), "0B0 has no gradients: 0WAIT_RECV_B0 must come before it"),
        (("0RECV_B0 0WAIT_RECV_B0", "1SEND_B0 1WAIT_SEND_B0"), "1SEND_B0 comes before the backward of layer 1"),
        (("0LOAD0 0F0" + 2 * " 0SEND_F0 0WAIT_SEND_F0", 2 * " 1RECV_F0 1WAIT_RECV_F0"), "0SEND_F0 happens twice"),
    ],
)
def test_messages_out_of_order_are_refused(lines: tuple[str, str], message: str) -> None:
    """What is sent must exist, and what is computed with must have arrived."""
    plan = make_plan(equal_profile(2), [1, 1], microbatches=1)
    text = "\n".join(f"device {device}: {line}" for device, line in enumerate(lines))
    with pytest.raises(UsageError, match=message):
        simulate(
            plan,
            program=parse_program(
                text,
                placement=((0,), (1,)),
                microbatches=1,
            ),
            steps=1,
        )


def test_a_middle_stage_has_nothing_to_load() -> None:
    """LOAD belongs to the first stage and the last."""
    plan = make_plan(equal_profile(3), [1, 1, 1], microbatches=1)
    with pytest.raises(UsageError, match="device 1: 1LOAD0 has nothing to load"):
        simulate(
            plan,
            program=parse_program(
                "device 0:\ndevice 1: 1LOAD0\ndevice 2:",
                placement=((0,), (1,), (2,)),
                microbatches=1,
            ),
        )


def test_a_step_that_leaves_a_microbatch_in_flight_cannot_be_repeated() -> None:
    """A program without the backward runs once; a second step finds the first one's microbatch still there."""
    plan = make_plan(equal_profile(1), [1], microbatches=1)
    program = parse_program("device 0: 0LOAD0 0F0", placement=((0,),), microbatches=1)
    assert simulate(plan, program=program, steps=1).peak_bytes[0] > 0
    with pytest.raises(UsageError, match="0LOAD0 loads what is there already"):
        simulate(plan, program=program, steps=2)
