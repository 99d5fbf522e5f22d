"""Order of messages: programs that end under NCCL are accepted, others refused, and an oracle agrees."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipefit.errors import UsageError
from pipefit.lowering import SCHEDULES, lower, lower_evaluation
from pipefit.lowering.passes.recomputation import RECOMPUTE, Recompute, recompute_decisions
from pipefit.schema.actions import Action, Placement, parse_action
from pipefit.schema.program import Channel, Program, channel, channels, check_order, parse_program
from support.message_oracle import by_direction, by_pair, by_tag, outcome
from support.pipelines import equal_profile, make_plan


def alone(placement: Placement) -> tuple[int, ...]:
    """Return the placement of stages with a device each, in the oracle's form."""
    return tuple(device for (device,) in placement)


def words_of(program: Program) -> list[list[str]]:
    """Return a program in the oracle's form."""
    return [list(map(str, actions)) for actions in program.actions]


# -------------------------------------------------------------------- lowered programs


def pair_of_devices(device: int, action: Action, placement: Placement) -> Hashable:
    """Use the old arrangement: one communicator for a pair of devices, both directions."""
    return frozenset({device, *placement[action.neighbour]})


def lowered(schedule: str, stages: int, microbatches: int, recompute: Recompute = "never") -> Program:
    """Return the program of a plan with a device for every stage."""
    plan = make_plan(equal_profile(stages), [1] * stages, microbatches=microbatches, schedule=schedule)
    return lower(
        replace(
            plan,
            decisions=recompute_decisions(plan.stages, plan.profile.edges, recompute, schedule, microbatches),
        )
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_every_lowered_program_ends(schedule: str, recompute: Recompute) -> None:
    """Programs of all schedules for 1 to 8 stages and up to 16 microbatches are accepted; for small ones the
    oracle agrees.
    """
    for stages, microbatches in itertools.product(range(1, 9), (1, 2, 3, 4, 6, 9, 16)):
        program = lowered(schedule, stages, microbatches, recompute)  # checked as it is made
        if stages * microbatches <= 12:
            assert outcome(words_of(program), alone(program.placement), by_direction) == "ends"


def test_every_evaluation_ends() -> None:
    """Forward-only programs are accepted for 1 to 8 stages and 1 to 16 microbatches; for small ones the
    oracle agrees.
    """
    for stages, microbatches in itertools.product(range(1, 9), (1, 2, 3, 4, 6, 9, 16)):
        plan = make_plan(equal_profile(stages), [1] * stages)
        program = lower_evaluation(plan, microbatches=microbatches)
        if stages * microbatches <= 12:
            assert outcome(words_of(program), alone(program.placement), by_direction) == "ends"


@pytest.mark.parametrize("microbatches", [2, 3, 8])
def test_one_communicator_for_both_directions_hangs(microbatches: int) -> None:
    """Under 1F1B with two stages the model refuses the arrangement in which both directions share a line."""
    program = lowered("1f1b", 2, microbatches)
    ends = r"[01]RECV_[FB]\d of device \d"
    with pytest.raises(UsageError, match=rf"would hang: {ends} and {ends} use the same communicator"):
        check_order(program.actions, program.placement, channel_of=pair_of_devices)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_oracle_agrees_on_one_communicator_for_both_directions(schedule: str) -> None:
    """Check and oracle agree on whether a program ends under the old arrangement."""
    found = Counter()
    for stages, microbatches in itertools.product(range(1, 5), range(1, 5)):
        program = lowered(schedule, stages, microbatches)
        expected = outcome(words_of(program), alone(program.placement), by_pair)
        try:
            check_order(program.actions, program.placement, channel_of=pair_of_devices)
        except UsageError:
            assert expected != "ends", (stages, microbatches)
        else:
            assert expected == "ends", (stages, microbatches)
        found[expected] += 1
    assert found["ends"] >= 4
    assert found["hangs"] >= 4


# -------------------------------------------------------------------- channels


def test_every_direction_of_a_boundary_is_a_channel() -> None:
    """Both ends of a message name the same channel; directions, boundaries and devices without one do not
    share channels.
    """
    ends = [
        parse_action(text)
        for text in ("0SEND_F3", "1RECV_F3", "1SEND_B0", "0RECV_B0", "1SEND_F1", "2RECV_F1")
    ]
    devices, there, back = (4, 5, 5, 4, 5, 4), Channel(0, 1, 4, 5), Channel(1, 0, 5, 4)
    found = [channel(device, end, ((4,), (5,), (4,))) for device, end in zip(devices, ends, strict=True)]
    assert found == [there, there, back, back, Channel(1, 2, 5, 4), Channel(1, 2, 5, 4)]
    assert channel(4, ends[0], ((4,), (4,), (5,))) is None
    part = parse_action("0SEND_F3{0:2}@device6")
    assert channel(4, part, ((4,), (5, 6))) == Channel(0, 1, 4, 6)


def channels_of(program: Program) -> tuple[Channel, ...]:
    return channels(program.actions, program.placement)


def test_the_channels_of_a_program_are_those_that_it_uses() -> None:
    """Training uses both directions of each boundary, an evaluation one, a single stage none; always in one
    order.
    """
    plan = make_plan(equal_profile(3), [1, 1, 1])
    ahead, back = [Channel(0, 1, 0, 1), Channel(1, 2, 1, 2)], [Channel(1, 0, 1, 0), Channel(2, 1, 2, 1)]
    assert list(channels_of(lower(plan))) == sorted(ahead + back)
    assert list(channels_of(lower_evaluation(plan, microbatches=2))) == ahead
    assert channels_of(lowered("1f1b", 1, 2)) == ()


# -------------------------------------------------------------------- refusals

WRONG = {
    "crossing waits": (
        (0, 1),
        ["0F0 0SEND_F0 0RECV_B0 0WAIT_SEND_F0 0WAIT_RECV_B0 0F1 0SEND_F1 0WAIT_SEND_F1",
         "1RECV_F0 1WAIT_RECV_F0 1RECV_F1 1WAIT_RECV_F1 1B0 1SEND_B0 1WAIT_SEND_B0"],
        ("the program would hang: device 0 waits at 0WAIT_RECV_B0 until device 1 starts 1SEND_B0; device 1 waits at "
        "1WAIT_RECV_F1 until device 0 starts 0SEND_F1. To end the wait, start 1SEND_B0 before 1WAIT_RECV_F1, or "
        "start 0SEND_F1 before 0WAIT_RECV_B0"),
    ),
    "swapped receives": (
        (0, 1),
        ["0SEND_F0 0SEND_F1 0WAIT_SEND_F0 0WAIT_SEND_F1", "1RECV_F1 1RECV_F0 1WAIT_RECV_F0 1WAIT_RECV_F1"],
        ("1RECV_F1 of device 1 would get the message of 0SEND_F0 of device 0, because messages of one direction arrive "
        "in the order of the sends: start the receives in the same order"),
    ),
    "swapped sends": (
        (0, 1),
        ["0RECV_B0 0RECV_B1 0WAIT_RECV_B0 0WAIT_RECV_B1", "1SEND_B1 1SEND_B0 1WAIT_SEND_B0 1WAIT_SEND_B1"],
        "0RECV_B0 of device 0 would get the message of 1SEND_B1 of device 1",
    ),
    "a third device in the chain but not in the circle": (
        (0, 1, 2),
        ["0RECV_B0 0WAIT_RECV_B0",
         "1RECV_B0 1WAIT_RECV_B0 1SEND_B0 1WAIT_SEND_B0 1SEND_F0 1WAIT_SEND_F0",
         "2RECV_F0 2WAIT_RECV_F0 2SEND_B0 2WAIT_SEND_B0"],
        ("the program would hang: device 1 waits at 1WAIT_RECV_B0 until device 2 starts 2SEND_B0; device 2 waits at "
        "2WAIT_RECV_F0 until device 1 starts 1SEND_F0."),
    ),
    "a device that waits for itself": (
        (0, 0),
        ["0SEND_F0 0WAIT_SEND_F0 1RECV_F0 1WAIT_RECV_F0"],
        ("device 0 waits at 0WAIT_SEND_F0 until device 0 starts 1RECV_F0. To end the wait, start 1RECV_F0 before "
         "0WAIT_SEND_F0"),
    ),
    "an agreement without all stages": (
        (0, 1),
        ["0AGREE 0WAIT_AGREE", "1F0"],
        "device 0 waits at 0WAIT_AGREE until device 1 starts 1AGREE. Device 1 ends without it: start 1AGREE there",
    ),
    "sums in different orders": (
        (0, 1),
        ["0REDUCE[1.shared] 0REDUCE[2.shared] 0WAIT_REDUCE[1.shared] 0WAIT_REDUCE[2.shared]",
         "1REDUCE[2.shared] 1REDUCE[1.shared] 1WAIT_REDUCE[1.shared] 1WAIT_REDUCE[2.shared]"],
        "start them in the same order on stages",
    ),
    "a sum and an agreement in different orders": (
        (0, 1),
        ["0REDUCE[1.shared] 0AGREE 0WAIT_REDUCE[1.shared] 0WAIT_AGREE",
         "1AGREE 1REDUCE[1.shared] 1WAIT_REDUCE[1.shared] 1WAIT_AGREE"],
        "start them in the same order on stages",
    ),
    "sums of three pairs in a circle": (
        (0, 1, 2),
        ["0REDUCE[1.shared] 0WAIT_REDUCE[1.shared] 0REDUCE[3.shared] 0WAIT_REDUCE[3.shared]",
         "1REDUCE[2.shared] 1WAIT_REDUCE[2.shared] 1REDUCE[1.shared] 1WAIT_REDUCE[1.shared]",
         "2REDUCE[3.shared] 2WAIT_REDUCE[3.shared] 2REDUCE[2.shared] 2WAIT_REDUCE[2.shared]"],
        ("device 0 waits at 0WAIT_REDUCE[1.shared] until device 1 starts 1REDUCE[1.shared]; device 1 waits at "
        "1WAIT_REDUCE[2.shared] until device 2 starts 2REDUCE[2.shared]; device 2 waits at 2WAIT_REDUCE[3.shared] "
        "until device 0 starts 0REDUCE[3.shared]."),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_program_that_would_hang_or_mix_data_cannot_be_made(case: str) -> None:
    """The error names the devices, their blocked actions and the required change; the oracle agrees."""
    placement, lines, sentence = WRONG[case]
    assert outcome([line.split() for line in lines], placement, by_direction) != "ends"
    text = "\n".join(f"device {device}: {line}" for device, line in enumerate(lines))
    with pytest.raises(UsageError) as caught:
        parse_program(text, placement=tuple((device,) for device in placement), microbatches=2)
    assert sentence in str(caught.value)


RIGHT = {
    "messages of two boundaries between two devices need not keep one order": (
        (0, 1, 0, 1),
        ["0SEND_F0 2SEND_F0 0WAIT_SEND_F0 2WAIT_SEND_F0 2RECV_F0 2WAIT_RECV_F0",
         "3RECV_F0 3WAIT_RECV_F0 1RECV_F0 1WAIT_RECV_F0 1SEND_F0 1WAIT_SEND_F0"],
    ),
    "messages inside a device are told apart by what they carry": (
        (0, 0),
        ["0SEND_F0 0SEND_F1 1RECV_F1 1RECV_F0 1WAIT_RECV_F0 1WAIT_RECV_F1 0WAIT_SEND_F0 0WAIT_SEND_F1"],
    ),
    "a join may come in another order than its start": (
        (0, 1),
        ["0SEND_F0 0SEND_F1 0WAIT_SEND_F1 0WAIT_SEND_F0", "1RECV_F0 1RECV_F1 1WAIT_RECV_F1 1WAIT_RECV_F0"],
    ),
    "one agreement after another": (
        (0, 1), ["0AGREE 0WAIT_AGREE 0AGREE 0WAIT_AGREE", "1AGREE 1WAIT_AGREE 1AGREE 1WAIT_AGREE"]
    ),
    "sums over two pairs and both directions between one of them": (
        (0, 1, 2),
        ["0REDUCE[1.shared] 0SEND_F0 0WAIT_SEND_F0 0WAIT_REDUCE[1.shared]",
         "1REDUCE[2.shared] 1RECV_F0 1WAIT_RECV_F0 1REDUCE[1.shared] 1WAIT_REDUCE[2.shared] 1WAIT_REDUCE[1.shared]",
         "2REDUCE[2.shared] 2WAIT_REDUCE[2.shared]"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RIGHT)
def test_a_program_that_ends_is_accepted(case: str) -> None:
    """The check refuses no more than necessary; the oracle agrees."""
    placement, lines = RIGHT[case]
    assert outcome([line.split() for line in lines], placement, by_direction) == "ends"
    text = "\n".join(f"device {device}: {line}" for device, line in enumerate(lines))
    parse_program(text, placement=tuple((device,) for device in placement), microbatches=2)


# -------------------------------------------------------- stages on several devices, asynchronous bodies

GRID = ((0,), (1, 2))
HALVES = """
device 0: 0SEND_F0{{0:2}}@device1 0SEND_F0{{2:4}}@device2 0WAIT_SEND_F0{{0:2}}@device1 0WAIT_SEND_F0{{2:4}}@device2
device 1: 1RECV_F0{{0:2}} 1WAIT_RECV_F0{{0:2}} 1REDUCE0 1WAIT_REDUCE0
device 2: 1RECV_F0{{2:4}} 1WAIT_RECV_F0{{2:4}} {}
"""
ROWS = """
device 0: 0SEND_F0{0:2}@device1 0SEND_F0{2:4}@device1 0WAIT_SEND_F0{0:2}@device1 0WAIT_SEND_F0{2:4}@device1
device 1: 1RECV_F0{2:4} 1RECV_F0{0:2} 1WAIT_RECV_F0{0:2} 1WAIT_RECV_F0{2:4}
device 2:
"""


def test_devices_of_one_stage_have_channels_of_their_own() -> None:
    """Two halves of a microbatch go to two devices, which all-reduce gradients; a device that does not
    participate is named.
    """
    parse_program(HALVES.format("1REDUCE0 1WAIT_REDUCE0"), placement=GRID, microbatches=1)
    parse_program(HALVES.format("").replace("1REDUCE0 1WAIT_REDUCE0", ""), placement=GRID, microbatches=1)
    twice = HALVES.format("1REDUCE0 1WAIT_REDUCE0").replace("device 1:", "device 1: 1REDUCE1 1WAIT_REDUCE1")
    with pytest.raises(UsageError, match=r"1REDUCE\d would be added to 1REDUCE\d"):
        parse_program(twice, placement=GRID, microbatches=2)
    late = HALVES.format("1AGREE 1WAIT_AGREE 1REDUCE0 1WAIT_REDUCE0") + "\n"
    with pytest.raises(UsageError, match=r"device 2 waits at 1WAIT_AGREE until device \d starts [01]AGREE"):
        parse_program(late, placement=GRID, microbatches=1)


def test_rows_in_another_order_are_other_data() -> None:
    """Two parts of one microbatch on one channel are distinguished by their rows."""
    with pytest.raises(
        UsageError,
        match=r"1RECV_F0\{2:4\} of device 1 would get the message of 0SEND_F0\{0:2\}@device1 of device 0",
    ):
        parse_program(ROWS, placement=GRID, microbatches=1)


BODY = """
device 0: 0SEND_F0 0RECV_B-1 0WAIT_SEND_F-1 0WAIT_RECV_B-2
device 1: 1WAIT_RECV_F-1 1SEND_B-1 1RECV_F0 1WAIT_SEND_B-2
carried in 0: 0SEND_F-1 0RECV_B-2
carried in 1: 1RECV_F-1 1SEND_B-2
carried out 0: 0SEND_F0 0RECV_B-1
carried out 1: 1RECV_F0 1SEND_B-1
"""
UNMET = """
device 0: 0WAIT_RECV_B-1 0SEND_F0 0WAIT_SEND_F0 0RECV_B0
device 1: 1RECV_F0 1WAIT_RECV_F0 1SEND_B-1 1WAIT_SEND_B-1
carried in 0: 0RECV_B-1
carried in 1:
carried out 0: 0RECV_B0
carried out 1:
"""
MET = UNMET.replace("1RECV_F0 1WAIT_RECV_F0 1SEND_B-1", "1RECV_F0 1SEND_B-1 1WAIT_RECV_F0")


def test_an_endless_body_goes_on_from_what_is_under_way() -> None:
    """A message started by both ends in an earlier body is complete; one started by one end waits for the
    other end here.
    """
    parse_program(BODY, placement=((0,), (1,)), microbatches=1)
    parse_program(MET, placement=((0,), (1,)), microbatches=1)
    with pytest.raises(
        UsageError, match="device 0 waits at 0WAIT_RECV_B-1 until device 1 starts 1SEND_B-1; device 1"
    ):
        parse_program(UNMET, placement=((0,), (1,)), microbatches=1)


# -------------------------------------------------------------------- random programs


def shuffled(
    program: Program, rng: Random, *, moves: int, devices: int
) -> tuple[tuple[int, ...], list[list[str]]]:
    """Return a program of the same actions: some moved within their stage, the stages dealt out to `devices`.

    Every start stays before its join. Stages that share a device take turns there, action by action or in
    runs.
    """
    stages = words_of(program)
    for stage, words in enumerate(stages):
        sums = [f"{stage}REDUCE[7.shared]"] * (stage in (0, len(stages) - 1)) + [f"{stage}AGREE"]
        words += [*sums, *(f"{stage}WAIT_{start.removeprefix(str(stage))}" for start in sums)]
    for _ in range(moves):
        words = rng.choice(stages)
        source = rng.randrange(len(words))
        target = min(len(words) - 1, max(0, source + rng.choice([-4, -2, -1, 1, 2, 4])))
        changed = words.copy()
        changed.insert(target, changed.pop(source))
        if all(changed.index(word.replace("WAIT_", "")) <= changed.index(word) for word in changed):
            words[:] = changed
    placement = tuple(
        rng.randrange(devices) if devices < len(stages) else stage for stage in range(len(stages))
    )
    lines: list[list[str]] = [[] for _ in range(max(devices, len(stages)))]
    run = rng.choice([1, 3, 12])
    while any(stages):
        stage = rng.choice([stage for stage, words in enumerate(stages) if words])
        lines[placement[stage]] += stages[stage][:run]
        del stages[stage][:run]
    return placement, lines


def verdict(placement: tuple[int, ...], lines: list[list[str]]) -> bool:
    """Return whether the check accepts such a program."""
    actions = tuple(tuple(map(parse_action, words)) for words in lines)
    try:
        Program(placement=tuple((device,) for device in placement), microbatches=9, actions=actions)
    except UsageError:
        return False
    return True


@settings(max_examples=300)
@given(
    st.sampled_from(["gpipe", "1f1b"]),
    st.integers(2, 4),
    st.integers(1, 4),
    st.integers(0, 6),
    st.integers(0, 999),
)
def test_what_is_accepted_ends_and_what_is_refused_does_not(
    schedule: str, stages: int, microbatches: int, moves: int, seed: int
) -> None:
    """On random reorderings of valid programs check and oracle agree, and programs that end under NCCL end
    under gloo too.
    """
    rng = Random(seed)
    program = lowered(schedule, stages, microbatches)
    placement, lines = shuffled(program, rng, moves=moves, devices=rng.choice([stages, stages, 2]))
    ends = outcome(lines, placement, by_direction) == "ends"
    assert verdict(placement, lines) is ends
    if ends:
        assert outcome(lines, placement, by_tag) == "ends"


def test_random_programs_are_of_both_kinds() -> None:
    """Of the reorderings above many end, many do not, and some only under gloo."""
    rng, found = Random(0), Counter()
    for _ in range(300):
        placement, lines = shuffled(
            lowered("1f1b", 3, 3), rng, moves=rng.randrange(7), devices=rng.choice([2, 3, 3])
        )
        found[outcome(lines, placement, by_direction), outcome(lines, placement, by_tag)] += 1
    assert found["ends", "ends"] >= 50
    assert found["hangs", "hangs"] >= 50
    assert found["other data", "ends"] >= 5
