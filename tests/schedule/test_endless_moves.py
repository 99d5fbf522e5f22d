"""Offload and recomputation under asynchronous schedules: steps against drawings, and against the same stream
cut elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest

from pipefit.errors import UsageError
from pipefit.lowering import ENDLESS, lower, lower_drain, step_programs
from pipefit.lowering.asynchronous import period
from pipefit.schema.actions import COPIES, RECEIVES, UPDATES, Action, Kind
from pipefit.schema.decisions import Decision, Microbatches, Run, SavedTensors, State, StateKind, What
from pipefit.schema.devices import parse_place
from pipefit.schema.layer_costs import Parameter, SharedParameter
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.program import Program, parse_program
from pipefit.simulator import Simulation
from support.asynchronous_programs import one_program
from support.pipelines import chain_profile, equal_profile, make_layer, make_plan
from support.random_decisions import compacted

HOST = parse_place("host")
TENSOR = Decision(stage=0, subject=SavedTensors(tensors=((0, 0),)), what=What.OFFLOAD, place=HOST, behind=2)
WEIGHTS = Decision(stage=0, subject=State(start=0, stop=1, kind="versions"), what=What.OFFLOAD, place=HOST)
EARLY = Decision(stage=0, subject=Run(start=0, stop=1), what=What.RECOMPUTE, ahead=2)


def plan_of(stages: int, microbatches: int, *decisions: Decision, schedule: str = "pipedream") -> Plan:
    """Build a plan with two layers on each of `devices` devices."""
    profile = equal_profile(2 * stages)
    return make_plan(
        profile, [2] * stages, microbatches=microbatches, schedule=schedule, decisions=tuple(decisions)
    )


def one_layer_each(stages: int, microbatches: int, *decisions: Decision, schedule: str = "pipedream") -> Plan:
    """Build a plan with one layer on each of `devices` devices."""
    profile = equal_profile(stages)
    return make_plan(
        profile, [1] * stages, microbatches=microbatches, schedule=schedule, decisions=tuple(decisions)
    )


def first_device(program: Program) -> list[str]:
    """Return the actions of device 0, with joins left by the step before and left for the next."""
    return [" ".join(map(str, own[0])) for own in (program.actions, program.carried_in, program.carried_out)]


def test_a_copy_of_one_step_is_joined_in_the_next() -> None:
    """Two stages, a microbatch a step: a copy is joined two units after its forward, in the next step."""
    plan = plan_of(2, 1, TENSOR)
    actions, carried_in, carried_out = first_device(step_programs(plan)[-1])
    assert (carried_in, carried_out) == ("0OFFLOAD-1[0.0]@host", "0OFFLOAD0[0.0]@host")
    assert actions == (
        "0RECV_B-1 0LOAD0 0F0 0WAIT_OFFLOAD-1[0.0]@host 0SEND_F0 0OFFLOAD0[0.0]@host "
        "0WAIT_RECV_B-1 0RELOAD-1[0.0]@host 0WAIT_RELOAD-1[0.0]@host 0B-1 "
        "0WAIT_SEND_F0 0STASH-1 0STEP-1 0WAIT_STASH-1"
    )
    actions, carried_in, carried_out = first_device(lower_drain(plan, entered=5))
    assert (carried_in, carried_out) == ("0OFFLOAD-1[0.0]@host", "")
    assert actions == (
        "0WAIT_OFFLOAD-1[0.0]@host 0RECV_B-1 0WAIT_RECV_B-1 0RELOAD-1[0.0]@host 0WAIT_RELOAD-1[0.0]@host 0B-1 0STEP-1"
    )


def test_weights_leave_when_updates_use_a_copy() -> None:
    """Three stages: weights leave after the update's copy, until the backward of the microbatch that used
    them.
    """
    plan = one_layer_each(3, 2, replace(WEIGHTS, behind=2))
    update = "0STASH{0} 0OFFLOAD{1}[0.versions]@host 0STEP{0} 0WAIT_STASH{0}"
    actions, carried_in, carried_out = first_device(step_programs(plan)[-1])
    assert (carried_in, carried_out) == ("0OFFLOAD-1[0.versions]@host", "0OFFLOAD1[0.versions]@host")
    assert actions == (
        "0RECV_B-2 0LOAD0 0F0 0WAIT_OFFLOAD-1[0.versions]@host 0SEND_F0 0WAIT_RECV_B-2 0RELOAD-2[0.versions]@host "
        f"0WAIT_RELOAD-2[0.versions]@host 0B-2 0WAIT_SEND_F0 {update.format(-2, 0)} "
        "0RECV_B-1 0LOAD1 0F1 0WAIT_OFFLOAD0[0.versions]@host 0SEND_F1 0WAIT_RECV_B-1 0RELOAD-1[0.versions]@host "
        f"0WAIT_RELOAD-1[0.versions]@host 0B-1 0WAIT_SEND_F1 {update.format(-1, 1)}"
    )
    assert first_device(lower_drain(plan, entered=6))[0] == (
        "0WAIT_OFFLOAD-1[0.versions]@host 0RECV_B-2 0WAIT_RECV_B-2 0RELOAD-2[0.versions]@host "
        "0WAIT_RELOAD-2[0.versions]@host 0B-2 0STEP-2 0RECV_B-1 0WAIT_RECV_B-1 0RELOAD-1[0.versions]@host "
        "0WAIT_RELOAD-1[0.versions]@host 0B-1 0STEP-1"
    )


def test_weights_that_several_microbatches_need_leave_between_them() -> None:
    """Until the first update all microbatches use the first weights, which are reloaded for each backward."""
    found = one_program(one_layer_each(3, 6, WEIGHTS), [6]).actions[0]
    order = [
        str(a)
        for a in found
        if (a.kind in (Kind.OFFLOAD, Kind.RELOAD) and not a.wait) or a.kind is Kind.BACKWARD
    ]
    assert order[:9] == [
        *("0B0", "0OFFLOAD1[0.versions]@host", "0RELOAD1[0.versions]@host"),
        *("0B1", "0OFFLOAD2[0.versions]@host", "0OFFLOAD3[0.versions]@host", "0RELOAD2[0.versions]@host"),
        *("0B2", "0OFFLOAD4[0.versions]@host"),
    ]


def optimizer(start: int, stop: int, what: What = What.OFFLOAD, **when: int) -> Decision:
    """Build a decision about the optimizer state of layers of the first stage."""
    return Decision(
        stage=0, subject=State(start=start, stop=stop, kind="optimizer"), what=what, place=HOST, **when
    )


STATES = {  # decisions, and the update of microbatch -1 with them, without the place
    "run by run": (
        [optimizer(n, n + 1, ahead=1, behind=0) for n in (0, 1)],
        (
            "0RELOAD[0.optimizer] 0RELOAD[1.optimizer] 0WAIT_RELOAD[0.optimizer] 0STEP-1[0:1] 0OFFLOAD[0.optimizer] "
            "0WAIT_OFFLOAD[0.optimizer] 0WAIT_RELOAD[1.optimizer] 0STEP-1[1:2] 0OFFLOAD[1.optimizer] "
            "0WAIT_OFFLOAD[1.optimizer]"
        ),
    ),
    "on the host": (
        [optimizer(0, 1, What.UPDATE)],
        (
            "0OFFLOAD[0.gradients] 0WAIT_OFFLOAD[0.gradients] 0STEP-1[0:1] 0STEP-1[1:2] 0WAIT_STEP-1[0:1] "
            "0RELOAD[0.parameters] 0WAIT_RELOAD[0.parameters]"
        ),
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_an_update_moves_what_it_needs_between_the_copy_of_the_weights_and_its_use(name: str) -> None:
    """Two stages: state moves after every backward under PipeDream, also in a drain, and once a step with two
    versions, while forwards use older weights.
    """
    decisions, update = STATES[name]
    one = first_device(step_programs(plan_of(2, 1, *decisions))[-1])
    assert one[0].replace("@host", "").endswith(f"0B-1 0WAIT_SEND_F0 0STASH-1 {update} 0WAIT_STASH-1")
    assert one[1:] == ["", ""]
    drain = first_device(lower_drain(plan_of(2, 1, *decisions), entered=5))
    assert drain[0].replace("@host", "") == f"0RECV_B-1 0WAIT_RECV_B-1 0B-1 {update}"
    two = first_device(step_programs(plan_of(2, 2, *decisions, schedule="pipedream-2bw"))[-1])
    assert two[0].replace("@host", "") == (
        f"0RECV_B-1 0LOAD0 0F0 0SEND_F0 0WAIT_RECV_B-1 0B-1 0WAIT_SEND_F0 0STASH-1 {update} "
        "0RECV_B0 0LOAD1 0F1 0SEND_F1 0WAIT_STASH-1 0WAIT_RECV_B0 0B0 0WAIT_SEND_F1"
    )


GRADIENTS = [
    Decision(
        stage=0, subject=State(start=n, stop=n + 1, kind="gradients"), what=What.OFFLOAD, place=HOST, ahead=1
    )
    for n in (0, 1)
]


def test_gradients_are_away_between_backwards_across_the_end_of_a_step() -> None:
    """Two stages with two versions: gradients are offloaded from a backward to the next one, of a later step
    or a drain, and end with the update. They are reloaded for it with the piece of the last backward.
    """
    plan = plan_of(2, 2, *GRADIENTS, schedule="pipedream-2bw")
    actions, carried_in, carried_out = (text.replace(".gradients]@host", "]") for text in steady(plan))
    assert carried_in == carried_out == "0OFFLOAD[0]"
    assert actions == (
        "0RECV_B-1 0LOAD0 0F0[0:1] 0WAIT_OFFLOAD[0] 0RELOAD[1] 0F0[1:2] 0SEND_F0 0RELOAD[0] 0WAIT_RECV_B-1 "
        "0WAIT_RELOAD[1] 0B-1[1:2] 0WAIT_RELOAD[0] 0B-1[0:1] 0WAIT_SEND_F0 0STASH-1 0STEP-1[0:1] 0STEP-1[1:2] "
        "0RECV_B0 0LOAD1 0F1[0:1] 0F1[1:2] 0SEND_F1 0WAIT_STASH-1 0WAIT_RECV_B0 0B0[1:2] 0OFFLOAD[1] 0B0[0:1] "
        "0OFFLOAD[0] 0WAIT_OFFLOAD[1] 0WAIT_SEND_F1"
    )
    drain = first_device(lower_drain(plan, entered=6))[0].replace(".gradients]@host", "]")
    assert drain == (
        "0WAIT_OFFLOAD[0] 0RECV_B-1 0WAIT_RECV_B-1 0RELOAD[1] 0WAIT_RELOAD[1] 0B-1[1:2] 0RELOAD[0] 0WAIT_RELOAD[0] "
        "0B-1[0:1] 0STEP-1[0:1] 0STEP-1[1:2]"
    )


def test_gradients_are_away_from_their_backward_to_their_update() -> None:
    """Under PipeDream gradients of the last layers leave while earlier layers run backward, and all return
    run by run, also in a drain.
    """
    plan = plan_of(2, 1, *(replace(one, ahead=0, behind=0) for one in GRADIENTS))
    drawn = "0B-1[1:2] 0OFFLOAD[1] 0WAIT_OFFLOAD[1] 0B-1[0:1] {}0RELOAD[1] 0WAIT_RELOAD[1] 0STEP-1[1:2]"
    step = steady(plan)[0].replace(".gradients]@host", "]")
    assert drawn.format("0WAIT_SEND_F0 0STASH-1 0STEP-1[0:1] ") in step
    drain = first_device(lower_drain(plan, entered=5))[0].replace(".gradients]@host", "]")
    assert drawn.format("0STEP-1[0:1] ") in drain


BOTH = [
    Decision(stage=0, subject=State(start=n, stop=n + 1, kind=kind), what=What.OFFLOAD, place=HOST, behind=0)
    for kind in ("parameters", "versions")
    for n in (0, 1)
]


def in_and_out(text: str) -> str:
    """Abbreviate a device's actions, without stage and messages: `in` and `out` for a RELOAD and an OFFLOAD
    with their joins right after them, `w` for the newest weights and `v` for versions.
    """
    words = [word.removeprefix("0") for word in text.replace("@host", "").split() if "SEND" not in word]
    found = " ".join(word for word in words if "RECV" not in word and word[:4] != "LOAD")
    found = found.replace(".parameters]", "]w").replace(".versions]", "]v")
    for kind, word in (("RELOAD", "in"), ("OFFLOAD", "out")):
        found = re.sub(rf"{kind}(\S+) WAIT_{kind}\1", rf"{word}\1", found)
    return found


def test_all_weights_are_away_but_for_the_run_that_is_in_use() -> None:
    """Two stages under PipeDream: the newest weights are reloaded for a forward and for the update's copy,
    older ones for the backward. A drain, without forwards in flight, updates in place.
    """
    plan = plan_of(2, 1, *BOTH)
    assert in_and_out(steady(plan)[0]) == (
        "in[0]w F0[0:1] out[0]w in[1]w F0[1:2] out[1]w in-1[1]v B-1[1:2] in-1[0]v B-1[0:1] "
        "in[0]w STASH-1[0:1] out0[0]v STEP-1[0:1] out[0]w in[1]w STASH-1[1:2] out0[1]v STEP-1[1:2] out[1]w "
        "WAIT_STASH-1[0:1] WAIT_STASH-1[1:2]"
    )
    assert in_and_out(first_device(lower_drain(plan, entered=5))[0]) == (
        "in-1[1]v B-1[1:2] in-1[0]v B-1[0:1] in[0]w STEP-1[0:1] out[0]w in[1]w STEP-1[1:2] out[1]w"
    )


def test_of_two_versions_each_comes_in_where_it_is_used() -> None:
    """Two stages: forwards use the newest weights until the update copies these. They then become an older
    version, which is offloaded too; the updated weights are unused until the next step. The second step has
    one version until it updates.
    """
    plan = plan_of(2, 2, *BOTH, schedule="pipedream-2bw")
    forwards = "in[0]w F0[0:1] out[0]w in[1]w F0[1:2] {0}"
    backwards = "in-1[1]v B-1[1:2] in-1[0]v B-1[0:1] in[0]w "
    update = (
        "STASH-1[0:1] out0[0]v STEP-1[0:1] out[0]w in[1]w STASH-1[1:2] out0[1]v STEP-1[1:2] out[1]w in0[0]v F1[0:1] "
        "out0[0]v in0[1]v F1[1:2] WAIT_STASH-1[0:1] WAIT_STASH-1[1:2] B0[1:2] out1[1]v in0[0]v B0[0:1] out1[0]v"
    )
    second, later = (in_and_out(first_device(one)[0]) for one in step_programs(plan)[1:3])
    assert later == forwards.format("out[1]w ") + backwards + update
    assert second == forwards.format("B-1[1:2] out[1]w in[0]w B-1[0:1] ") + update
    assert in_and_out(first_device(lower_drain(plan, entered=6))[0]) == (
        "in-1[1]v B-1[1:2] in-1[0]v B-1[0:1] in[0]w STEP-1[0:1] out[0]w in[1]w STEP-1[1:2] out[1]w"
    )


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("schedule", ENDLESS)
def test_of_weights_two_layers_stay_however_many_versions_there_are(schedule: str, stages: int) -> None:
    """A first stage of four equal, parameter-heavy layers keeps at its peak one layer's weights and their
    copy; gradients and optimizer state (twice as large) are kept in full, or for one layer.
    """
    number = 1_000_000
    plan = make_plan(
        equal_profile(4 * stages, parameter_bytes=number), [4] * stages, microbatches=4, schedule=schedule
    )

    def peak(*kinds: StateKind) -> float:
        moved = (
            replace(WEIGHTS, subject=State(start=n, stop=n + 1, kind=k), behind=0)
            for k in kinds
            for n in range(4)
        )
        return Simulation(replace(plan, decisions=tuple(moved))).peak_bytes[0] / number

    assert peak() >= 20
    assert peak("parameters", "versions") == pytest.approx(2 + 4 + 8, rel=1e-3)
    assert peak("parameters", "versions", "gradients", "optimizer") == pytest.approx(2 + 1 + 2, rel=1e-3)


def steady(plan: Plan) -> list[str]:
    """Return the actions of device 0 in every step of a full pipeline."""
    return first_device(step_programs(plan)[-1])


def test_a_recomputation_may_be_early_across_the_end_of_a_step() -> None:
    """Two units before the backward lie in the step before; a drain does not recompute again."""
    plan = plan_of(2, 1, EARLY)
    assert first_device(step_programs(plan)[-1])[0] == (
        "0RECV_B-1 0LOAD0 0N0[0:1] 0F0[1:2] 0SEND_F0 0R0[0:1] 0WAIT_RECV_B-1 0B-1[1:2] 0B-1[0:1] 0WAIT_SEND_F0 "
        "0STASH-1 0STEP-1 0WAIT_STASH-1"
    )
    assert (
        first_device(lower_drain(plan, entered=5))[0]
        == "0RECV_B-1 0WAIT_RECV_B-1 0B-1[1:2] 0B-1[0:1] 0STEP-1"
    )


@pytest.mark.sample(3)
@pytest.mark.parametrize("schedule", ENDLESS)
@pytest.mark.parametrize("seed", range(25))
def test_what_is_done_does_not_depend_on_where_steps_end(schedule: str, seed: int) -> None:
    """With any decisions, the same microbatches in other steps give the same actions in the same order.
    Exceptions are starts of receives and of parameters that are offloaded at a step's end, and, with two
    versions, updates and the moves around them.
    """
    rng = Random(seed)
    stages = rng.randint(1, 4)
    plan = make_plan(
        chain_profile([make_layer() for _ in range(2 * stages)]),
        [2] * stages,
        microbatches=rng.choice((4, 6)),
        schedule=schedule,
    )
    plan = compacted(plan, rng)
    count, turn = plan.training.microbatches, period(plan)
    step = max(turn, 1 if schedule == "pipedream" else stages + -stages % turn)
    others = [step] * (4 * count // step - 1)
    others.append(4 * count - sum(others))
    drained = rng.random() < 0.5
    one, other = (one_program(plan, sizes, drained=drained) for sizes in ([count] * 4, others))
    told = is_told if schedule == "pipedream" else is_told_without_updates
    for device in range(stages):
        here, there = ([a for a in program.actions[device] if told(program, a)] for program in (one, other))
        assert here == there


def is_told(program: Program, action: Action) -> bool:
    """Return whether the position of an action is independent of steps that reload and offload parameters."""
    if action.moves_state and program.moved(action)[0].what == "parameters":
        return False
    return action.wait or action.kind not in RECEIVES


def is_told_without_updates(program: Program, action: Action) -> bool:
    """Return whether the position is independent of steps that also bound updates and versions."""
    of_weights = action.kind in COPIES and program.moved(action)[0].what == "versions"
    return (
        is_told(program, action) and action.kind not in UPDATES and not action.moves_state and not of_weights
    )


# -------------------------------------------------------------------- refusals


def state(kind: StateKind, start: int = 0, stop: int = 2, stage: int = 0) -> Decision:
    """Offload a state of a stage's layers."""
    return replace(WEIGHTS, stage=stage, subject=State(start=start, stop=stop, kind=kind))


