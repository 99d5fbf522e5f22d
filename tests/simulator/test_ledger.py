"""Memory of devices: sums by hand, closed forms, categories, and programs that use missing tensors."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipefit.errors import UsageError
from pipefit.lowering import SCHEDULES, lower
from pipefit.lowering.passes.recomputation import RECOMPUTE, Recompute
from pipefit.memory.storages import effect
from pipefit.schema.actions import Action, Kind
from pipefit.schema.decisions import Decision, Microbatches, Run, SavedTensors, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program, parse_program
from pipefit.schema.trace import Category, MemorySample
from pipefit.simulator import Costs, Simulation, simulate
from support.pipelines import equal_profile, make_cluster, make_plan, random_profile
from support.synthetic_models import brief, hostile, profile

# Device 0 of two, under GPipe with two microbatches. One layer: parameters 32, input 8 (saved), output 8 (not
# saved), saved tensors 16, scratch 4. A forward peaks at 8 + 16 + 4 = 28 and leaves 24 saved. A backward
# peaks at 8 + 32 + 4 = 44 the first time and at 8 + 32 + 8 = 48 later. The first stage sends no gradient
# back. Optimizer state is 64, with 4 of scratch.
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
    """Every sample of a stage, in the first step and in the second, is the sum of the layer's sizes, written
    by hand.
    """
    plan = make_plan(equal_profile(2), [1, 1], microbatches=2, schedule="gpipe")
    samples = simulate(plan, steps=2).devices[0].memory
    assert {s.action: s.total_bytes for s in samples if s.step == 0} == BY_HAND
    later = {action: nbytes + 64 for action, nbytes in BY_HAND.items()} | {"0STEP": 32 + 32 + 64 + 4}
    assert {s.action: s.total_bytes for s in samples if s.step == 1} == later


def test_gradients_that_a_step_leaves_are_there_in_the_next_one() -> None:
    """Without an update, gradients stay: the second step's first backward peaks like a later one of the
    first.
    """
    plan = make_plan(equal_profile(2), [1, 1], microbatches=2, schedule="gpipe")
    samples = simulate(plan, program=lower(plan, update=False), steps=2).devices[0].memory
    found = {
        (s.step, s.action): s.by_category[Category.GRADIENTS] for s in samples if s.action.startswith("0B")
    }
    assert found == dict.fromkeys([(0, "0B0"), (0, "0B1"), (1, "0B0"), (1, "0B1")], 32)


def test_categories_say_what_the_bytes_are_for() -> None:
    """A backward's peak has parameters, its gradients, the tensors it consumes, messages, and scratch."""
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


@given(
    st.integers(0, 100),
    *(
        st.integers(-50, 50),
        st.integers(-50, 50),
        st.integers(-50, 50),
        st.integers(-50, 50),
        st.integers(-50, 50),
    ),
    st.integers(-50, 50),
)
def test_an_effect_splits_its_peak_without_remainder(
    above: int,
    gradients: int,
    optimizer: int,
    activations: int,
    versions: int,
    boundary: int,
    parameters: int,
) -> None:
    """Categories add up to the peak; none loses more than the action consumes; temporary is
    never negative.
    """
    changes = (gradients, optimizer, activations, versions, boundary, parameters)
    found = effect(
        peak_bytes=sum(changes) + above,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        versions=versions,
        boundary=boundary,
        parameters=parameters,
    )
    assert sum(found.at_peak) == found.peak_bytes == max(0, sum(changes) + above)
    assert found.after == changes
    assert found.at_peak[6] >= 0
    assert all(
        min(0, change) <= there <= max(0, change)
        for there, change in zip(found.at_peak, changes, strict=False)
    )


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.sampled_from(RECOMPUTE),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(0, 1 << 30),
)
def test_categories_add_up_and_end_where_they_began(
    schedule: str, recompute: Recompute, stages: int, microbatches: int, seed: int
) -> None:
    """For random layers, categories are never negative, a device's peak is its highest sample, and nothing
    leaks.
    """
    model = random_profile(2 * stages, seed)
    plan = make_plan(model, [2] * stages, microbatches=microbatches, schedule=schedule, recompute=recompute)
    simulation = Simulation(plan, steps=3)
    trace = simulation.trace()
    assert trace.peak_bytes == simulation.peak_bytes
    for device in trace.devices:
        assert all(min(sample.bytes) >= 0 for sample in device.memory)
        second, third = ([s.bytes for s in device.memory if s.step == step] for step in (1, 2))
        assert second == third


