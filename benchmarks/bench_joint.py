"""Claim: the bound of `joint` is never above the fastest plan, and the plan of `joint` is mostly that one.

Small questions are answered by every plan that there is (`tests/support/tight_questions.py`): all splits of three
layers over one or two devices, each layer kept, recomputed alone or with the one before, or moved to the host or to
the other device, just in time or early. For each schedule, of as many questions as are asked for that some plan
answers: by how much the fastest plan is above the bound, and the plan of `joint` above the fastest, in per cent.
Below zero it found a plan that the enumeration does not hold, such as one that brings some tensors back earlier than
others. The last column is the largest part of the fastest plan's seconds that a bound was: it holds as long as that
is not above one.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/bench_joint.py [--questions N] [--json FILE]

Ten minutes for 300 questions, 50 of each schedule.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import count, islice
from pathlib import Path
from random import Random
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from measured_on import machine
from pipefit.planner import Question, joint, solved
from pipefit.tables import Table, write
from support.tight_questions import Case, fastest, random_case

COLUMNS = (
    "schedule",
    "questions",
    "bound: median",
    "9 in 10",
    "worst",
    "joint: median",
    "9 in 10 ",
    "worst ",
    "highest",
)
SCHEDULES = ("1f1b", "eager-1f1b", "gpipe", "torchgpipe", "pipedream", "pipedream-2bw")


class Answer(NamedTuple):
    """Seconds of a step: the bound, the fastest of all plans, and the plan of `joint`."""

    bound: float
    fastest: float
    joint: float


def answered(case: Case) -> Answer | None:
    """The answers to a question; None where no plan fits."""
    best = fastest(case)
    if best is None:
        return None
    question = Question(profile=case.profile, cluster=case.cluster, training=case.training)
    made = solved(question, joint, name="joint").provenance
    assert made is not None, "planners say where a plan comes from"
    assert made.bound is not None, "what fits has a bound"
    return Answer(made.bound, best, made.value)


def row(schedule: str, answers: Sequence[Answer]) -> tuple[str, ...]:
    """Gaps in per cent: the median, nine in ten, and the largest; and the highest bound."""
    cells = [schedule, str(len(answers))]
    for gaps in ([one.fastest / one.bound for one in answers], [one.joint / one.fastest for one in answers]):
        rising = sorted(100 * (gap - 1) for gap in gaps)
        cells += [f"{gap:.1f}" for gap in (median(rising), rising[9 * len(rising) // 10], rising[-1])]
    return *cells, f"{max(one.bound / one.fastest for one in answers):.3f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each schedule."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=50, help="for each schedule")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    answers: dict[str, list[Answer]] = {}
    for schedule in SCHEDULES:
        found = (answered(random_case(Random(seed), (schedule,))) for seed in count())
        answers[schedule] = [*islice((one for one in found if one is not None), options.questions)]
    rows = [row(schedule, own) for schedule, own in answers.items()]
    rows.append(row("all", [one for own in answers.values() for one in own]))
    write([Table(COLUMNS, tuple(rows))])
    if options.json is not None:
        seconds = {schedule: [one._asdict() for one in own] for schedule, own in answers.items()}
        document = {"machine": machine(), "columns": COLUMNS, "rows": rows, "seconds": seconds}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