def sharing(plan: Plan) -> Plan:
    """Build layers; the first two share a trained parameter."""
    tied = SharedParameter(name="tied", users=(0, 1), nbytes=8, gradient_bytes=8, state_bytes=0)
    measurement = replace(plan.profile.measurements[0], shared=(tied,))
    return replace(plan, profile=replace(plan.profile, measurements=(measurement,)))


def half_frozen() -> ModelProfile:
    """Build three layers; the second has a frozen parameter."""
    trained, frozen = (
        make_layer(),
        Parameter(name="frozen", shape=(1,), dtype="float32", nbytes=4, trainable=False),
    )
    return chain_profile([trained, replace(trained, parameters=(*trained.parameters, frozen)), trained])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (
            make_plan(half_frozen(), [2, 1], schedule="pipedream", decisions=(state("parameters"),)),
            "layer 1 has frozen weights, which all microbatches use",
        ),
        (plan_of(2, 4, state("versions", 2, 4, 1)), "stage 1 is the last stage and updates in place"),
        (
            sharing(plan_of(2, 4, state("versions", 0, 1))),
            "other layers of the stage share parameter 'tied'",
        ),
        (
            make_plan(
                equal_profile(2, parameter_bytes=0), [1, 1], schedule="pipedream", decisions=(WEIGHTS,)
            ),
            "these layers do not have trained weights",
        ),
    ],
)
def test_state_that_cannot_move_is_refused(plan: Plan, message: str) -> None:
    """The state is named, with the reason and an alternative."""
    with pytest.raises(UsageError, match=rf"stage \d: offload .*{message}"):
        lower(plan)


def test_shares_are_the_same_in_every_step() -> None:
    """A share of three out of four microbatches is refused with shares that divide them. A step after a
    smaller batch, which would begin inside a share, is refused until the microbatches in flight have ended.
    """
    third = replace(EARLY, microbatches=Microbatches(1, 3))
    with pytest.raises(
        UsageError,
        match=r"3 does not divide the 4 microbatches of a step, .*: use a share of every 2 or 4, or all",
    ):
        lower(plan_of(2, 4, third))
    half = plan_of(2, 4, replace(EARLY, microbatches=Microbatches(1, 2)))
    lower(half, microbatches=3, entered=4)
    lower_drain(half, entered=7)
    with pytest.raises(
        UsageError,
        match=r"every 2 microbatches, but the previous batch had another number .*Trainer.finish",
    ):
        lower(half, entered=7)


def test_a_bundle_of_weights_is_text_that_parses() -> None:
    """A program that offloads weights of several layers survives the way to text and back."""
    program = lower(plan_of(3, 2, state("versions")), entered=6)
    assert "bundle 0: 0.versions 1.versions" in str(program)
    assert parse_program(str(program), placement=program.placement, microbatches=2) == program