@pytest.mark.sample(24)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 4, 12])
def test_activations_are_those_of_the_microbatches_in_flight(
    schedule: str, stages: int, microbatches: int
) -> None:
    """Stage s holds the activations of M microbatches under GPipe, min(M, P-s) under 1F1B, min(M, 2(P-s)-1)
    if eager: for each microbatch 16 saved bytes and an input of 8, and on the last stage the loss's 4.
    """
    plan = make_plan(equal_profile(stages), [1] * stages, microbatches=microbatches, schedule=schedule)
    for stage, device in enumerate(simulate(plan).devices):
        retained = 16 + 8 + (4 if stage == stages - 1 else 0)
        most = max(sample.by_category.get(Category.ACTIVATIONS, 0) for sample in device.memory)
        limits = {"1f1b": stages - stage, "eager-1f1b": 2 * (stages - stage) - 1}
        assert most == min(microbatches, limits.get(schedule, microbatches)) * retained


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1 << 30))
def test_cutting_stages_into_segments_changes_no_peak(
    stages: int, layers: int, microbatches: int, seed: int
) -> None:
    """Forwards and backwards layer by layer peak exactly with whole ones for any shared storages, if no
    tensor outlives its layer's backward.
    """
    model = brief(hostile(Random(seed), stages * layers, shared=0))
    plan = make_plan(profile(model), [layers] * stages, microbatches=microbatches)
    whole, cut = Simulation(plan, steps=2), Simulation(plan, program=segmented(plan), steps=2)
    assert cut.peak_bytes == whole.peak_bytes
    assert cut.step_seconds == pytest.approx(whole.step_seconds)


def segmented(plan: Plan) -> Program:
    """Return the plan's program with every forward and backward cut into single layers."""
    program = lower(plan)
    pieces = [[piece for action in actions for piece in cut(plan, action)] for actions in program.actions]
    return Program(
        placement=program.placement, microbatches=program.microbatches, actions=tuple(map(tuple, pieces))
    )


def cut(plan: Plan, action: Action) -> list[Action]:
    """Cut the action layer by layer, backwards from the last."""
    stage = plan.stages[action.stage]
    ranges = list(pairwise(range(stage.start, stage.stop + 1)))
    if action.kind is Kind.FORWARD:
        return [action._replace(layers=layers) for layers in ranges]
    return (
        [action._replace(layers=layers) for layers in reversed(ranges)]
        if action.kind is Kind.BACKWARD
        else [action]
    )


def test_the_losses_of_all_microbatches_lie_in_the_boundary_buffers() -> None:
    """The last stage holds four bytes for each microbatch, from the start."""
    sample = simulate(make_plan(equal_profile(2), [1, 1], microbatches=5)).devices[1].memory[0]
    assert sample == MemorySample(
        step=0, action="1RECV_F0", seconds=0.0, bytes=(32, 0, 0, 0, 0, 4 * 5 + 8, 0, 0, 0)
    )


def test_costs_may_be_shared_by_plans() -> None:
    """Plans of one profile and training, on any devices, have the same figures with shared and with separate
    costs.
    """
    cluster = make_cluster(2)
    slow = replace(cluster.devices[1].kind, memory_bandwidth=1e9)
    cluster = replace(cluster, devices=(cluster.devices[0], replace(cluster.devices[1], kind=slow)))
    profile = equal_profile(6, forward_seconds=None, parameter_bytes=100)
    plans = [make_plan(profile, split, cluster=cluster) for split in ([3, 3], [2, 4], [5, 1])]
    plans.append(
        replace(plans[0], stages=tuple(replace(s, grid=Grid.of(1 - s.device)) for s in plans[0].stages))
    )
    shared, different = Costs.of(plans[0]), set()
    for plan in plans:
        alone, together = Simulation(plan), Simulation(plan, costs=shared)
        assert (alone.peak_bytes, alone.step_seconds) == (together.peak_bytes, together.step_seconds)
        different.add(alone.step_seconds)
    assert len(different) == len(plans)


