"""The benchmark of the joint planner prints what it measures."""

from __future__ import annotations

import pytest

import bench_joint


def test_every_schedule_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    """With two questions of each."""
    bench_joint.main(["--questions", "2"])
    printed = capsys.readouterr().out
    assert all(schedule in printed for schedule in bench_joint.SCHEDULES)


def test_gaps_are_told_in_percent() -> None:
    """A plan a tenth above the fastest, which is a fifth above the bound."""
    answer = bench_joint.Answer(bound=10.0, fastest=12.0, joint=13.2)
    assert bench_joint.row("1f1b", [answer]) == ("1f1b", "1", "20.0", "20.0", "20.0", "10.0", "10.0", "10.0")
