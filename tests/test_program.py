"""Actions and programs: their text form, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipefit.errors import UsageError
from pipefit.program import Action, Kind, Program, Subject, message_partner, parse_action, parse_program
from pipefit.schedule import lower
from pipelines import equal_profile, make_plan, offload_all

NUMBERS = st.integers(0, 200)
PARTS = st.builds("{}{}*{}".format, st.sampled_from(["device", "host"]), NUMBERS, st.integers(1, 9))
PLACES = st.one_of(
    st.just("host"), st.builds("device{}".format, NUMBERS), st.lists(PARTS, min_size=1, max_size=3).map("+".join)
)
SUBJECTS = st.builds(Subject, NUMBERS, st.one_of(NUMBERS, st.sampled_from(["parameters", "gradients", "optimizer"])))
TARGETS = st.one_of(
    st.just((None, None)),
    st.tuples(st.tuples(NUMBERS, NUMBERS), st.none()),
    st.tuples(st.none(), SUBJECTS),
)
ACTIONS = st.builds(
    lambda kind, stage, microbatch, target, place, wait: Action(kind, stage, microbatch, *target, place, wait),
    st.sampled_from(list(Kind)),
    NUMBERS,
    st.none() | NUMBERS,
    TARGETS,
    st.none() | PLACES,
    st.booleans(),
)


@given(ACTIONS)
def test_an_action_parses_back_from_its_text(action: Action) -> None:
    """`parse_action` inverts `str`, whatever the action holds."""
    assert parse_action(str(action)) == action


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 5), st.integers(1, 6), st.booleans())
def test_a_program_parses_back_from_its_text(schedule: str, stages: int, microbatches: int, moving: bool) -> None:
    """`parse_program` inverts `str`, with and without segments and moved tensors."""
    plan = make_plan(equal_profile(2 * stages), [2] * stages, microbatches=microbatches, schedule=schedule)
    program = offload_all(plan) if moving else lower(plan)
    assert parse_program(str(program), placement=program.placement, microbatches=microbatches) == program


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(Kind.FORWARD, 2, 0)),
        ("2F0[3:6]", Action(Kind.FORWARD, 2, 0, (3, 6))),
        ("2WAIT_RECV_F0", Action(Kind.RECV_FORWARD, 2, 0, wait=True)),
        ("2OFFLOAD0[5.3]@host", Action(Kind.OFFLOAD, 2, 0, subject=Subject(5, 3), place="host")),
        (
            "2RELOAD0[5.3]@device3*2+device4*1",
            Action(Kind.RELOAD, 2, 0, subject=Subject(5, 3), place="device3*2+device4*1"),
        ),
        ("2STEP", Action(Kind.STEP, 2)),
        ("2STEP7", Action(Kind.STEP, 2, 7)),
    ],
)
def test_the_text_form_is_as_documented(text: str, action: Action) -> None:
    """The examples of the module's documentation mean what it says."""
    assert parse_action(text) == action
    assert str(action) == text


@pytest.mark.parametrize(
    "text", ["", "F0", "2", "2X0", "2F0[3]", "2F0[3:]", "2F-1", "2OFFLOAD0[5.weights]@host", "2F0 2B0"]
)
def test_what_is_not_an_action_is_refused(text: str) -> None:
    """A text that is not an action is quoted in the error."""
    with pytest.raises(UsageError, match="is not an action"):
        parse_action(text)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("1F0", ""), "device 0 has action 1F0, but stage 1 is not on it"),
        (("0WAIT_SEND_F0", ""), "0WAIT_SEND_F0 joins nothing"),
        (("0SEND_F0 0SEND_F0", ""), "0SEND_F0 starts twice"),
        (("0SEND_F0", "1RECV_F0 1WAIT_RECV_F0"), "0SEND_F0 is never joined"),
        (("0SEND_F0 0WAIT_SEND_F0", ""), "0SEND_F0 has no partner: 1RECV_F0 is missing"),
        (("0SEND_F0 0WAIT_SEND_F0 0SEND_F0 0WAIT_SEND_F0", "1RECV_F0 1WAIT_RECV_F0"), "has no partner"),
        (("0SEND_B0 0WAIT_SEND_B0", ""), "0SEND_B0 is for stage -1, which does not exist"),
        (("", "1SEND_F0 1WAIT_SEND_F0"), "1SEND_F0 is for stage 2, which does not exist"),
    ],
)
def test_a_program_that_cannot_be_is_refused(lines: tuple[str, str], message: str) -> None:
    """A program names the action that is on the wrong device, unjoined or without its partner."""
    text = "\n".join(f"device {device}: {line}" for device, line in enumerate(lines))
    with pytest.raises(UsageError, match=message):
        parse_program(
            text,
            placement=((0,), (1,)),
            microbatches=1,
        )


@given(
    st.sampled_from([Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD]),
    st.integers(1, 9),
    NUMBERS,
)
def test_partners_are_mutual(kind: Kind, stage: int, microbatch: int) -> None:
    """The other end of the other end is the action itself; one sends and one receives the same direction."""
    action = Action(kind, stage, microbatch)
    partner = message_partner(action)
    assert partner is not None
    assert message_partner(partner) == action
    assert {kind.value[:4], partner.kind.value[:4]} == {"SEND", "RECV"}
    assert kind.value[-1] == partner.kind.value[-1]


def test_the_empty_program_of_an_unused_device_survives_its_text() -> None:
    """A device without actions keeps its line, so that devices keep their numbers."""
    program = Program(
        placement=((1,),), microbatches=1, actions=((), (Action(Kind.LOAD, 0, 0), Action(Kind.FORWARD, 0, 0)))
    )
    assert parse_program(str(program), placement=((1,),), microbatches=1) == program
