"""How far straight lines between two microbatch sizes are from exact profiles, between them and beyond.

CAPTURE predicts the peak of a stage from runs at some batch sizes, by a straight line through them. Here lines go
through runs at `FITTED` samples, and what they say of every range of blocks at other sizes is compared with runs at
these, as `planner.baselines.capture` makes both: two microbatches kept, between two other stages. Runs are read from
exact profiles for CUDA.

    python benchmarks/bench_lines.py [--models gpt bert ...] [--json FILE] [--tables]

Some ten seconds a model. `--tables` profiles nothing, and puts the table of the JSON into docs/planners/capture.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench_grids import MODELS, PAGE, cluster, measured
from measured_on import machine
from page_tables import markdown, put
from pipefit.planner import Question
from pipefit.planner.baselines.capture import BlockRuns
from pipefit.planner.problem import SINGLE
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training

RESULTS = Path(__file__).parent / "results" / "lines.json"
FITTED = 2, 32  # samples in a microbatch
KEPT = 2  # microbatches


class Error(NamedTuple):
    """How far the line is from a run at a size, over all ranges of blocks, as parts of the run's peak."""

    samples: int
    median: float
    worst: float  # with its sign: below zero the line says too little


def errors(costs: ModelProfile) -> Iterator[Error]:
    """At every size of a profile that no line goes through."""
    for one in costs.measurements:
        if (size := one.microbatch_size) not in FITTED:
            run, line = predicted(costs, (size,), size), predicted(costs, FITTED, size)
            there = np.isfinite(run)
            off = line[there] / run[there] - 1
            yield Error(size, float(np.median(np.abs(off))), float(off[np.abs(off).argmax()]))


def predicted(costs: ModelProfile, sizes: Sequence[int], samples: int) -> Any:
    """The peaks of all ranges of blocks at so many samples, by runs at these sizes."""
    how = Training(batch_size=KEPT * samples, microbatches=KEPT, schedule="gpipe")
    return BlockRuns(Question(profile=costs, cluster=cluster(4), training=how), sizes).predicted(SINGLE, KEPT)


def table(made: Iterable[dict[str, Any]]) -> str:
    """The worst range of blocks at every size, and the median of all."""
    rows = list(made)
    sizes = [error["samples"] for error in rows[0]["errors"]]
    lines = [
        (
            row["model"],
            *(f"{100 * one['worst']:+.1f} % ({100 * one['median']:.1f} %)" for one in row["errors"]),
        )
        for row in rows
    ]
    return markdown(("model", *(f"{size} sample{'s' if size > 1 else ''}" for size in sizes)), lines)


def main() -> None:
    """Compare lines with runs, model by model, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument(
        "--tables", action="store_true", help="put the table of the JSON into the page, profile nothing"
    )
    asked = parser.parse_args()
    made = (
        {row["model"]: row for row in json.loads(asked.json.read_text())["rows"]}
        if asked.json.exists()
        else {}
    )
    for model in () if asked.tables else asked.models:
        found = list(errors(measured(model)))
        print(model, *(f"{one.samples}: {one.worst:+.2%} ({one.median:.2%})" for one in found), flush=True)
        made[model] = {"model": model, "errors": [one._asdict() for one in found]}
        rows = [made[name] for name in MODELS if name in made]
        asked.json.write_text(
            json.dumps({"machine": machine(), "fitted": FITTED, "rows": rows}, indent=1) + "\n"
        )
    if asked.tables:
        put({"lines": table(made[name] for name in MODELS if name in made)}, page=PAGE)


if __name__ == "__main__":
    main()