CUT = "0LOAD0 0LOAD1 0F0[0:1] 0F0[1:2] 0F1[0:1] 0F1[1:2]"  # two microbatches in pieces of a layer


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0", "0F0 lacks its data: 0LOAD0 must come before it"),
        ("0LOAD0 0LOAD0", "0LOAD0 loads data that is already loaded"),
        ("0LOAD0 0F0 0F0", "0F0 is out of order"),
        ("0LOAD0 0F0[1:2]", "out of order: the next layer forward is 0"),
        ("0LOAD0 0F0[0:3]", "outside its stage, which holds layers 0 to 1"),
        ("0LOAD0 0F0[0:1] 0B0[0:1]", "out of order: the next layer backward is 1"),
        ("0LOAD0 0F0[0:1] 0F0[1:2] 0B0[0:1]", "out of order: the next layer backward is 1"),
        (
            "0LOAD0 0F0 0B0[1:2]",
            "ends within layers that went forward in one action: split forwards and backwards at the same layers",
        ),
        ("0LOAD0 0F0 0B0 0B0", "out of order"),
        ("0LOAD0 0F0 0STEP", "0STEP lacks gradients"),
        ("0LOAD0 0F0[0:1] 0F0[1:2] 0B0[1:2] 0STEP", "0STEP lacks gradients"),
        ("0LOAD0 0F0 0B0 0STEP0", "0STEP0 has a number, but this program updates once, at its end"),
        ("0LOAD0 0N0 0B0 0STEP", "needs 0R0 before it"),
        ("0LOAD0 0F0 0R0", "nothing to recompute"),
        ("0LOAD0 0N0 0R0 0R0", "nothing to recompute"),
        ("0LOAD0 0N0[0:1] 0F0[1:2] 0B0 0STEP", r"needs 0R0\[0:1\] before it"),
        ("0LOAD0 0N0 0R0[0:1]", "needs a forward of exactly these layers"),
        (
            "0LOAD0 0F0 0I0 0W0",
            "0I0 is valid in a program, but neither the simulator nor the runtime supports it yet",
        ),
        ("0LOAD0 0F0{0:1}", r"0F0\{0:1\} is valid in a program, but neither"),
        ("0LOAD0 0F0 0B0 0STEP[0:1] 0STEP", r"0STEP lacks gradients"),
        ("0LOAD0 0F0 0B0 0STEP[0:3]", r"0STEP\[0:3\] is outside its stage, which holds layers 0 to 1"),
        ("0LOAD-1", "0LOAD-1 needs a microbatch number from 0 to 1"),
        ("0LOAD2", "0LOAD2 needs a microbatch number from 0 to 1"),
        ("0LOAD", "needs a microbatch number"),
        (f"{CUT} 0B0[1:2] 0B1[1:2] 0B1[0:1] 0B0[0:1] 0STEP", None),
        (f"{CUT} 0B0[1:2] 0B1 0B0[0:1]", "first backward of the step only for some of its layers"),
    ],
)
def test_a_program_that_uses_what_is_not_there_is_refused(text: str, message: str | None) -> None:
    """Programs on one stage of two layers are refused with device, action and missing tensor; segments may
    interleave.
    """
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
        (
            ("0SEND_F0 0WAIT_SEND_F0", "1RECV_F0 1WAIT_RECV_F0"),
            "0SEND_F0 comes before the forward of layer 0",
        ),
        (("0LOAD0 0F0", "1F0"), "1F0 lacks its inputs: 1WAIT_RECV_F0 must come before it"),
        (("0LOAD0 0F0 0SEND_F0 0WAIT_SEND_F0", "1RECV_F0 1F0 1WAIT_RECV_F0"), "1F0 lacks its inputs"),
        (
            ("0LOAD0 0F0 0SEND_F0 0WAIT_SEND_F0", "1RECV_F0 1WAIT_RECV_F0 1F0"),
            "1F0 lacks its data: 1LOAD0 must",
        ),
        (("0LOAD0 0F0 0B0", ""), "0B0 lacks its gradients: 0WAIT_RECV_B0 must come before it"),
        (
            ("0RECV_B0 0WAIT_RECV_B0", "1SEND_B0 1WAIT_SEND_B0"),
            "1SEND_B0 comes before the backward of layer 1",
        ),
        (
            ("0LOAD0 0F0" + 2 * " 0SEND_F0 0WAIT_SEND_F0", 2 * " 1RECV_F0 1WAIT_RECV_F0"),
            "0SEND_F0 happens twice",
        ),
    ],
)
def test_messages_out_of_order_are_refused(lines: tuple[str, str], message: str) -> None:
    """A message must exist to be sent, and its input must arrive before use."""
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
    """LOAD belongs to the first and the last stage; a middle stage is refused."""
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
    """A program without the backward runs once; a second step finds the first one's microbatch still in
    flight.
    """
    plan = make_plan(equal_profile(1), [1], microbatches=1)
    program = parse_program("device 0: 0LOAD0 0F0", placement=((0,),), microbatches=1)
    assert simulate(plan, program=program, steps=1).peak_bytes[0] > 0
    with pytest.raises(UsageError, match="0LOAD0 loads data that is already loaded"):
        simulate(plan, program=program, steps=2)


