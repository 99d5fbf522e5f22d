"""Actions and programs: text form and refusals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipefit.errors import UsageError
from pipefit.lowering import lower
from pipefit.schema.actions import Action, Bundle, Kind, Subject, message_of, message_partner, parse_action
from pipefit.schema.devices import Member, MemberKind, Place, Share, parse_place
from pipefit.schema.program import Program, joined, parse_program
from support.pipelines import equal_profile, make_plan, offload_all

NUMBERS = st.integers(0, 200)
MEMBERS = st.one_of(
    st.builds(Member.device, NUMBERS),
    st.builds(Member.host, st.none() | NUMBERS),
    st.builds(Member, st.just(MemberKind.DISK), st.none() | NUMBERS),
)
PLACES = (
    st.lists(
        st.tuples(MEMBERS, st.integers(1, 9)),
        min_size=1,
        max_size=3,
        unique_by=lambda item: item[0] if item[0].number is not None else item[0].kind,
    )
    .filter(
        # a host without a number may be any of those with one
        lambda shares: all(
            m.number is not None or [n.kind for n, _ in shares].count(m.kind) == 1 for m, _ in shares
        )
    )
    .map(lambda shares: Place(Share(*item) for item in shares))
)
STATES = st.sampled_from(["parameters", "gradients", "optimizer", "versions", "shared"])
SUBJECTS = st.one_of(st.builds(Subject, NUMBERS, NUMBERS | STATES), st.builds(Bundle, NUMBERS))
RANGES = st.tuples(NUMBERS, NUMBERS)
ACTIONS = st.builds(
    Action,
    kind=st.sampled_from(list(Kind)),
    stage=NUMBERS,
    microbatch=st.none() | st.integers(-200, 200),
    layers=st.none() | RANGES,
    subject=st.none() | SUBJECTS,
    place=st.none() | PLACES,
    part=st.none() | RANGES,
    wait=st.booleans(),
)


@given(ACTIONS)
def test_an_action_parses_back_from_its_text(action: Action) -> None:
    """`parse_action` inverts `str` for every action."""
    assert parse_action(str(action)) == action


@given(PLACES)
def test_a_place_parses_back_from_its_text(place: Place) -> None:
    """`parse_place` inverts `str`, and the place splits bytes as before."""
    found = parse_place(str(place))
    assert found.members == place.members
    assert found == place
    assert found.split(1000) == place.split(1000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a place"),
        ("attic", "'attic' is not a place"),
        ("device", "'device' is not a member of a cluster: write device3, host0 or disk0"),
        ("device1+", "is not a place"),
        ("device1*2.5", "is not a place"),
        (f"device{'9' * 5000}", "is not a place"),
        (f"device1*{'9' * 5000}", "is not a place"),
        ("host\u0661", "is not a place"),
        ("device1*0+device2*1", "every share must be one part or more"),
        ("device1*1+device1*2", "names a member twice: add up its shares"),
        ("host*1+host0*1", "names a host with a number and one without, which may be the same"),
        ("device1*1+disk2*1+disk*1", "names a disk with a number and one without, which may be the same"),
    ],
)
def test_what_is_not_a_place_is_refused(text: str, message: str) -> None:
    """The message quotes the text and explains how places are written."""
    with pytest.raises(UsageError, match=message):
        parse_place(text)


@settings(max_examples=40)
@given(st.sampled_from(["gpipe", "torchgpipe", "1f1b"]), st.integers(1, 5), st.integers(1, 6), st.booleans())
def test_a_program_parses_back_from_its_text(
    schedule: str, stages: int, microbatches: int, moving: bool
) -> None:
    """`parse_program` inverts `str`, with and without segments and offloaded tensors."""
    plan = make_plan(equal_profile(2 * stages), [2] * stages, microbatches=microbatches, schedule=schedule)
    program = offload_all(plan) if moving else lower(plan)
    assert parse_program(str(program), placement=program.placement, microbatches=microbatches) == program


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(Kind.FORWARD, 2, 0)),
        ("2F0[3:6]", Action(Kind.FORWARD, 2, 0, (3, 6))),
        ("2WAIT_RECV_F0", Action(Kind.RECV_FORWARD, 2, 0, wait=True)),
        ("2OFFLOAD0[5.3]@host", Action(Kind.OFFLOAD, 2, 0, subject=Subject(5, 3), place=parse_place("host"))),
        (
            "2RELOAD0[5.3]@device3*2+device4*1",
            Action(Kind.RELOAD, 2, 0, subject=Subject(5, 3), place=parse_place("device3*2+device4*1")),
        ),
        ("2N0[3:6]", Action(Kind.FORWARD_ONLY, 2, 0, (3, 6))),
        ("2R0[3:6]", Action(Kind.RECOMPUTE, 2, 0, (3, 6))),
        ("2B0[3:6]", Action(Kind.BACKWARD, 2, 0, (3, 6))),
        ("2I0", Action(Kind.INPUT_GRADIENTS, 2, 0)),
        ("2W0[3:6]", Action(Kind.WEIGHT_GRADIENTS, 2, 0, (3, 6))),
        ("0B-3", Action(Kind.BACKWARD, 0, -3)),
        ("2SEND_F0{0:2}@device5", Action(Kind.SEND_FORWARD, 2, 0, place=parse_place("device5"), part=(0, 2))),
        ("2UNSHARD[3:6]", Action(Kind.UNSHARD, 2, layers=(3, 6))),
        ("2WAIT_UNSHARD[3:6]", Action(Kind.UNSHARD, 2, layers=(3, 6), wait=True)),
        ("2OFFLOAD0#1@host", Action(Kind.OFFLOAD, 2, 0, subject=Bundle(1), place=parse_place("host"))),
        (
            "2WAIT_OFFLOAD0[5.versions]@disk",
            Action(Kind.OFFLOAD, 2, 0, subject=Subject(5, "versions"), place=parse_place("disk"), wait=True),
        ),
        ("0REDUCE[1.shared]", Action(Kind.REDUCE, 0, subject=Subject(1, "shared"))),
        ("0AGREE", Action(Kind.AGREE, 0)),
        ("2STEP", Action(Kind.STEP, 2)),
        ("2STEP7", Action(Kind.STEP, 2, 7)),
    ],
)
def test_the_text_form_is_as_documented(text: str, action: Action) -> None:
    """The examples of the module's documentation parse to their stated meaning."""
    assert parse_action(text) == action
    assert str(action) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F0",
        "2",
        "2X0",
        "2F0[3]",
        "2F0[3:]",
        "2F--1",
        "2F-",
        "-2F0",
        "2F0{1}",
        "2F0{-1:2}",
        "2OFFLOAD0#@host",
        "2OFFLOAD0[5.weights]@host",
        "2F0 2B0",
        f"2F{'9' * 5000}",
        f"2OFFLOAD0[5.{'9' * 5000}]@host",
        "2F\u0660",
    ],
)
def test_what_is_not_an_action_is_refused(text: str) -> None:
    """The message quotes the text."""
    with pytest.raises(UsageError, match="is not an action"):
        parse_action(text)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("1F0", ""), "device 0 has action 1F0, but does not hold stage 1"),
        (("0WAIT_SEND_F0", ""), "0WAIT_SEND_F0 waits for nothing"),
        (("0SEND_F0 0SEND_F0", ""), "0SEND_F0 starts twice"),
        (("0SEND_F0", "1RECV_F0 1WAIT_RECV_F0"), "0SEND_F0 never completes"),
        (("0SEND_F0 0WAIT_SEND_F0", ""), "0SEND_F0 lacks its partner 1RECV_F0"),
        (("0SEND_F0 0WAIT_SEND_F0 0SEND_F0 0WAIT_SEND_F0", "1RECV_F0 1WAIT_RECV_F0"), "lacks its partner"),
        (("0SEND_B0 0WAIT_SEND_B0", ""), "0SEND_B0 is for stage -1, which does not exist"),
        (("", "1SEND_F0 1WAIT_SEND_F0"), "1SEND_F0 is for stage 2, which does not exist"),
    ],
)
def test_a_program_that_cannot_be_is_refused(lines: tuple[str, str], message: str) -> None:
    """The message names the action that is on the wrong device, unjoined or without its partner."""
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
    """The partner of a partner is the action itself; one sends and one receives the same direction."""
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


