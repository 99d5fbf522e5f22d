"""Schedules against tables drawn by hand, and their closed forms."""

from __future__ import annotations

import pytest

from pipefit.errors import UsageError
from pipefit.program import Kind, parse_program
from pipefit.schedule import SCHEDULES, compute_actions, lower
from pipefit.simulator import Simulation
from pipelines import equal_profile, make_plan

GPIPE_3_4 = """
F0 F1 F2 F3 B0 B1 B2 B3
F0 F1 F2 F3 B0 B1 B2 B3
F0 F1 F2 F3 B0 B1 B2 B3
"""
ONE_F_ONE_B_3_4 = """
F0 F1 F2 B0 F3 B1 B2 B3
F0 F1 B0 F2 B1 F3 B2 B3
F0 B0 F1 B1 F2 B2 F3 B3
"""
ONE_F_ONE_B_4_2 = """
F0 F1 B0 B1
F0 F1 B0 B1
F0 F1 B0 B1
F0 B0 F1 B1
"""

GPIPE_PROGRAM = """
device 0: 0LOAD0 0F0 0SEND_F0 0RECV_B0 0LOAD1 0F1 0WAIT_SEND_F0 0SEND_F1 \
0RECV_B1 0WAIT_RECV_B0 0B0 0WAIT_SEND_F1 0WAIT_RECV_B1 0B1 0STEP
device 1: 1RECV_F0 1RECV_F1 1WAIT_RECV_F0 1LOAD0 1F0 1WAIT_RECV_F1 1LOAD1 1F1 \
1B0 1SEND_B0 1B1 1WAIT_SEND_B0 1SEND_B1 1WAIT_SEND_B1 1STEP
"""


def table(schedule: str, stages: int, microbatches: int) -> str:
    """A schedule drawn as text, a row for each stage."""
    rows = [compute_actions(schedule, stage, stages, microbatches) for stage in range(stages)]
    return "\n" + "\n".join(" ".join(f"{kind.value}{microbatch}" for kind, microbatch in row) for row in rows) + "\n"


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "drawn"),
    [("gpipe", 3, 4, GPIPE_3_4), ("1f1b", 3, 4, ONE_F_ONE_B_3_4), ("1f1b", 4, 2, ONE_F_ONE_B_4_2)],
)
def test_a_schedule_is_the_table_drawn_by_hand(schedule: str, stages: int, microbatches: int, drawn: str) -> None:
    """Every stage computes in the order of the papers' figures, with fewer microbatches than stages too."""
    assert table(schedule, stages, microbatches) == drawn


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_every_microbatch_goes_forward_once_and_backward_once(schedule: str, stages: int, microbatches: int) -> None:
    """A stage's 2M compute actions hold each microbatch's forward before its backward, both kinds in order."""
    for stage in range(stages):
        computes = compute_actions(schedule, stage, stages, microbatches)
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            assert [m for k, m in computes if k is kind] == list(range(microbatches))
        for microbatch in range(microbatches):
            assert computes.index((Kind.FORWARD, microbatch)) < computes.index((Kind.BACKWARD, microbatch))


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8, 16])
def test_microbatches_in_flight_follow_the_closed_forms(stages: int, microbatches: int) -> None:
    """Stage s holds M microbatches at most under GPipe, min(M, P-s) under 1F1B."""
    for stage in range(stages):
        assert most_in_flight("gpipe", stage, stages, microbatches) == microbatches
        assert most_in_flight("1f1b", stage, stages, microbatches) == min(microbatches, stages - stage)


def most_in_flight(schedule: str, stage: int, stages: int, microbatches: int) -> int:
    """The most microbatches whose backward is still to come."""
    held = [0]
    for kind, _ in compute_actions(schedule, stage, stages, microbatches):
        held.append(held[-1] + (1 if kind is Kind.FORWARD else -1))
    return max(held)


def test_an_unknown_schedule_is_refused_with_the_choices() -> None:
    """The error lists the schedules that exist."""
    with pytest.raises(UsageError, match="choose one of gpipe, 1f1b"):
        compute_actions("2f2b", 0, 1, 1)


def test_a_lowered_gpipe_is_the_program_written_by_hand() -> None:
    """Receives are posted one compute action ahead, sends joined one behind, data loaded at both ends."""
    plan = make_plan(equal_profile(2), [1, 1], microbatches=2, schedule="gpipe")
    assert lower(plan) == parse_program(
        GPIPE_PROGRAM,
        placement=((0,), (1,)),
        microbatches=2,
    )


def test_a_lowered_1f1b_sends_and_receives_in_both_directions() -> None:
    """A middle stage under 1F1B overlaps both directions with its computing."""
    plan = make_plan(equal_profile(3), [1, 1, 1], microbatches=2)
    assert " ".join(map(str, lower(plan).actions[1])) == (
        "1RECV_F0 1RECV_F1 1WAIT_RECV_F0 1F0 1SEND_F0 1RECV_B0 1WAIT_RECV_F1 1F1 1WAIT_SEND_F0 1SEND_F1 "
        "1RECV_B1 1WAIT_RECV_B0 1B0 1WAIT_SEND_F1 1SEND_B0 1WAIT_RECV_B1 1B1 1WAIT_SEND_B0 1SEND_B1 1WAIT_SEND_B1 1STEP"
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", range(1, 9))
def test_a_lowered_program_never_deadlocks(schedule: str, stages: int) -> None:
    """For up to 8 stages and 16 microbatches, every device comes to the end of two steps."""
    for microbatches in range(1, 17):
        plan = make_plan(equal_profile(stages), [1] * stages, microbatches=microbatches, schedule=schedule)
        assert min(Simulation(plan, steps=2).step_seconds) > 0.0