def test_several_stages_on_a_device_share_its_memory() -> None:
    """Two stages on a device share memory at rest and pass values through separate buffers; every sample is a
    sum by hand.
    """
    plan = make_plan(equal_profile(2), [1, 1], microbatches=1, schedule="gpipe", devices=1)
    rest = 2 * 32 + 4  # parameters, and the loss
    assert {s.action: s.total_bytes for s in simulate(plan, steps=1).devices[0].memory} == {
        "1RECV_F0": rest + 8,
        "0LOAD0": rest + 8 + 8,
        "0F0": rest + 16 + 28,
        "1LOAD0": rest + 24 + 8 + 8 + 4,  # saved by stage 0, being sent, received, a target
        "1F0": rest + 44 + 24 + 8,  # at its highest in the loss
        "0WAIT_SEND_F0": rest + 24 + 8 + 28,  # the loss saves four bytes too, and the target is gone
        "0RECV_B0": rest + 24 + 28 + 8,
        "1B0": rest + 24 + 24 + 8 + 8 + 44,  # the loss has given way to the gradient of its input
        "0B0": rest + 32 + 24 + 8 + 8 + 44,
        "1WAIT_SEND_B0": rest + 64 + 8,
        "0STEP": rest + 64 + 68,
        "1STEP": rest + 64 + 32 + 68,
    }


@settings(max_examples=40)
@given(
    st.sampled_from(["gpipe", "torchgpipe"]),
    st.sampled_from(RECOMPUTE),
    st.integers(1, 3),
    st.integers(2, 3),
    st.integers(1, 4),
    st.integers(0, 1 << 30),
)
def test_stages_that_share_devices_leak_nothing(
    schedule: str, recompute: Recompute, ranks: int, chunks: int, microbatches: int, seed: int
) -> None:
    """With any recomputation, the third step of devices with several stages equals the second,
    to the byte.
    """
    split = [2] * (ranks * chunks)
    plan = make_plan(
        random_profile(2 * len(split), seed, shared=0), split,
        devices=ranks, microbatches=microbatches, schedule=schedule, recompute=recompute,
    )  # fmt: skip
    for device in simulate(plan, steps=3).devices:
        assert all(min(sample.bytes) >= 0 for sample in device.memory)
        second, third = ([s.bytes for s in device.memory if s.step == step] for step in (1, 2))
        assert second == third


