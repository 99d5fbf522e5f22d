"""The timed programs, checked against their names in the table."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path

import pytest

import bench_simulator as bench
from pipefit.schema.actions import Action, Bundle, Kind
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program
from simulator_beside import PROGRAMS, READINGS, least_seconds

MICROBATCHES = 3


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Plan, Program]]:
    """Build all programs with fewer microbatches."""
    monkeypatch.setattr(bench, "MICROBATCHES", MICROBATCHES)
    monkeypatch.setattr(bench, "FEWER_MICROBATCHES", MICROBATCHES)
    return {name: (plan, program) for name, plan, program in bench.programs()}


def every(program: Program, kind: Kind) -> list[Action]:
    """Return the actions of a kind, without joins."""
    return [
        action for actions in program.actions for action in actions if action.kind is kind and not action.wait
    ]


def test_in_every_stage_two_runs_go_forward_twice(few: dict[str, tuple[Plan, Program]]) -> None:
    """Two runs of three layers are recomputed once for every microbatch, without overlap; all other layers
    never.
    """
    plan, program = few["runs recomputed"]
    twice = [action.layers for action in every(program, Kind.RECOMPUTE) if action.microbatch == 0]
    assert [stop - start for start, stop in twice if (start, stop)] == [3] * (2 * bench.STAGES)
    layers = Counter(layer for start, stop in twice for layer in range(start, stop))
    assert set(layers.values()) == {1}
    assert len(every(program, Kind.RECOMPUTE)) == len(twice) * MICROBATCHES
    assert {
        stage: len(plan.decisions_of(stage, bench.What.RECOMPUTE)) for stage in range(bench.STAGES)
    } == dict.fromkeys(range(bench.STAGES), 2)


def test_in_every_stage_four_bundles_move(few: dict[str, tuple[Plan, Program]]) -> None:
    """Bundles of three storages are offloaded and reloaded; under 1F1B the last stage lacks the time and
    keeps them.
    """
    _, program = few["4 bundles a stage"]
    for kind in (Kind.OFFLOAD, Kind.RELOAD):
        moves = every(program, kind)
        assert all(isinstance(move.subject, Bundle) and len(program.moved(move)) == 3 for move in moves)
        assert {move.stage for move in moves} == set(range(bench.STAGES - 1))
        assert set(Counter((move.stage, move.microbatch) for move in moves).values()) == {4}


def test_every_program_is_simulated_and_described(few: dict[str, tuple[Plan, Program]]) -> None:
    """Each program is lowered, simulated and described, with time per action; hand-written ones skip
    lowering.
    """
    for name, (plan, program) in few.items():
        rows = list(bench.measure(name, plan, program, 1))
        by_hand = name == "offload in every layer"
        readings = ["lower", "peaks", "peaks and seconds", "trace", "candidate"]
        own = [row.reading for row in rows if not row.reading.startswith("clock")]
        assert own == (readings[1:4] if by_hand else readings)
        assert rows[-1].reading == "clock in Python"
        assert {row.actions for row in rows} == {sum(map(len, program.actions))}
        assert all(row.us_per_action == pytest.approx(1e6 * row.seconds / row.actions) for row in rows)
    assert bench.line(rows[0]).endswith("us per action")


@pytest.mark.gallery
def test_two_versions_take_turns() -> None:
    """One checkout is compared with itself: every reading of both programs, in seconds, and their ratio."""
    rows = least_seconds(Path(__file__).parents[2], 1)
    assert [(row.program, row.reading) for row in rows] == [*product(PROGRAMS, READINGS)]
    assert all(row.ratio == row.seconds / row.others_seconds > 0 for row in rows)
