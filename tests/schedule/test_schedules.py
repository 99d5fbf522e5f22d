"""Schedules against tables drawn by hand, and their closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipefit.errors import UsageError
from pipefit.lowering import SCHEDULES, Compute, lower, schedule_named
from pipefit.lowering.schedules import computes
from pipefit.schema.actions import Kind
from pipefit.schema.grids import Grid
from pipefit.schema.program import parse_program
from pipefit.simulator import Simulation
from support.gallery_samples import sampled
from support.pipelines import equal_profile, make_cluster, make_plan

GPIPE_3_4 = """
F0 F1 F2 F3 B0 B1 B2 B3
F0 F1 F2 F3 B0 B1 B2 B3
F0 F1 F2 F3 B0 B1 B2 B3
"""
TORCHGPIPE_3_4 = """
F0 F1 F2 F3 B3 B2 B1 B0
F0 F1 F2 F3 B3 B2 B1 B0
F0 F1 F2 F3 B3 B2 B1 B0
"""
ONE_F_ONE_B_3_4 = """
F0 F1 F2 B0 F3 B1 B2 B3
F0 F1 B0 F2 B1 F3 B2 B3
F0 B0 F1 B1 F2 B2 F3 B3
"""
EAGER_1F1B_3_6 = """
F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5
F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5
F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
"""
ONE_F_ONE_B_4_2 = """
F0 F1 B0 B1
F0 F1 B0 B1
F0 F1 B0 B1
F0 B0 F1 B1
"""

# Stages before the microbatch: rank 0 holds stages 0 and 2, rank 1 stages 1 and 3.
GPIPE_2_RANKS_2_CHUNKS_3 = """
0F0 0F1 2F0 2F1 0F2 2F2 2B0 2B1 0B0 0B1 2B2 0B2
1F0 1F1 3F0 3F1 1F2 3F2 3B0 3B1 1B0 1B1 3B2 1B2
"""
TORCHGPIPE_2_RANKS_2_CHUNKS_3 = """
0F0 0F1 2F0 2F1 0F2 2F2 2B2 2B1 0B2 0B1 2B0 0B0
1F0 1F1 3F0 3F1 1F2 3F2 3B2 3B1 1B2 1B1 3B0 1B0
"""

GPIPE_PROGRAM = """
device 0: 0LOAD0 0F0 0SEND_F0 0RECV_B0 0LOAD1 0F1 0WAIT_SEND_F0 0SEND_F1 \
0RECV_B1 0WAIT_RECV_B0 0B0 0WAIT_SEND_F1 0WAIT_RECV_B1 0B1 0STEP
device 1: 1RECV_F0 1RECV_F1 1WAIT_RECV_F0 1LOAD0 1F0 1WAIT_RECV_F1 1LOAD1 1F1 \
1B0 1SEND_B0 1B1 1WAIT_SEND_B0 1SEND_B1 1WAIT_SEND_B1 1STEP
"""


def table(schedule: str, stages: int, microbatches: int) -> str:
    """Parse a schedule drawn as text, a row for each stage."""
    rows = [one_each(schedule, stage, stages, microbatches) for stage in range(stages)]
    return (
        "\n"
        + "\n".join(" ".join(f"{kind.value}{microbatch}" for kind, _, microbatch in row) for row in rows)
        + "\n"
    )


def one_each(schedule: str, stage: int, stages: int, microbatches: int) -> list[Compute]:
    """Return the passes of a stage with a device to itself."""
    return list(SCHEDULES[schedule](stage, stages, 1, microbatches))


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "drawn"),
    [
        ("gpipe", 3, 4, GPIPE_3_4),
        ("torchgpipe", 3, 4, TORCHGPIPE_3_4),
        ("1f1b", 3, 4, ONE_F_ONE_B_3_4),
        ("1f1b", 4, 2, ONE_F_ONE_B_4_2),
        ("eager-1f1b", 3, 6, EAGER_1F1B_3_6),
    ],
)
def test_a_schedule_is_the_table_drawn_by_hand(
    schedule: str, stages: int, microbatches: int, drawn: str
) -> None:
    """Every stage computes in the order of the papers' figures, also with fewer microbatches than stages."""
    assert table(schedule, stages, microbatches) == drawn


@pytest.mark.parametrize(
    ("schedule", "drawn"),
    [("gpipe", GPIPE_2_RANKS_2_CHUNKS_3), ("torchgpipe", TORCHGPIPE_2_RANKS_2_CHUNKS_3)],
)
def test_a_schedule_of_two_stages_on_each_rank_is_the_table_drawn_by_hand(schedule: str, drawn: str) -> None:
    """Groups of one microbatch per rank go round the ranks; backwards go round the other way."""
    rows = [SCHEDULES[schedule](rank, 2, 2, 3) for rank in range(2)]
    lines = [" ".join(f"{stage}{kind.value}{microbatch}" for kind, stage, microbatch in row) for row in rows]
    assert "\n" + "\n".join(lines) + "\n" == drawn


@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b"])
def test_1f1b_refuses_several_stages_on_a_rank(schedule: str) -> None:
    """1F1B orders one stage on each device; the error says what to do."""
    plan = make_plan(equal_profile(4), [1] * 4, devices=2, schedule=schedule)
    with pytest.raises(
        UsageError,
        match=f"{schedule} supports one stage on each device, not 2: use schedule gpipe",
    ):
        lower(plan)


