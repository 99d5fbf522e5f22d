"""Lowered programs against lists drawn by hand: recomputation, order of sends, and sums of gradients."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, product
from random import Random

import pytest

from pipefit.lowering import lower
from pipefit.lowering.passes.recomputation import Recompute
from pipefit.schema.actions import COMPUTE, Kind
from pipefit.schema.decisions import Decision, Run, What
from pipefit.schema.layer_costs import SharedParameter
from pipefit.schema.plan import Plan
from support.synthetic_models import parameter, plain, plan_of, training

DRAWN = {
    ("gpipe", "except_last"): ("N0 N1 F2 R0 B0 R1 B1 B2", "N0 N1 F2 R0 B0 R1 B1 B2"),
    ("gpipe", "except_one"): ("F0 N1 N2 B0 R1 B1 R2 B2", "F0 N1 N2 B0 R1 B1 R2 B2"),
    ("torchgpipe", "except_last"): ("N0 N1 F2 B2 R1 B1 R0 B0", "N0 N1 F2 B2 R1 B1 R0 B0"),
    ("1f1b", "always"): ("N0 N1 R0 B0 N2 R1 B1 R2 B2", "N0 R0 B0 N1 R1 B1 N2 R2 B2"),
    ("1f1b", "never"): ("F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"),
}


def chain_plan(
    schedule: str, microbatches: int, edges: tuple[int, ...], recompute: Recompute = "never"
) -> Plan:
    """Build a plan for plain layers, stage s on device s."""
    return plan_of(plain(Random(0), edges[-1]), training(schedule, microbatches), edges, recompute=recompute)


def computed(plan: Plan, device: int) -> str:
    """Return the passes of a device without its update and without stage numbers."""
    actions = [a for a in lower(plan).actions[device] if a.kind in COMPUTE and a.kind is not Kind.STEP]
    return " ".join(str(action)[1:] for action in actions)


@pytest.mark.parametrize(("schedule", "recompute"), DRAWN)
def test_forwards_run_again_just_before_their_backward(schedule: str, recompute: Recompute) -> None:
    """Two stages and three microbatches recompute all, some or no forwards, each just before its backward."""
    plan = chain_plan(schedule, 3, (0, 1, 2), recompute)
    assert (computed(plan, 0), computed(plan, 1)) == DRAWN[schedule, recompute]


FORWARDS = "F0[0:1] N0[1:2] F0[2:3]", "F1[0:1] N1[1:2] F1[2:3]"
JUST_IN_TIME = (*FORWARDS, "B0[2:3] R0[1:2] B0[1:2] B0[0:1]", "B1[2:3] R1[1:2] B1[1:2] B1[0:1]")
ONE_EARLIER = (
    FORWARDS[0],
    "R0[1:2]",
    FORWARDS[1],
    "R1[1:2]",
    "B0[2:3] B0[1:2] B0[0:1]",
    "B1[2:3] B1[1:2] B1[0:1]",
)


@pytest.mark.parametrize(("ahead", "drawn"), [(0, JUST_IN_TIME), (1, ONE_EARLIER)])
def test_a_run_inside_a_stage_goes_forward_again_as_early_as_it_is_told(
    ahead: int, drawn: tuple[str, ...]
) -> None:
    """Forward and backward run in three pieces; the middle one is recomputed before its backward or one
    action of the stage earlier, but never before the first pass.
    """
    decision = Decision(stage=0, subject=Run(start=1, stop=2), what=What.RECOMPUTE, ahead=ahead)
    plan = replace(chain_plan("gpipe", 2, (0, 3)), decisions=(decision,))
    assert computed(plan, 0) == " ".join(drawn)


def test_a_middle_stage_posts_receives_ahead_and_joins_sends_behind() -> None:
    """Receives are posted ahead and sends joined late in the whole 1F1B program of the middle and last of
    three stages, with two microbatches.
    """
    program = lower(chain_plan("1f1b", 2, (0, 1, 2, 3)))
    assert " ".join(map(str, program.actions[1])) == (
        "1RECV_F0 1RECV_F1 1WAIT_RECV_F0 1F0 1SEND_F0 1RECV_B0 1WAIT_RECV_F1 1F1 1WAIT_SEND_F0 1SEND_F1 "
        "1RECV_B1 1WAIT_RECV_B0 1B0 1WAIT_SEND_F1 1SEND_B0 1WAIT_RECV_B1 1B1 1WAIT_SEND_B0 1SEND_B1 1WAIT_SEND_B1 1STEP"
    )
    assert " ".join(map(str, program.actions[2])) == (
        "2RECV_F0 2WAIT_RECV_F0 2LOAD0 2F0 2RECV_F1 2B0 2SEND_B0 2WAIT_RECV_F1 2LOAD1 2F1 2WAIT_SEND_B0 "
        "2B1 2SEND_B1 2WAIT_SEND_B1 2STEP"
    )


def test_an_early_recomputation_changes_no_message() -> None:
    """The first of two 1F1B stages, recomputed one compute action early, keeps its sends and receives."""
    plan = chain_plan("1f1b", 2, (0, 1, 2))
    early = replace(plan, decisions=(recomputed(0, ahead=1),))
    assert " ".join(map(str, lower(early).actions[0])) == (
        "0LOAD0 0N0 0SEND_F0 0R0 0RECV_B0 0LOAD1 0N1 0WAIT_SEND_F0 0SEND_F1 0R1 0RECV_B1 0WAIT_RECV_B0 0B0 "
        "0WAIT_SEND_F1 0WAIT_RECV_B1 0B1 0STEP"
    )


@pytest.mark.parametrize("order", [(0, 0), (0, 0, 0), (0, 1, 0, 1)])
@pytest.mark.parametrize("schedule", ["gpipe", "torchgpipe"])
def test_stages_of_a_device_may_be_recomputed_early(schedule: str, order: tuple[int, ...]) -> None:
    """Recomputing any stage ahead never deadlocks a device at a send before its later receive, or two devices
    with each other; such programs cannot be made.
    """
    plan = plan_of(plain(Random(0), len(order)), training(schedule, 3), range(len(order) + 1), order=order)
    for aheads in product((None, 0, 1, 2), repeat=len(order)):
        decisions = tuple(
            recomputed(stage, ahead=ahead) for stage, ahead in enumerate(aheads) if ahead is not None
        )
        actions = chain.from_iterable(lower(replace(plan, decisions=decisions)).actions)
        assert sum(action.kind is Kind.RECOMPUTE for action in actions) == 3 * len(decisions)


def recomputed(stage: int, *, ahead: int) -> Decision:
    """Return whether a stage of one layer runs two forwards."""
    return Decision(stage=stage, subject=Run(start=stage, stop=stage + 1), what=What.RECOMPUTE, ahead=ahead)


def test_what_a_backward_answers_is_joined_before_it() -> None:
    """The last but one stage of 1F1B sends, and runs a backward at once: its gradients can only come after the
    send has arrived.
    """
    first = lower(chain_plan("1f1b", 1, (0, 1, 2))).actions[0]
    assert " ".join(map(str, first)) == "0RECV_B0 0LOAD0 0F0 0SEND_F0 0WAIT_SEND_F0 0WAIT_RECV_B0 0B0 0STEP"


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_gradients_are_summed_where_several_stages_have_a_parameter(clip_norm: float | None) -> None:
    """One of three shared parameters is on the first stage alone, one is frozen. The third's gradients are
    summed over its stages; then, with clipping, all stages agree on a norm.
    """
    shared = tuple(
        SharedParameter(
            name=f"shared{users}", users=users, nbytes=4, gradient_bytes=gradient_bytes, state_bytes=0
        )
        for users, gradient_bytes in (((0, 1), 4), ((1, 3), 4), ((0, 3), 0))
    )
    found = plain(Random(0), 4)
    kinds = tuple(replace(kind, parameters=(parameter("w", 8),), gradient_bytes=8) for kind in found.kinds)
    layers = replace(found, kinds=kinds, shared=shared)
    program = lower(plan_of(layers, training("gpipe", 1, clip_norm=clip_norm), (0, 2, 3, 4)))
    kinds = (Kind.REDUCE, Kind.AGREE, Kind.STEP)
    agree = "{0}AGREE {0}WAIT_AGREE " if clip_norm else ""
    summed = "{0}REDUCE[1.shared] {0}WAIT_REDUCE[1.shared] "
    expected = [f"{summed}{agree}{{0}}STEP", f"{agree}{{0}}STEP", f"{summed}{agree}{{0}}STEP"]
    ends = [" ".join(str(a) for a in actions if a.kind in kinds) for actions in program.actions]
    assert ends == [line.format(stage) for stage, line in enumerate(expected)]
