"""Claim: ours trains the largest model on small devices, for real, and no plan is wrong about what fits.

AmoebaNet-D(12, F) on images of 128 x 128, batch 8 = 4 x 2, SGD with momentum, on four emulated devices of 160 MiB that
run out of memory at their caps as GPUs do. For each setting of recomputation (torchgpipe's three, in its own order of
backwards, and ours: `partitioners.py`) and every partitioner but the Bayesian: the largest F of the multiples of 8 that
trains two steps (the second has optimizer state, too), by bisection over real runs. torchgpipe's `balance_by_time` is
run for real at every F, so its splits vary from run to run.

Before a run, the simulator's peaks for its plan say whether it will fit: of the plans said to fit all must train, and
of the others all must run out of memory. Each largest F is also dry-run, and its peaks compared with those of the run.

    PYTHONPATH=src python benchmarks/bench_largest.py [--recompute never except_last always except_one]
        [--partitioners exact torchgpipe ...] [--json FILE]

About ten minutes on two cores. The JSON is written anew after each setting; `exact` and torchgpipe are always among the
partitioners.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from amoebanet_job import Job
from measured_on import machine
from partitioners import (
    OURS,
    PREDICTING,
    SCHEDULES,
    TORCHGPIPE,
    Edges,
    Setting,
    Splitter,
    TorchgpipeSplits,
    lengths,
    outcome,
    plan_at,
    splitters,
    torchgpipe_splits,
)
from pipefit.capture import Task
from pipefit.errors import OutOfMemory
from pipefit.largest.search import edge
from pipefit.lowering.passes.recomputation import Recompute
from pipefit.runtime import Trainer, certify
from pipefit.schema.cluster import Cluster
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Fingerprint
from pipefit.tables import Table, plain
from pipefit.units import MIB

STEPS = 2
Peaks = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One plan: the peaks that were planned, and those of its training; None where memory ran out."""

    recompute: Recompute
    filters: int
    split: tuple[int, ...]
    planned_bytes: Peaks
    said_to_fit: bool
    trained_bytes: Peaks | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest F that trained under a partitioner."""

    recompute: Recompute
    partitioner: str
    filters: int
    parameters: int
    split: tuple[int, ...]
    trained_bytes: Peaks
    dry_run_bytes: Peaks
    ours_to_this: float  # of parameters


class Timed:
    """torchgpipe's splits of every model asked for, each timed once, for about so many seconds."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds, self.known = seconds, dict[Fingerprint, TorchgpipeSplits]()

    def __call__(self, given: Setting) -> TorchgpipeSplits:
        """The splits of the setting's model."""
        model = given.profile.fingerprint
        if model not in self.known:
            size = given.training.microbatch_size
            self.known[model] = torchgpipe_splits(
                given.task, samples=size, devices=given.devices, seconds=self.seconds
            )
        return self.known[model]


class Runs:
    """All runs of a job. A plan that several partitioners have in common is run once."""

    def __init__(self, job: Job) -> None:
        self.job, self.costs = job, cache(job.profile)
        self.made = dict[tuple[Recompute, int, Edges], Run]()

    def of(self, recompute: Recompute, filters: int, split: Splitter) -> Run:
        """The run of a partitioner's plan."""
        given = self.job.setting(self.costs(filters), filters, recompute)
        edges = split(given)
        if (recompute, filters, edges) not in self.made:
            self.made[recompute, filters, edges] = run(given, filters, edges)
        return self.made[recompute, filters, edges]

    def largest(self, recompute: Recompute, split: Splitter) -> Run:
        """That of the largest F that trains under a partitioner."""
        found = edge(
            lambda filters: self.of(recompute, filters, split).trained_bytes is not None, self.job.values
        )
        assert found.holds is not None  # the smallest value is small enough
        return self.of(recompute, found.holds, split)


def run(given: Setting, filters: int, edges: Edges) -> Run:
    """Two steps of training in this process."""
    planned = outcome(given, edges)
    return Run(
        recompute=given.recompute,
        filters=filters,
        split=lengths(edges),
        planned_bytes=planned.peak_bytes,
        said_to_fit=all(
            peak <= room for peak, room in zip(planned.peak_bytes, given.cluster.budgets, strict=True)
        ),
        trained_bytes=trained(given.task, plan_at(given, edges)),
    )


def trained(task: Task, plan: Plan) -> Peaks | None:
    """The peaks of training; None where memory ran out."""
    try:
        trainer = Trainer(task, plan)
        for _ in range(STEPS):
            trainer.step(task.batch(plan.training.batch_size))
    except OutOfMemory:
        return None
    return trainer.trace.peak_bytes


def compare(job: Job, chosen: Mapping[str, Splitter], recompute: Recompute, runs: Runs) -> list[Largest]:
    """The largest F under every partitioner."""
    best = {name: runs.largest(recompute, split) for name, split in chosen.items()}
    parameters = {name: parameters_of(job.task(of.filters)) for name, of in best.items()}
    return [
        Largest(
            recompute=recompute,
            partitioner=name,
            filters=of.filters,
            parameters=parameters[name],
            split=of.split,
            trained_bytes=of.trained_bytes or (),
            dry_run_bytes=dry_run(runs, of),
            ours_to_this=parameters[OURS] / parameters[name],
        )
        for name, of in best.items()
    ]


