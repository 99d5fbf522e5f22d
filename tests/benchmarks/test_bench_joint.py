"""The output of the joint planner's benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

import bench_joint
from support.tight_questions import random_case


def test_every_schedule_has_a_row(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every schedule has a row of the requested number of questions, solved or not, and there
    is one total.
    """
    answers = [None, bench_joint.Answer(bound=10.0, fastest=12.0, joint=13.2)] * 20
    monkeypatch.setattr(bench_joint, "answered", lambda case: answers.pop())
    bench_joint.main(["--questions", "2", "--json", str(tmp_path / "joint.json")])
    rows = json.loads((tmp_path / "joint.json").read_text())["rows"]
    assert [row[:2] for row in rows] == [[name, "2"] for name in bench_joint.SCHEDULES] + [["all", "12"]]
    assert "pipedream-2bw" in capsys.readouterr().out


def test_a_question_is_answered_by_all_plans_and_by_joint() -> None:
    """The bound is at most the fastest of all plans, and `joint` is close to it."""
    answer = bench_joint.answered(random_case(Random(1), ("1f1b",)))
    assert answer is not None
    assert answer.bound <= answer.fastest * (1 + 1e-9)
    assert answer.joint <= answer.fastest * 1.1


def test_gaps_are_told_in_per_cent() -> None:
    """Gaps are in per cent: this plan is a tenth above the fastest, which is a fifth above the bound."""
    answer = bench_joint.Answer(bound=10.0, fastest=12.0, joint=13.2)
    cells = bench_joint.row("1f1b", [answer])
    assert cells == ("1f1b", "1", "20.0", "20.0", "20.0", "10.0", "10.0", "10.0", "0.833")
