"""How long a dry run takes that folds equal layers and equal microbatches, and one that runs all of them.

    400 layers      GPT of small width on 8 devices, one microbatch: what folding layers does alone
    7 B             GPT of 7 billion parameters on 8 devices, 32 microbatches: 4 layers a stage, so microbatches fold

    PYTHONPATH=src python benchmarks/bench_dry_run.py [--json PATH] [--repeat N] [--layers N] [--only NAME]

Both take turns, N times. Seconds are the CPU's, the least of N, so that a busy machine distorts them little; building
the model is a part of them. Both have to tell the same in every sample, or the benchmark fails. Kernels are CUDA's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time

from measured_on import machine
from pipefit.capture import Task
from pipefit.models import build
from pipefit.planner import plan as make_plan
from pipefit.profiler import profile
from pipefit.runtime import certify
from pipefit.schema.cluster import Cluster
from pipefit.schema.plan import Plan

DEVICES, ROOM = 8, 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The dry runs of one plan."""

    name: str
    layers: int
    microbatches: int
    folded_seconds: float
    unfolded_seconds: float

    def __str__(self) -> str:
        ratio = self.folded_seconds / self.unfolded_seconds
        return (
            f"{self.name:12} {self.layers:4} layers x {self.microbatches:2} microbatches   folded "
            f"{self.folded_seconds:6.2f} s   unfolded {self.unfolded_seconds:7.2f} s   ratio {ratio:.3f}"
        )


def cases(layers: int) -> Iterator[tuple[str, Task, int]]:
    """Names, tasks and numbers of microbatches."""
    small = build("gpt", layers=layers, hidden=64, heads=4, sequence=32, vocabulary=128)
    yield f"{layers} layers", small, 1
    yield "7 B", build("gpt", layers=32, hidden=4096, heads=32, sequence=2048), 32


def planned(task: Task, microbatches: int) -> Plan:
    """An even plan for microbatches of one sample."""
    found = profile(task, microbatch_size=1, target="cuda")
    cluster = Cluster.emulated((DEVICES, ROOM))
    return make_plan(found, cluster, batch_size=microbatches, microbatches=microbatches, planner="uniform")


def measure(name: str, task: Task, plan: Plan, repeat: int) -> Row:
    """The shortest of `repeat` dry runs of each kind, which take turns.

    Raises:
        AssertionError: they do not tell the same.
    """
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(repeat):
        traces = {}
        for fold, times in seconds.items():
            start = process_time()
            traces[fold] = certify(task, plan, fold=fold)
            times.append(process_time() - start)
        assert traces[True] == traces[False], (
            f"{name}: the folded dry run tells something else than the unfolded one"
        )
    return Row(
        name=name,
        layers=len(plan.profile.layers),
        microbatches=plan.training.microbatches,
        folded_seconds=min(seconds[True]),
        unfolded_seconds=min(seconds[False]),
    )


def main() -> None:
    """Print the table; with --json, write it too."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--layers", type=int, default=400)
    parser.add_argument("--only", help="one of the names in the table")
    options = parser.parse_args()
    rows = []
    for name, task, microbatches in cases(options.layers):
        if options.only in (None, name):
            rows.append(measure(name, task, planned(task, microbatches), options.repeat))
            print(rows[-1], flush=True)
    if options.json:
        document = {"machine": machine(), "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
