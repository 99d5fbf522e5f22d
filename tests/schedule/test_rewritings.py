"""Each rewriting of lowering against a program drawn by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipefit.errors import UsageError
from pipefit.lowering import lower, schedule_named
from pipefit.lowering.passes.communication import communicated
from pipefit.lowering.passes.offload import bundles_of, copied
from pipefit.lowering.passes.recomputation import (
    Recompute,
    recompute_decisions,
    recomputed,
    recomputed_microbatches,
)
from pipefit.lowering.schedules import Order, computes
from pipefit.schema.actions import parse_action
from pipefit.schema.decisions import Decision, Microbatches, Run, SavedTensors, What
from pipefit.schema.devices import parse_place
from pipefit.schema.layer_costs import SharedParameter
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from support.pipelines import equal_profile, make_plan
from support.synthetic_models import layer, measurement, profile, value


def order(text: str) -> Order:
    """Join actions in a row."""
    return list(map(parse_action, text.split()))


def words(actions: Order) -> str:
    """Return the text of actions in a row."""
    return " ".join(map(str, actions))


def run(start: int, stop: int, *, stage: int = 0, ahead: int = 0, which: tuple[int, ...] = ()) -> Decision:
    """Recompute layers `start` to `stop - 1` for microbatches given by taken, every, first."""
    subject = Run(start=start, stop=stop)
    return Decision(
        stage=stage, subject=subject, what=What.RECOMPUTE, microbatches=Microbatches(*which), ahead=ahead
    )


def move(*tensors: tuple[int, int], stage: int = 0, place: str = "host", **when: int) -> Decision:
    """Build saved tensors that are offloaded together."""
    subject = SavedTensors(tensors=tensors)
    return Decision(stage=stage, subject=subject, what=What.OFFLOAD, place=parse_place(place), **when)


def one_stage(*decisions: Decision, layers: int = 9, microbatches: int = 1) -> Plan:
    """Build one stage of equal layers under GPipe."""
    profile = equal_profile(layers)
    return make_plan(profile, [layers], microbatches=microbatches, schedule="gpipe", decisions=decisions)


# -------------------------------------------------------------------- recomputation


@pytest.mark.parametrize(
    ("decisions", "drawn"),
    [
        ([], "0F0 0B0"),
        ([run(0, 9)], "0N0 0R0 0B0"),
        ([run(3, 6)], "0F0[0:3] 0N0[3:6] 0F0[6:9] 0B0[6:9] 0R0[3:6] 0B0[3:6] 0B0[0:3]"),
        ([run(0, 3)], "0N0[0:3] 0F0[3:9] 0B0[3:9] 0R0[0:3] 0B0[0:3]"),
        ([run(6, 9)], "0F0[0:6] 0N0[6:9] 0R0[6:9] 0B0[6:9] 0B0[0:6]"),
        ([run(6, 9), run(3, 6)], "0F0[0:3] 0N0[3:6] 0N0[6:9] 0R0[6:9] 0B0[6:9] 0R0[3:6] 0B0[3:6] 0B0[0:3]"),
    ],
)
def test_runs_that_are_recomputed_cut_forwards_and_backwards(decisions: list[Decision], drawn: str) -> None:
    """A recomputed run keeps only its inputs and is recomputed just before its backward; the layers around it
    form one piece each.
    """
    plan = one_stage(*decisions)
    (found,) = recomputed([order("0F0 0B0")], plan)
    assert words(found) == drawn


@pytest.mark.parametrize(
    ("ahead", "drawn"),
    [
        (0, "0N0[0:1] 0F0[1:2] 0N1[0:1] 0F1[1:2] 0B0[1:2] 0R0[0:1] 0B0[0:1] 0B1[1:2] 0R1[0:1] 0B1[0:1]"),
        (1, "0N0[0:1] 0F0[1:2] 0R0[0:1] 0N1[0:1] 0F1[1:2] 0R1[0:1] 0B0[1:2] 0B0[0:1] 0B1[1:2] 0B1[0:1]"),
        (2, "0N0[0:1] 0F0[1:2] 0R0[0:1] 0N1[0:1] 0F1[1:2] 0R1[0:1] 0B0[1:2] 0B0[0:1] 0B1[1:2] 0B1[0:1]"),
    ],
)
def test_a_recomputation_may_be_early(ahead: int, drawn: str) -> None:
    """With ahead 1, the recomputation is one compute action before the backward, but never before its
    forward.
    """
    plan = one_stage(run(0, 1, ahead=ahead), layers=2, microbatches=2)
    (found,) = recomputed([order("0F0 0F1 0B0 0B1")], plan)
    assert words(found) == drawn


def test_a_share_of_the_microbatches_is_recomputed() -> None:
    """Two of every three microbatches from number 1 on: 1, 2, not 3, and 4; numbers before the first count
    backwards.
    """
    which = Microbatches(2, 3, 1)
    assert [number for number in range(-3, 6) if number in which] == [-2, -1, 1, 2, 4, 5]
    plan = one_stage(run(0, 2, which=(2, 3, 1)), layers=2, microbatches=4)
    (found,) = recomputed(computes(plan, schedule_named("gpipe"), 4), plan)
    assert words(found) == "0F0 0N1 0N2 0F3 0B0 0R1 0B1 0R2 0B2 0B3"


@pytest.mark.parametrize(
    ("recompute", "schedule", "kept"),
    [
        ("never", "gpipe", [0, 1, 2, 3]),
        ("always", "gpipe", []),
        ("stages", "gpipe", []),
        ("except_last", "gpipe", [3]),
        ("except_last", "torchgpipe", [3]),
        ("except_one", "gpipe", [0]),
        ("except_one", "1f1b", [0]),
        ("except_one", "torchgpipe", [3]),
    ],
)
def test_a_word_says_which_microbatches_are_kept(
    recompute: Recompute, schedule: str, kept: list[int]
) -> None:
    """`except_one` keeps the microbatch with the first backward, which costs least to keep."""
    again = recomputed_microbatches(recompute, schedule, 4) or ()
    assert [number for number in range(4) if number not in again] == kept
    plan = make_plan(equal_profile(2), [1, 1], schedule=schedule, recompute=recompute)
    assert sorted(a.microbatch or 0 for a in lower(plan).actions[1] if a.kind.value == "F") == kept


@pytest.mark.parametrize("recompute", ["never", "except_last", "except_one"])
def test_one_microbatch_is_kept_unless_all_are_recomputed(recompute: Recompute) -> None:
    """A single microbatch is both the last and the first to run backward: nothing is recomputed."""
    assert recomputed_microbatches(recompute, "gpipe", 1) is None


def test_an_unknown_word_for_recomputing_is_refused() -> None:
    """An unknown word is refused with the valid ones."""
    with pytest.raises(
        UsageError,
        match="recompute must be one of never, always, stages, except_last, except_one, not 'INVALID'",
    ):
        recompute_decisions((), (), "INVALID", "gpipe", 4)  # type: ignore[arg-type]


def test_a_layer_is_recomputed_by_one_decision() -> None:
    """Adjacent runs are allowed; two runs that recompute a layer for the same microbatch are refused."""
    with pytest.raises(UsageError, match="layer 2 is already recomputed for microbatch 0"):
        lower(one_stage(run(0, 3), run(2, 5), microbatches=2))
    lower(one_stage(run(0, 3, which=(1, 2, 0)), run(2, 5, which=(1, 2, 1)), microbatches=2))


def sharing() -> ModelProfile:
    """Build four layers; the first and the last share a parameter."""
    one = layer((value(8),), (value(8),), parameter_bytes=4)
    model = measurement([one] * 4, layer((value(8), value(1, requires_grad=False)), (value(4),)))
    shared = SharedParameter(name="layer0.w", users=(0, 3), nbytes=4, gradient_bytes=4, state_bytes=0)
    return profile(replace(model, shared=(shared,)))


def test_pieces_may_share_a_parameter() -> None:
    """Later users of a shared parameter form separate pieces: their gradients wait."""
    plan = make_plan(sharing(), [4], microbatches=1, decisions=(run(0, 1), run(2, 4)))
    assert words([action for action in lower(plan).actions[0] if "LOAD" not in str(action)]) == (
        "0N0[0:1] 0F0[1:2] 0N0[2:4] 0R0[2:4] 0B0[2:4] 0B0[1:2] 0R0[0:1] 0B0[0:1] 0STEP"
    )


def test_two_stages_of_a_device_that_share_a_parameter_are_refused() -> None:
    """Each of the two stages would have a separate copy; on different devices they sum their gradients."""
    plan = make_plan(sharing(), [1, 1, 1, 1], schedule="gpipe")
    assert "0REDUCE[0.shared]" in words(list(lower(plan).actions[0]))
    with pytest.raises(UsageError, match=r"stages 0 and 3 of device 0 share parameter 'layer0.w'"):
        lower(make_plan(sharing(), [1, 1, 1, 1], devices=3, schedule="gpipe"))
    with pytest.raises(UsageError, match=r"stages 0 and 1 of device 0 share parameter 'layer0.w'"):
        lower(make_plan(sharing(), [3, 1], devices=1, schedule="gpipe"))


# -------------------------------------------------------------------- communication


def test_communication_stands_around_pieces() -> None:
    """A forward's first piece receives and its last one sends, a backward's likewise."""
    plan = make_plan(equal_profile(9), [3, 3, 3], microbatches=1, decisions=(run(4, 5, stage=1),))
    (_, middle, _) = recomputed(computes(plan, schedule_named("1f1b"), 1), plan)
    assert words(middle) == "1F0[3:4] 1N0[4:5] 1F0[5:6] 1B0[5:6] 1R0[4:5] 1B0[4:5] 1B0[3:4]"
    assert words(list(communicated(middle, plan))) == (
        "1RECV_F0 1RECV_B0 1WAIT_RECV_F0 1F0[3:4] 1N0[4:5] 1F0[5:6] 1SEND_F0 1WAIT_SEND_F0 1WAIT_RECV_B0 1B0[5:6] "
        "1R0[4:5] 1B0[4:5] 1B0[3:4] 1SEND_B0 1WAIT_SEND_B0"
    )


@pytest.mark.parametrize(
    ("schedule", "first", "last"),
    [
        (
            "1f1b",
            "0N2[0:1] 0N2[1:2] 0SEND_F2 0RECV_B1 0RECV_B2 0R1[1:2] 0WAIT_RECV_B1 0WAIT_SEND_F2 0B1[1:2] 0R1[0:1] ",
            "1N1[2:3] 1WAIT_SEND_B0 1N1[3:4] 1R1[3:4] 1B1[3:4] 1R1[2:3] 1RECV_F2 1B1[2:3] 1SEND_B1 1WAIT_RECV_F2 ",
        ),
        (
            "eager-1f1b",
            "0RECV_B1 0R0[1:2] 0WAIT_RECV_B0 0B0[1:2] 0R0[0:1] 0B0[0:1] 0WAIT_SEND_F2 ",
            "1N1[2:3] 1N1[3:4] 1WAIT_SEND_B0 1RECV_F2 1R1[3:4] 1B1[3:4] 1R1[2:3] 1B1[2:3] 1SEND_B1 1WAIT_RECV_F2 ",
        ),
    ],
)
def test_messages_stay_for_an_action_if_the_neighbor_waits_for_the_pass(
    schedule: str, first: str, last: str
) -> None:
    """Under 1F1B each stage needs the other's current result before its next pass; under eager 1F1B the first
    stage is ahead, and messages stay for a pass.
    """
    runs = [run(layer, layer + 1, stage=layer // 2) for layer in range(4)]
    plan = make_plan(equal_profile(4), [2, 2], microbatches=3, schedule=schedule, decisions=tuple(runs))
    for actions, drawn in zip(lower(plan).actions, (first, last), strict=True):
        assert drawn in words(list(actions))


def test_stages_of_one_device_send_to_each_other() -> None:
    """Two stages of a device are connected like any two: a send and a receive on the same device."""
    plan = make_plan(equal_profile(2), [1, 1], devices=1, microbatches=1, schedule="gpipe")
    (rank,) = computes(plan, schedule_named("gpipe"), 1)
    assert words(rank) == "0F0 1F0 1B0 0B0"
    assert words(list(communicated(rank, plan))) == (
        "1RECV_F0 0LOAD0 0F0 0SEND_F0 1WAIT_RECV_F0 1LOAD0 1F0 0WAIT_SEND_F0 0RECV_B0 1B0 1SEND_B0 0WAIT_RECV_B0 0B0 "
        "1WAIT_SEND_B0"
    )


# -------------------------------------------------------------------- copies


@pytest.mark.parametrize(
    ("when", "drawn"),
    [
        (
            {"behind": 1, "ahead": 0},
            (
                "0LOAD0 0F0 0OFFLOAD0[0.0]@host 0LOAD1 0F1 0WAIT_OFFLOAD0[0.0]@host 0OFFLOAD1[0.0]@host 0LOAD2 0F2 "
                "0WAIT_OFFLOAD1[0.0]@host 0OFFLOAD2[0.0]@host 0RELOAD0[0.0]@host 0WAIT_RELOAD0[0.0]@host 0B0 "
                "0WAIT_OFFLOAD2[0.0]@host 0RELOAD1[0.0]@host 0WAIT_RELOAD1[0.0]@host 0B1 0RELOAD2[0.0]@host "
                "0WAIT_RELOAD2[0.0]@host 0B2"
            ),
        ),
        (
            {"behind": 0, "ahead": 1},
            (
                "0LOAD0 0F0 0OFFLOAD0[0.0]@host 0WAIT_OFFLOAD0[0.0]@host 0LOAD1 0F1 0OFFLOAD1[0.0]@host "
                "0WAIT_OFFLOAD1[0.0]@host 0RELOAD0[0.0]@host 0LOAD2 0F2 0OFFLOAD2[0.0]@host 0WAIT_OFFLOAD2[0.0]@host "
                "0WAIT_RELOAD0[0.0]@host 0RELOAD1[0.0]@host 0B0 0WAIT_RELOAD1[0.0]@host 0RELOAD2[0.0]@host 0B1 "
                "0WAIT_RELOAD2[0.0]@host 0B2"
            ),
        ),
        (
            {"behind": 1, "ahead": 1},
            (
                "0LOAD0 0F0 0OFFLOAD0[0.0]@host 0LOAD1 0F1 0WAIT_OFFLOAD0[0.0]@host 0OFFLOAD1[0.0]@host "
                "0RELOAD0[0.0]@host 0LOAD2 0F2 0WAIT_OFFLOAD1[0.0]@host 0OFFLOAD2[0.0]@host 0WAIT_RELOAD0[0.0]@host "
                "0RELOAD1[0.0]@host 0B0 0WAIT_OFFLOAD2[0.0]@host 0WAIT_RELOAD1[0.0]@host 0RELOAD2[0.0]@host 0B1 "
                "0WAIT_RELOAD2[0.0]@host 0B2"
            ),
        ),
    ],
)
def test_copies_leave_behind_their_forward_and_come_back_ahead_of_their_backward(
    when: dict[str, int], drawn: str
) -> None:
    """`count` compute actions hide each direction of a copy."""
    plan = one_stage(move((0, 0), **when), layers=1, microbatches=3)
    before = order("0LOAD0 0F0 0LOAD1 0F1 0LOAD2 0F2 0B0 0B1 0B2")
    assert words(copied(before, plan, ())) == drawn


@pytest.mark.parametrize(
    ("behind", "ahead", "moved"), [(1, 1, 1), (1, 2, 0), (2, 1, 0), (0, 2, 1), (2, 0, 1)]
)
def test_where_there_is_no_time_between_the_ways_nothing_moves(behind: int, ahead: int, moved: int) -> None:
    """The offload must end before the reload begins: three compute actions from forward to backward have room
    for two.
    """
    plan = one_stage(move((0, 0), behind=behind, ahead=ahead), layers=1, microbatches=1)
    before = order("0LOAD0 0F0 0F1 0F2 0B0")
    assert words(copied(before, plan, ())).count("0OFFLOAD0") == moved


def test_a_copy_waits_for_the_send_and_fills_the_wait_for_the_receive() -> None:
    """An OFFLOAD starts after the SEND of the same forward and is joined after its WAIT; a RELOAD ahead is
    before the receives of its compute action.
    """
    decision = move((0, 0), behind=1, ahead=1)
    plan = make_plan(equal_profile(4), [1] * 4, microbatches=4, decisions=(decision,))
    assert words(list(lower(plan).actions[0])).startswith(
        "0LOAD0 0F0 0SEND_F0 0OFFLOAD0[0.0]@host 0LOAD1 0F1 0WAIT_SEND_F0 0WAIT_OFFLOAD0[0.0]@host 0SEND_F1 "
        "0OFFLOAD1[0.0]@host 0LOAD2 0F2 0WAIT_SEND_F1 0WAIT_OFFLOAD1[0.0]@host 0SEND_F2 0OFFLOAD2[0.0]@host 0RECV_B0 "
        "0RELOAD0[0.0]@host 0LOAD3 0F3"
    )


def test_tensors_of_one_decision_move_as_a_bundle() -> None:
    """A decision that moves several tensors is one action; equal sets are one bundle, and a single tensor
    needs none.
    """
    plan = make_plan(
        equal_profile(4),
        [2, 2],
        schedule="gpipe",
        decisions=(
            move((0, 0), (1, 0)),
            move((2, 0), (3, 0), stage=1),
            move((0, 1)),
        ),
    )
    assert [[str(subject) for subject in bundle] for bundle in bundles_of(plan)] == [
        ["0.0", "1.0"],
        ["2.0", "3.0"],
    ]
    program = lower(plan)
    assert program.bundles == bundles_of(plan)
    moves = {str(action) for actions in program.actions for action in actions if "OFFLOAD0" in str(action)}
    assert {"0OFFLOAD0#0@host", "1OFFLOAD0#1@host", "0OFFLOAD0[0.1]@host"} < moves


def test_what_the_backward_needs_first_decides_when_a_bundle_is_back() -> None:
    """A bundle of tensors of layers 0 and 2 in pieces is back before the backward of the later layer."""
    plan = one_stage(move((0, 0), (2, 0)), run(1, 2), layers=3, microbatches=3)
    text = words(list(lower(plan).actions[0]))
    assert "0RELOAD1#0@host 0WAIT_RELOAD1#0@host 0B1[2:3] 0R1[1:2] 0B1[1:2] 0B1[0:1]" in text


@pytest.mark.parametrize(
    ("decisions", "message"),
    [
        ((move((1, 0)), run(1, 2)), "layer 1 is also recomputed for microbatch 0; do only one"),
        ((move((0, 7)),), "saved tensor 0.7 cannot be offloaded: layers 0 to 8 do not save it"),
    ],
)
def test_what_cannot_be_moved_is_refused(decisions: tuple[Decision, ...], message: str) -> None:
    """Recomputed tensors and tensors that are not saved cannot be moved."""
    with pytest.raises(UsageError, match=message):
        lower(one_stage(*decisions, microbatches=4))