# -------------------------------------------------------- grids, parts, bundles, asynchronous schedules


TWO_BY_ONE = ((0, 1), (2,))  # stage 0 on devices 0 and 1, stage 1 on device 2


def grid(*lines: str, microbatches: int = 1, placement: tuple[tuple[int, ...], ...] = TWO_BY_ONE) -> Program:
    """Return a program of three devices."""
    text = "\n".join(f"device {device}: {line}" for device, line in enumerate(lines))
    return parse_program(text, placement=placement, microbatches=microbatches)


def test_parts_of_a_microbatch_travel_between_grids() -> None:
    """Each device of a grid sends its rows; the stage of one device receives both and names each sender."""
    receives = "{}0{{0:2}}@device0 {}0{{2:4}}@device1"
    program = grid(
        "0LOAD0 0F0 0SEND_F0{0:2} 0WAIT_SEND_F0{0:2}",
        "0LOAD0 0F0 0SEND_F0{2:4} 0WAIT_SEND_F0{2:4}",
        f"{receives.format('1RECV_F', '1RECV_F')} {receives.format('1WAIT_RECV_F', '1WAIT_RECV_F')} 1F0",
    )
    assert parse_program(str(program), placement=TWO_BY_ONE, microbatches=1) == program


def test_the_only_other_end_need_not_be_named() -> None:
    """`0SEND_F0@device1` means `0SEND_F0` if stage 1 is on device 1 only; it is printed without the
    device.
    """
    lines = "device 0: 0SEND_F0@device1 0WAIT_SEND_F0@device1\ndevice 1: 1RECV_F0@device0 1WAIT_RECV_F0"
    program = parse_program(lines, placement=((0,), (1,)), microbatches=1)
    assert str(program) == "device 0: 0SEND_F0 0WAIT_SEND_F0\ndevice 1: 1RECV_F0 1WAIT_RECV_F0"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("", "", "1RECV_F0 1WAIT_RECV_F0"), r"1RECV_F0 needs one of the devices \[0, 1\]"),
        (("", "", "1RECV_F0@device2 1WAIT_RECV_F0@device2"), "names device2: stage 0 is on devices 0, 1"),
        (
            ("0SEND_F0@device1 0WAIT_SEND_F0@device1", "", ""),
            "names device1: stage 1 is on device 2, which needs no name",
        ),
        (("0SEND_F0 0WAIT_SEND_F0", "", ""), "0SEND_F0 lacks its partner 1RECV_F0@device0"),
        (
            ("0SEND_F0{0:2} 0WAIT_SEND_F0{0:2}", "", "1RECV_F0{0:3}@device0 1WAIT_RECV_F0{0:3}@device0"),
            "lacks its partner",
        ),
        (("0SEND_F0{0:2} 0WAIT_SEND_F0{2:4}", "", ""), r"0WAIT_SEND_F0\{2:4\} waits for nothing"),
        (("", "", "0LOAD0"), "device 2 has action 0LOAD0, but does not hold stage 0"),
        (("0UNSHARD", "", ""), "0UNSHARD never completes"),
    ],
)
def test_messages_between_grids_are_checked(lines: tuple[str, str, str], message: str) -> None:
    """The other end must be named if there are several, be one of them, and expect the same rows."""
    with pytest.raises(UsageError, match=message):
        grid(*lines)