@settings(max_examples=60)
@given(
    st.data(),
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(0, 1 << 30),
)
def test_runs_inside_stages_leak_nothing_and_take_their_time(
    data: st.DataObject, schedule: str, stages: int, microbatches: int, seed: int
) -> None:
    """Recomputing any run of any stage, for any share of the microbatches, early or late, adds only time;
    steps repeat.
    """
    decisions = tuple(
        Decision(
            stage=number,
            subject=Run(start=4 * number + start, stop=4 * number + stop),
            what=What.RECOMPUTE,
            microbatches=Microbatches(taken=1, every=data.draw(st.integers(1, 2))),
            ahead=data.draw(st.integers(0, 2)),
        )
        for number in range(stages)
        for start, stop in [data.draw(st.sampled_from([(0, 4), (0, 2), (1, 2), (1, 3), (3, 4), (2, 4)]))]
    )
    split, model = [4] * stages, random_profile(4 * stages, seed, shared=0)
    kept, run = (
        make_plan(model, split, microbatches=microbatches, schedule=schedule, decisions=of)
        for of in ((), decisions)
    )
    assert Simulation(run).step_seconds[0] >= Simulation(kept).step_seconds[0]
    for device in simulate(run, steps=3).devices:
        assert all(min(sample.bytes) >= 0 for sample in device.memory)
        second, third = ([s.bytes for s in device.memory if s.step == step] for step in (1, 2))
        assert second == third


def test_a_run_that_is_recomputed_keeps_its_input_instead_of_what_it_saves() -> None:
    """The middle one of three layers is recomputed: between forward and backward its 16 bytes are gone, but
    its saved input of 8 stays.
    """
    middle = Decision(stage=0, subject=Run(start=1, stop=2), what=What.RECOMPUTE)
    kept, run = (
        make_plan(equal_profile(3), [3], microbatches=2, schedule="gpipe", decisions=of)
        for of in ((), (middle,))
    )
    held = [
        max(
            s.by_category.get(Category.ACTIVATIONS, 0)
            for s in simulate(p).devices[0].memory
            if s.action == "0LOAD1"
        )
        for p in (kept, run)
    ]
    assert held[0] - held[1] == 16


def test_a_bundle_moves_together() -> None:
    """Two saved tensors of one decision move with one offload and one reload, in their added time."""
    both = Decision(
        stage=0, subject=SavedTensors(tensors=((0, 0), (1, 0))), what=What.OFFLOAD, place=parse_place("host")
    )
    plan = make_plan(
        equal_profile(2), [2], microbatches=4, schedule="gpipe", decisions=(both,),
        cluster=make_cluster(1, bytes_per_second=32.0),
    )  # fmt: skip
    trace = simulate(plan, steps=1)
    copies = [e for e in trace.devices[0].events if "LOAD0#0" in e.action]
    assert [e.action for e in copies] == ["0OFFLOAD0#0@host", "0RELOAD0#0@host"]
    assert [e.end_seconds - e.start_seconds for e in copies] == [1.0, 1.0]
    held = {s.action: s.by_category.get(Category.ACTIVATIONS, 0) for s in trace.devices[0].memory}
    assert held["0LOAD1"] - held["0LOAD2"] == 16 + 16 - (2 * (16 + 8) + 4)


def test_what_a_program_cannot_say_to_the_simulator_is_refused() -> None:
    """Sharded stages and asynchronous bodies are valid programs that this simulator refuses."""
    plan = make_plan(equal_profile(1), [1], microbatches=1, cluster=make_cluster(2))
    wide = parse_program("device 0: 0LOAD0\ndevice 1:", placement=((0, 1),), microbatches=1)
    with pytest.raises(
        UsageError, match=r"stage 0 is on devices \[0, 1\] in the program, but on \[0\] in the plan"
    ):
        simulate(plan, program=wide)
    text = "device 0: 0LOAD0 0F0 0OFFLOAD0[0.0]@host\ndevice 1:\ncarried out 0: 0OFFLOAD0[0.0]@host\ncarried out 1:"
    body = parse_program(text, placement=((0,),), microbatches=1)
    with pytest.raises(UsageError, match="a part of an asynchronous schedule without its first steps"):
        simulate(plan, program=body)