def parameters_of(task: Task) -> int:
    """Counted on the model itself."""
    return sum(parameter.numel() for parameter in task.build().parameters())


def dry_run(runs: Runs, of: Run) -> Peaks:
    """The peaks of the same plan by the dry run."""
    given = runs.job.setting(runs.costs(of.filters), of.filters, of.recompute)
    return certify(given.task, plan_at(given, (0, *accumulate(of.split))), steps=STEPS).peak_bytes


# -------------------------------------------------------------------- what comes of it


def totals(rows: Sequence[Largest], runs: Sequence[Run]) -> dict[str, Any]:
    """How many plans were right about what fits, and how near peaks were."""
    fit, miss = [of for of in runs if of.said_to_fit], [of for of in runs if not of.said_to_fit]
    ran = [(of.planned_bytes, of.trained_bytes) for of in runs if of.trained_bytes is not None]
    return {
        "plans": len(runs),
        "said_to_fit": len(fit),
        "said_to_fit_and_trained": sum(of.trained_bytes is not None for of in fit),
        "said_not_to_fit": len(miss),
        "said_not_to_fit_and_ran_out": sum(of.trained_bytes is None for of in miss),
        "trained_with_the_peaks_planned": sum(planned == measured for planned, measured in ran),
        "largest_error_of_a_planned_peak": max(
            abs(a / b - 1) for planned, measured in ran for a, b in zip(planned, measured, strict=True)
        ),
        "largest": len(rows),
        "largest_with_the_peaks_of_the_dry_run": sum(row.trained_bytes == row.dry_run_bytes for row in rows),
    }


def ratios(rows: Iterable[Largest]) -> dict[str, Any]:
    """Parameters of ours to those of torchgpipe's, and of the best baseline."""
    to = {row.partitioner: row.ours_to_this for row in rows}
    best = min((name for name in to if name not in PREDICTING), key=lambda name: to[name])
    return {"to_torchgpipe": to[TORCHGPIPE], "to_best_baseline": to[best], "best_baseline": best}


def table(recompute: Recompute, rows: Iterable[Largest]) -> Table:
    """The rows as text."""
    cells = tuple(
        (
            row.partitioner,
            str(row.filters),
            f"{row.parameters / 1e6:.2f}",
            "-".join(map(str, row.split)),
            f"{max(row.trained_bytes) / MIB:.2f}",
            f"{row.ours_to_this:.2f}",
        )
        for row in rows
    )
    heads = ("partitioner", "largest F", "1e6 parameters", "split", "peak MiB", "ours to this")
    return Table(heads, cells, f"recompute {recompute}, schedule {SCHEDULES[recompute]}")


def small_job() -> Job:
    """Trains in seconds, and fills its devices."""
    return Job(
        cluster=Cluster.emulated((4, 160 * MIB)),
        layers=12,
        image_size=128,
        microbatches=4,
        microbatch_size=2,
        values=range(40, 1000, 8),
    )


def main() -> None:
    """Run, print, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    every = splitters(Timed())
    parser.add_argument("--recompute", nargs="+", choices=SCHEDULES, default=[*SCHEDULES])
    parser.add_argument("--partitioners", nargs="+", choices=every, default=[*every])
    parser.add_argument("--json", type=Path, help="write rows, runs, totals and the machine here")
    options = parser.parse_args()
    torch.set_num_threads(1)  # profiles assume one thread
    began, job = time.perf_counter(), small_job()
    chosen = {
        name: split for name, split in every.items() if name in {OURS, TORCHGPIPE, *options.partitioners}
    }
    runs, rows = Runs(job), list[Largest]()
    for recompute in options.recompute:
        found = compare(job, chosen, recompute, runs)
        print(
            plain([table(recompute, found)]),
            f"parameters, ours {ratios(found)}",
            sep="\n\n",
            end="\n\n",
            flush=True,
        )
        rows += found
        of = totals(rows, list(runs.made.values())) | {"seconds": time.perf_counter() - began}
        write(options.json, job, rows, runs, of)
    print(
        f"{of['plans']} plans: of {of['said_to_fit']} said to fit {of['said_to_fit_and_trained']} trained, of "
        f"{of['said_not_to_fit']} said not to fit {of['said_not_to_fit_and_ran_out']} ran out of memory; planned peaks "
        f"off by at most {of['largest_error_of_a_planned_peak']:.2%}; dry runs equal to training on every device in "
        f"{of['largest_with_the_peaks_of_the_dry_run']} of {of['largest']}; {of['seconds']:.0f} s"
    )


def write(path: Path | None, job: Job, rows: Sequence[Largest], runs: Runs, of: dict[str, Any]) -> None:
    """Everything that was found by now, as JSON where a file was named."""
    if path is None:
        return
    settings = dict.fromkeys(row.recompute for row in rows)
    document = {
        "ratios": {name: ratios(row for row in rows if row.recompute == name) for name in settings},
        "totals": of,
        "job": {key: str(value) for key, value in asdict(job).items()},
        "machine": machine(),
        "rows": [*map(asdict, rows)],
        "runs": [*map(asdict, runs.made.values())],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