@pytest.mark.parametrize("order", [(0, 0, 1, 1), (0, 1, 1, 0), (0, 1, 0)])
def test_stages_that_do_not_go_round_the_ranks_are_refused(order: tuple[int, ...]) -> None:
    """Stages must go round the devices in turn, equally often on each; the error shows the placement."""
    plan = make_plan(equal_profile(len(order)), [1] * len(order), schedule="gpipe")
    plan = replace(
        plan, stages=tuple(replace(s, grid=Grid.of(d)) for s, d in zip(plan.stages, order, strict=True))
    )
    with pytest.raises(
        UsageError, match=r"needs stages in turn on the devices, the same number on each, not stages \[0"
    ):
        lower(plan)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_every_microbatch_goes_forward_once_and_backward_once(
    schedule: str, stages: int, microbatches: int
) -> None:
    """A stage's 2M compute actions hold each microbatch's forward before its backward, both in order of
    microbatches, except torchgpipe's backwards.
    """
    for stage in range(stages):
        order, numbers = one_each(schedule, stage, stages, microbatches), list(range(microbatches))
        assert [m for kind, _, m in order if kind is Kind.FORWARD] == numbers
        backwards = [m for kind, _, m in order if kind is Kind.BACKWARD]
        assert backwards == (numbers[::-1] if schedule == "torchgpipe" else numbers)
        for m in numbers:
            assert order.index(Compute(Kind.FORWARD, stage, m)) < order.index(
                Compute(Kind.BACKWARD, stage, m)
            )


@pytest.mark.sample(24)
@pytest.mark.parametrize("schedule", ["gpipe", "torchgpipe"])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 7])
def test_several_stages_on_a_rank_compute_each_microbatch_once(
    schedule: str, chunks: int, ranks: int, microbatches: int
) -> None:
    """Every stage of a rank has M forwards and M backwards; devices never deadlock."""
    split = [1] * (ranks * chunks)
    plan = make_plan(
        equal_profile(len(split)), split, devices=ranks, microbatches=microbatches, schedule=schedule
    )
    for rank, order in enumerate(computes(plan, schedule_named(schedule), microbatches)):
        wanted = {(k, s, m) for k in "FB" for s in plan.ranks[rank] for m in range(microbatches)}
        assert len(order) == len(wanted)
        assert {(a.kind.value, a.stage, a.microbatch) for a in order} == wanted
    assert min(Simulation(plan, steps=2).step_seconds) > 0.0


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8, 16])
def test_microbatches_in_flight_follow_the_closed_forms(stages: int, microbatches: int) -> None:
    """Stage s holds at most M microbatches under GPipe, min(M, P-s) under 1F1B, min(M, 2(P-s)-1) if eager."""
    for stage in range(stages):
        assert most_in_flight("gpipe", stage, stages, microbatches) == microbatches
        assert most_in_flight("torchgpipe", stage, stages, microbatches) == microbatches
        assert most_in_flight("1f1b", stage, stages, microbatches) == min(microbatches, stages - stage)
        assert most_in_flight("eager-1f1b", stage, stages, microbatches) == min(
            microbatches, 2 * (stages - stage) - 1
        )


def test_a_longer_warm_up_hides_messages() -> None:
    """If a message takes as long as a forward, the eager order has a shorter step."""
    slow = make_cluster(4, latency_seconds=1.0)
    seconds = {
        schedule: Simulation(
            make_plan(equal_profile(4), [1] * 4, microbatches=12, schedule=schedule, cluster=slow)
        ).step_seconds[-1]
        for schedule in ("1f1b", "eager-1f1b")
    }
    assert seconds["eager-1f1b"] < seconds["1f1b"]


def most_in_flight(schedule: str, stage: int, stages: int, microbatches: int) -> int:
    """Return the most microbatches with a pending backward."""
    held = [0]
    for kind, _, _ in one_each(schedule, stage, stages, microbatches):
        held.append(held[-1] + (1 if kind is Kind.FORWARD else -1))
    return max(held)


def test_an_unknown_schedule_is_refused_with_the_choices() -> None:
    """The error lists the existing schedules."""
    with pytest.raises(
        UsageError, match="choose one of gpipe, 1f1b, eager-1f1b, torchgpipe, pipedream, pipedream-2bw"
    ):
        schedule_named("2f2b")


def test_a_lowered_gpipe_is_the_program_written_by_hand() -> None:
    """Receives are posted one compute action ahead, sends joined one later, data loaded at both ends."""
    plan = make_plan(equal_profile(2), [1, 1], microbatches=2, schedule="gpipe")
    assert lower(plan) == parse_program(
        GPIPE_PROGRAM,
        placement=((0,), (1,)),
        microbatches=2,
    )


def test_a_lowered_1f1b_sends_and_receives_in_both_directions() -> None:
    """A middle stage under 1F1B overlaps both directions with computing."""
    plan = make_plan(equal_profile(3), [1, 1, 1], microbatches=2)
    assert " ".join(map(str, lower(plan).actions[1])) == (
        "1RECV_F0 1RECV_F1 1WAIT_RECV_F0 1F0 1SEND_F0 1RECV_B0 1WAIT_RECV_F1 1F1 1WAIT_SEND_F0 1SEND_F1 "
        "1RECV_B1 1WAIT_RECV_B0 1B0 1WAIT_SEND_F1 1SEND_B0 1WAIT_RECV_B1 1B1 1WAIT_SEND_B0 1SEND_B1 1WAIT_SEND_B1 1STEP"
    )


@pytest.mark.sample(5)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", sampled(range(1, 9), often=(1, 2, 3, 5, 8)))
def test_a_lowered_program_never_deadlocks(schedule: str, stages: int) -> None:
    """For up to 8 stages and 16 microbatches, every device completes two steps."""
    for microbatches in range(1, 17):
        plan = make_plan(equal_profile(stages), [1] * stages, microbatches=microbatches, schedule=schedule)
        assert min(Simulation(plan, steps=2).step_seconds) > 0.0