def test_both_ends_of_a_message_are_the_same_end() -> None:
    """Send and receive agree on direction, receiving stage, microbatch, rows, sender and receiver."""
    send, receive = parse_action("0SEND_F0{0:2}"), parse_action("1RECV_F0{0:2}@device1")
    assert message_of(1, send, TWO_BY_ONE) == message_of(2, receive, TWO_BY_ONE) == (True, 1, 0, (0, 2), 1, 2)
    send, receive = parse_action("1SEND_B3@device0"), parse_action("0RECV_B3")
    assert message_of(2, send, TWO_BY_ONE) == message_of(0, receive, TWO_BY_ONE) == (False, 0, 3, None, 2, 0)


def test_a_program_lists_its_bundles() -> None:
    """A bundle is a separate line, and an action moves all of it."""
    text = "device 0: 0OFFLOAD0#1@host 0WAIT_OFFLOAD0#1@host\nbundle 0: 0.0 1.2\nbundle 1: 3.1"
    program = parse_program(text, placement=((0,),), microbatches=1)
    assert program.bundles == ((Subject(0, 0), Subject(1, 2)), (Subject(3, 1),))
    assert program.moved(program.actions[0][0]) == (Subject(3, 1),)
    assert program.moved(parse_action("0RELOAD0[5.3]@host")) == (Subject(5, 3),)
    assert str(program) == text
    with pytest.raises(
        UsageError, match=r"0OFFLOAD0#2@host does not offload anything known: .* one of 2 bundles"
    ):
        program.moved(parse_action("0OFFLOAD0#2@host"))
    with pytest.raises(UsageError, match=r"'0.weights' is neither a saved tensor"):
        parse_program("device 0:\nbundle 0: 0.weights", placement=((0,),), microbatches=1)


