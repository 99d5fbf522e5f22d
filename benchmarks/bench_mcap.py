"""Claim: mCAP's Bayesian optimisation finds what its brute force finds, by its own predictor (mCAP, section 3.4).

The two searches as the paper runs them, over the two numbers a layer of incremental runs: VGG-11 with mCAP's batch and
AmoebaNet-D(36, 544), each on four devices, as torchgpipe trains them: all microbatches but the last recomputed,
backwards from the last to the first. Runs are simulated: their peaks are those of real ones. Three seeds of the
optimisation, 75 evaluations each.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/bench_mcap.py [--seeds N] [--json FILE]

Two minutes on a quiet machine. "over" is the estimated peak of the fullest device against that of brute force; "true
over" the same of true peaks against those of `exact`: what the predictor costs, whoever searches.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import comb
from pathlib import Path

from measured_on import machine
from pipefit.models import build
from pipefit.planner import plan
from pipefit.planner.baselines.mcap import estimates
from pipefit.profiler import profile
from pipefit.profiler.training_runs.profilers import plan_of, profile_incrementally
from pipefit.profiler.training_runs.runs import Edges, intervals
from pipefit.schema.cluster import Cluster
from pipefit.schema.profile import AdditiveCosts, ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Simulation

SCHEDULE, RECOMPUTE = "torchgpipe", "except_last"
MODELS = (("vgg11", {}, 92, 12), ("amoebanet", {"layers": 36, "filters": 544}, 8, 4))
DEVICES = 4
COLUMNS = ("model", "search", "looked at", "split", "estimate GiB", "over", "true over", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one search found."""

    model: str
    search: str
    looked_at: int
    split: tuple[int, ...]
    estimated_bytes: int
    over: float
    true_over: float
    seconds: float


def measured(model: str, options: dict[str, int], how: Training, cluster: Cluster) -> ModelProfile:
    """The profile of a model of the paper, with incremental runs that are simulated."""
    task = build(model, **options)
    found = profile(task, microbatch_size=how.microbatch_size, target="cuda")
    with tempfile.TemporaryDirectory() as folder:
        costs = profile_incrementally(
            task,
            found,
            cluster,
            how,
            recompute=RECOMPUTE,
            store=Path(folder) / "runs.json",
            run=lambda made: Simulation(made, steps=2).peak_bytes[: len(made.stages)],
        )
    return replace(found, additive=costs)


def rows(model: str, options: dict[str, int], size: int, microbatches: int, *, seeds: int) -> list[Row]:
    """Brute force, and the optimisation with every seed."""
    how = Training(batch_size=size * microbatches, microbatches=microbatches, schedule=SCHEDULE)
    cluster = Cluster.emulated((DEVICES, 1 << 50))
    known = measured(model, options, how, cluster)
    costs, layers = known.additive, len(known.layers)
    assert costs is not None

    def planned(planner: str) -> Edges:
        return (0, *plan(known, cluster, how, planner=planner, recompute=RECOMPUTE).boundaries, layers)

    def true_peak(edges: Edges) -> int:
        return max(Simulation(plan_of(known, cluster, how, intervals(edges), RECOMPUTE), steps=2).peak_bytes)

    began = time.perf_counter()
    best = planned("mcap_bf")
    found = [("mcap_bf", best, comb(layers - 1, DEVICES - 1), time.perf_counter() - began)]
    lowest = true_peak(planned("exact"))
    for seed in range(seeds):
        began = time.perf_counter()
        values = estimates(costs, layers, DEVICES, seed=seed)
        edges = min(values, key=lambda edges: (values[edges], edges))
        found.append((f"mcap_bo {seed}", edges, len(values), time.perf_counter() - began))
    return [
        Row(
            model=model,
            search=search,
            looked_at=looked_at,
            split=tuple(stop - start for start, stop in pairwise(edges)),
            estimated_bytes=highest(costs, edges),
            over=highest(costs, edges) / highest(costs, best),
            true_over=true_peak(edges) / lowest,
            seconds=seconds,
        )
        for search, edges, looked_at, seconds in found
    ]


def highest(costs: AdditiveCosts, edges: Edges) -> int:
    """The estimated peak of the fullest device."""
    return max(costs.peak(*stage) for stage in pairwise(edges))


def line(row: Row) -> str:
    """One line of the table."""
    return (
        f"{row.model:10} {row.search:10} {row.looked_at:9,} {'-'.join(map(str, row.split)):>13} "
        f"{row.estimated_bytes / 2**30:12.2f} {row.over:7.4f} {row.true_over:9.4f} {row.seconds:7.1f}"
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    print(" ".join(COLUMNS))
    found: list[Row] = []
    for model in MODELS:
        for row in rows(*model, seeds=asked.seeds):
            print(line(row), flush=True)
            found.append(row)
    if asked.json is not None:
        document = {"machine": machine(), "rows": [asdict(row) for row in found]}
        asked.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
