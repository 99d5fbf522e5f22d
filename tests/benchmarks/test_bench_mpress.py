"""The benchmark of MPress's machines and models: its questions, resumption, and tables."""

from __future__ import annotations

from pathlib import Path

import pytest

import bench_mpress
from bench_demands import BERT
from bench_mpress import WAYS, Asked, Freed, Row
from pipefit.planner import Means
from pipefit.simulator import Simulation


def row(way: str, speed: float | None, *, short: int = 0, model: str = "bert-1.67B", **more: object) -> Row:
    """Build a row of a batch of 100 samples."""
    seconds = None if speed is None else 100 / speed
    return Row(
        machine="dgx1-v100", model=model, microbatches=32, way=way, planning_seconds=1.6, step_seconds=seconds,
        samples_per_second=speed, short_bytes=short, split=(1,) * 8, **more,
    )  # fmt: skip


@pytest.fixture
def asked_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int, str]]:
    """Record the planners' questions, answered immediately."""
    found: list[tuple[str, str, int, str]] = []

    def answered(asked: Asked, name: str, way: object) -> Row:
        made = Row(
            machine=asked.machine, model=asked.model, microbatches=asked.microbatches, way=name, planning_seconds=1.0,
            why_not="not asked",
        )  # fmt: skip
        found.append(made.key)
        return made

    monkeypatch.setattr(bench_mpress, "answered", answered)
    return found


def test_a_run_goes_on_where_it_was(asked_of: list[object], tmp_path: Path) -> None:
    """Every row is computed once, and again only on request; all of them are in the JSON, in
    the same order.
    """
    arguments = ["--json", str(tmp_path / "rows.json"), "--only", "dgx1-v100", "bert-0.35B"]
    bench_mpress.main([*arguments, "--ways", "joint"])
    bench_mpress.main(arguments)
    key = "dgx1-v100", "bert-0.35B", 32
    others = [(*key, way) for way in WAYS if way != "joint"]
    assert asked_of == [(*key, "joint"), *others]
    bench_mpress.main([*arguments, "--again", "joint"])
    assert asked_of[len(WAYS) :] == [(*key, "joint")]
    assert list(bench_mpress.read(tmp_path / "rows.json")) == [(*key, way) for way in WAYS]


def test_words_choose_questions() -> None:
    """Words select machines, models and microbatches; by default five Berts and five GPTs of three counts on
    both machines.
    """
    assert len([*bench_mpress.questions(())]) == 2 * (5 + 5 * 3)
    chosen = [*bench_mpress.questions(["gpt-10.3B", "M=16", "M=64"])]
    assert {(asked.machine, asked.microbatches) for asked in chosen} == {
        (name, count) for name in bench_mpress.MACHINES for count in (16, 64)
    }
    assert {asked.model for asked in chosen} == {"gpt-10.3B"}


def test_speeds_are_those_of_the_third_step() -> None:
    """Speeds are those of the planner's plan, on devices minus the reserve; an asynchronous schedule's first
    step differs.
    """
    asked = Asked(machine="dgx1-v100", job=BERT, size="0.35B", microbatches=4)
    made = bench_mpress.answered(asked, "none", WAYS["none"])
    question = asked.question(Means())
    plan = bench_mpress.solved(question, bench_mpress.PLANNERS["time"], name="time")
    steps = Simulation(plan, steps=3).step_seconds
    assert made.fits and made.step_seconds == steps[2] != steps[0]
    assert made.samples_per_second == pytest.approx(48 / steps[2])
    assert question.cluster.budgets == ((32510 << 20) - (2 << 30),) * 8


def test_what_a_device_lacks_stands_where_a_speed_would() -> None:
    """A plan that does not fit has missing bytes instead of a speed, and is left out of ratios."""
    short, fast = row("mpress", 9.0, short=3 << 29), row("joint", 12.0, bound=5.0)
    assert bench_mpress.cell(short) == "short 1.5 GiB" and bench_mpress.cell(fast) == "12.00"
    assert bench_mpress.cell(row("joint", None)) == "refused"
    own = {one.way: one for one in (short, fast)}
    assert bench_mpress.ratio(own, "joint", "mpress") is None
    assert bench_mpress.speeds_row(own)[-3:] == ("", "67 %", "2 s")
    own = {"mpress": row("mpress", 8.0), "joint": fast}
    assert bench_mpress.speeds_row(own)[-3] == "1.50"


def test_the_pattern_is_told_in_numbers() -> None:
    """The pattern lists ratios of rows that needed techniques, the largest models, and the mean gain."""
    ways = {"none": 3 << 30, "balanced": 0, "recompute": 0, "host": 0, "peers": 1, "mpress": 0, "joint": 0}
    speeds = {
        "none": 10.0,
        "balanced": 6.0,
        "recompute": 9.0,
        "host": 7.2,
        "peers": 10.0,
        "mpress": 8.0,
        "joint": 9.6,
    }
    rows = [row(way, speeds[way], short=short) for way, short in ways.items()]
    told = "\n".join(bench_mpress.summary(rows))
    assert "`joint` against `mpress` 1.20 in the mean of 1, from 1.20 to 1.20" in told
    assert "recompute against host: bert-1.67B 1.25" in told
    assert "balanced against none: bert-1.67B 0.60" in told
    assert "largest bert: none none, balanced 1.67B, recompute 1.67B, host 1.67B, peers none" in told
    larger = [*rows, row("none", 5.0, model="bert-4.0B"), row("host", 4.0, model="bert-4.0B", short=1)]
    told = "\n".join(bench_mpress.summary(larger))
    assert (
        "largest bert: none 4B, balanced 1.67B or more, recompute 1.67B or more, host 1.67B, peers none or"
        in told
    )


def test_techniques_are_told_by_stage() -> None:
    """Techniques are listed in GiB, largest first, under four words."""
    freed = tuple(
        Freed(stage=stage, what=bench_mpress.technique(what), layers=1, freed_bytes=size << 30, added_seconds=0.0)
        for stage, what, size in (
            (0, "offload to host", 2), (0, "recompute", 5), (1, "offload to device2*3+device4*1", 1),
            (1, "offload optimizer to host", 3),
        )
    )  # fmt: skip
    table = bench_mpress.techniques([row("joint", 1.0, freed=freed)]).splitlines()
    assert table[2].startswith(
        "| bert-1.67B | joint | 1-1-1-1-1-1-1-1 | recompute 5.0, host 2.0 | state 3.0, peers 1.0 |"
    )