BODY = """device 0: 0LOAD0 0F0 0WAIT_SEND_F-1 0SEND_F0 0RECV_B-1 0WAIT_RECV_B-1 0B-1 0STEP-1
device 1: 1RECV_F0 1WAIT_RECV_F0 1LOAD0 1F0 1B0 1STEP0 1WAIT_SEND_B-1 1SEND_B0
carried in 0: 0SEND_F-1
carried in 1: 1SEND_B-1
carried out 0: 0SEND_F0
carried out 1: 1SEND_B0"""


def test_a_body_of_an_endless_schedule_joins_what_the_body_before_it_started() -> None:
    """Transfers carried in are joined here, transfers carried out are not; the partner of a message may be
    one body away.
    """
    program = parse_program(BODY, placement=((0,), (1,)), microbatches=1)
    assert str(program) == BODY
    assert program.carried_in == ((parse_action("0SEND_F-1"),), (parse_action("1SEND_B-1"),))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("carried in 0: 0SEND_F-1", "carried in 0:", "0WAIT_SEND_F-1 waits for nothing"),
        ("carried out 0: 0SEND_F0", "carried out 0:", "0SEND_F0 never completes"),
        ("0WAIT_SEND_F-1 ", "", "0SEND_F-1 never completes"),
        ("0RECV_B-1 0WAIT_RECV_B-1 ", "", "1SEND_B0 lacks its partner 0RECV_B0"),
    ],
)
def test_a_body_that_leaves_something_open_is_refused(old: str, new: str, message: str) -> None:
    """All transfers carried in must be joined, all others too unless carried out, and every message needs its
    partner.
    """
    with pytest.raises(UsageError, match=message):
        parse_program(BODY.replace(old, new), placement=((0,), (1,)), microbatches=1)


FILLING = """device 0: 0LOAD0 0F0 0SEND_F0 0WAIT_SEND_F0
device 1: 1RECV_F0 1WAIT_RECV_F0 1LOAD0 1F0 1B0 1SEND_B0
carried in 0:
carried in 1:
carried out 0:
carried out 1: 1SEND_B0"""
DRAINING = """device 0: 0RECV_B-1 0WAIT_RECV_B-1 0B-1 0STEP-1
device 1: 1WAIT_SEND_B-1
carried in 0:
carried in 1: 1SEND_B-1
carried out 0:
carried out 1:"""


def test_what_fills_and_what_drains_an_endless_schedule_need_no_partner_for_what_they_carry() -> None:
    """A send that is carried out is received later, and one that is carried in may be received here."""
    first = parse_program(FILLING, placement=((0,), (1,)), microbatches=1)
    last = parse_program(DRAINING, placement=((0,), (1,)), microbatches=0)
    assert [line.strip() for line in f"{first}\n{last}".splitlines()] == f"{FILLING}\n{DRAINING}".splitlines()
    assert [first.endless, last.endless] == [True, True]
    ended = FILLING.removesuffix(" 1SEND_B0").replace("1SEND_B0", "1SEND_B0 1WAIT_SEND_B0") + " "
    with pytest.raises(UsageError, match="1SEND_B0 lacks its partner 0RECV_B0"):
        parse_program(ended, placement=((0,), (1,)), microbatches=1)


def test_parts_of_an_endless_schedule_join_to_a_program_of_their_own() -> None:
    """Microbatches are numbered throughout, and the next part joins the transfers that one part carries
    out.
    """
    parts = [
        parse_program(text, placement=((0,), (1,)), microbatches=n)
        for text, n in ((FILLING, 1), (DRAINING, 0))
    ]
    whole = joined(parts)
    assert [" ".join(map(str, actions)) for actions in whole.actions] == [
        "0LOAD0 0F0 0SEND_F0 0WAIT_SEND_F0 0RECV_B0 0WAIT_RECV_B0 0B0 0STEP0",
        "1RECV_F0 1WAIT_RECV_F0 1LOAD0 1F0 1B0 1SEND_B0 1WAIT_SEND_B0",
    ]
    assert whole.carried_out == ((), ())
