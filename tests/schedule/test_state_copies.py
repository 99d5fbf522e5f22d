"""Parameters and gradients offloaded between uses, drawn by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipefit.errors import UsageError
from pipefit.lowering import lower, lower_evaluation
from pipefit.schema.decisions import Decision, Run, State, StateKind, What
from pipefit.schema.devices import parse_place
from pipefit.schema.layer_costs import SharedParameter
from pipefit.schema.plan import Plan
from pipefit.simulator import Simulation
from support.pipelines import chain_profile, equal_profile, make_layer, make_plan

HOST = parse_place("host")


def move(kind: StateKind, start: int, stop: int, **when: int) -> Decision:
    """Build a decision to move a state of some layers of the only stage."""
    subject = State(start=start, stop=stop, kind=kind)
    return Decision(stage=0, subject=subject, what=What.OFFLOAD, place=HOST, **when)


def one_stage(
    *decisions: Decision, layers: int = 3, microbatches: int = 2, clip_norm: float | None = None
) -> Plan:
    """Build layers on one device under GPipe."""
    plan = make_plan(
        equal_profile(layers), [layers], microbatches=microbatches, schedule="gpipe", decisions=decisions
    )
    return replace(plan, training=replace(plan.training, clip_norm=clip_norm))


def words(plan: Plan, *, update: bool = True) -> str:
    """Abbreviate a device's actions, without stage, place and loads: `in` and `out` for a RELOAD and an
    OFFLOAD with their joins right after them.
    """
    text = " ".join(
        word for word in str(lower(plan, update=update)).splitlines()[0].split()[2:] if "LOAD" not in word[:5]
    )
    for state in ("parameters", "gradients"):
        text = text.replace(f".{state}]@host", "]")
    found = " ".join(word.removeprefix("0") for word in text.split())
    for layer in range(9):
        found = found.replace(f"RELOAD[{layer}] WAIT_RELOAD[{layer}]", f"in[{layer}]")
        found = found.replace(f"OFFLOAD[{layer}] WAIT_OFFLOAD[{layer}]", f"out[{layer}]")
    return found


@pytest.mark.parametrize(
    ("decisions", "drawn"),
    [
        (
            [move("parameters", 1, 2)],
            (
                "F0[0:1] in[1] F0[1:2] out[1] F0[2:3] F1[0:1] in[1] F1[1:2] out[1] F1[2:3] "
                "B0[2:3] in[1] B0[1:2] out[1] B0[0:1] B1[2:3] in[1] B1[1:2] out[1] B1[0:1] "
                "STEP[0:1] in[1] STEP[1:2] OFFLOAD[1] STEP[2:3] WAIT_OFFLOAD[1]"
            ),
        ),
        (
            [move("parameters", 2, 3, ahead=1)],
            (
                "RELOAD[2] F0[0:2] WAIT_RELOAD[2] F0[2:3] F1[0:2] F1[2:3] B0[2:3] B0[0:2] B1[2:3] out[2] B1[0:2] "
                "RELOAD[2] STEP[0:2] WAIT_RELOAD[2] STEP[2:3] out[2]"
            ),
        ),
        (
            [move("gradients", 1, 2)],
            (
                "F0[0:1] F0[1:2] F0[2:3] F1[0:1] F1[1:2] F1[2:3] "
                "B0[2:3] B0[1:2] OFFLOAD[1] B0[0:1] WAIT_OFFLOAD[1] B1[2:3] in[1] B1[1:2] OFFLOAD[1] B1[0:1] "
                "WAIT_OFFLOAD[1] STEP[0:1] in[1] STEP[1:2] STEP[2:3]"
            ),
        ),
        (
            [move("gradients", 1, 2, behind=0, ahead=1)],
            (
                "F0[0:1] F0[1:2] F0[2:3] F1[0:1] F1[1:2] F1[2:3] "
                "B0[2:3] B0[1:2] out[1] B0[0:1] RELOAD[1] B1[2:3] WAIT_RELOAD[1] B1[1:2] out[1] B1[0:1] "
                "RELOAD[1] STEP[0:1] WAIT_RELOAD[1] STEP[1:2] STEP[2:3]"
            ),
        ),
    ],
    ids=["parameters", "parameters ahead", "gradients", "gradients at once"],
)
def test_a_state_is_there_where_it_is_used(decisions: list[Decision], drawn: str) -> None:
    """Forwards and backwards are cut at a state's edges; it is offloaded between two uses if something is
    computed meanwhile.
    """
    assert words(one_stage(*decisions)) == drawn


def test_gradients_are_all_back_before_the_stages_agree() -> None:
    """Clipping takes the norm of all gradients, so they stay until the update. Layer 1's gradients would
    leave only when they are needed, so they always stay.
    """
    found = words(one_stage(move("gradients", 1, 2), move("gradients", 2, 3), microbatches=1, clip_norm=1.0))
    assert found.endswith(
        "B0[2:3] OFFLOAD[2] B0[1:2] WAIT_OFFLOAD[2] B0[0:1] in[2] AGREE WAIT_AGREE STEP[0:1] STEP[1:2] STEP[2:3]"
    )


def test_without_an_update_gradients_stay_for_the_next_batch() -> None:
    """Without an update gradients return to the device after the last backward of their layers."""
    found = words(one_stage(move("gradients", 1, 2)), update=False)
    assert found.endswith("B1[2:3] in[1] B1[1:2] B1[0:1]")


def test_what_is_recomputed_needs_its_parameters_again() -> None:
    """Parameters are reloaded for the first forward, and stay from the recomputed forward to the backward."""
    again = Decision(stage=0, subject=Run(start=1, stop=2), what=What.RECOMPUTE)
    found = words(one_stage(again, move("parameters", 1, 2), microbatches=1))
    assert found == (
        "F0[0:1] in[1] N0[1:2] out[1] F0[2:3] B0[2:3] in[1] R0[1:2] B0[1:2] out[1] B0[0:1] "
        "STEP[0:1] in[1] STEP[1:2] OFFLOAD[1] STEP[2:3] WAIT_OFFLOAD[1]"
    )


def test_an_evaluation_has_all_parameters() -> None:
    """Parameters are reloaded before an evaluation's first forward and freed after its last one; gradients do
    not exist.
    """
    plan = one_stage(move("parameters", 0, 2), move("parameters", 2, 3), move("gradients", 0, 3))
    text = str(lower_evaluation(plan, microbatches=1)).splitlines()[0]
    assert text == (
        "device 0: 0RELOAD#0@host 0RELOAD[2.parameters]@host 0WAIT_RELOAD#0@host 0WAIT_RELOAD[2.parameters]@host "
        "0LOAD0 0N0 0OFFLOAD#0@host 0OFFLOAD[2.parameters]@host 0WAIT_OFFLOAD#0@host 0WAIT_OFFLOAD[2.parameters]@host"
    )


UPDATE = Decision(stage=0, subject=State(start=0, stop=2, kind="optimizer"), what=What.UPDATE, place=HOST)


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        (
            [move("parameters", 0, 2), move("parameters", 1, 3)],
            "parameters of layers 1 to 2 to host: the parameters of layer 1 are already offloaded",
        ),
        *(
            ([move(kind, 1, 3), UPDATE], f"{kind} of layers 1 to 2 to host: the plan has `stage 0: update")
            for kind in ("gradients", "parameters")
        ),
        ([move("optimizer", 1, 3), UPDATE], "to host: the optimizer state of layer 1 is already offloaded"),
        (
            [move("parameters", 0, 1), replace(UPDATE, subject=State(start=0, stop=3, kind="optimizer"))],
            "parameters of layer 0 to host: the plan has `stage 0: update",
        ),
        (
            [Decision(stage=0, subject=Run(start=0, stop=3), what=What.RECOMPUTE), move("gradients", 1, 3)],
            "recompute layers 0 to 2: offloaded state starts or ends at layer 1, within this run",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(decisions: list[Decision], message: str) -> None:
    """The error names the decision and its contradiction."""
    with pytest.raises(UsageError, match=message):
        lower(one_stage(*decisions))


@pytest.mark.parametrize("kind", ["gradients", "parameters"])
def test_layers_beside_those_that_the_host_updates_move(kind: StateKind) -> None:
    """Layers before the first or after the last layer updated on the host may be moved."""
    lower(one_stage(move(kind, 2, 3), UPDATE))
    lower(one_stage(move(kind, 0, 1), replace(UPDATE, subject=State(start=1, stop=3, kind="optimizer"))))


@pytest.mark.parametrize("gradient_bytes", [0, 4])
def test_a_shared_parameter_moves_with_all_of_its_layers(gradient_bytes: int) -> None:
    """A parameter used by a layer outside the run, trained or frozen, is named."""
    profile = chain_profile([make_layer() for _ in range(3)])
    shared = SharedParameter(
        name="tied", users=(0, 2), nbytes=4, gradient_bytes=gradient_bytes, state_bytes=0
    )
    measured = replace(profile.measurements[0], shared=(shared,))
    plan = make_plan(replace(profile, measurements=(measured,)), [3], decisions=(move("parameters", 0, 1),))
    with pytest.raises(
        UsageError, match=r"0, 2.*share.* 'tied'|layers 0, 2 share parameter 'tied': offload all"
    ):
        lower(plan)
    lower(replace(plan, decisions=(move("parameters", 0, 3),)))


def test_gradients_leave_once_the_backwards_of_all_their_layers_have_borne_them() -> None:
    """Some of the layers are recomputed within the first backward of a step: until their backward there are
    no gradients to offload.
    """
    again = Decision(stage=0, subject=Run(start=0, stop=1), what=What.RECOMPUTE)
    plan = one_stage(again, move("gradients", 0, 2, behind=0))
    found = words(plan).replace("OFFLOAD#0@host WAIT_OFFLOAD#0@host", "out")
    found = found.replace("RELOAD#0@host WAIT_RELOAD#0@host", "in")
    assert found[found.index("B0") :] == (
        "B0[2:3] B0[1:2] R0[0:1] B0[0:1] out B1[2:3] in B1[1:2] out R1[0:1] in B1[0:1] STEP[0:2] STEP[2:3]"
    )
    assert Simulation(plan).peak_bytes
