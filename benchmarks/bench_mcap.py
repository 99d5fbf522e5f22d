"""Claim: mCAP's Bayesian optimisation finds what its brute force finds, by its own predictor (mCAP, section 3.4).

The two searches as the paper runs them, over the two numbers a layer of incremental runs: VGG-11 with mCAP's batch and
AmoebaNet-D(36, 544), each on four devices, with torchgpipe's schedule and default recomputation. Runs are simulated:
their peaks are those of real ones. Three seeds of the optimisation, 75 evaluations each.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/bench_mcap.py [--seeds N] [--json FILE]

Two minutes. "over" is the estimated peak of the fullest device against that of brute force; "true over" the same of
true peaks against those of `exact`: what the predictor costs, whoever searches.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from math import comb
from pathlib import Path

from measured_on import machine
from partitioners import SCHEDULES, Edges, Setting, outcome, planned, simulated_additive_costs
from pipefit.cluster import Cluster
from pipefit.planner.mcap_bo import estimates
from pipefit.profiler import profile
from pipefit.profiles import AdditiveCosts
from pipefit.training import Training
from pipefit.zoo import build

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


def setting(model: str, options: dict[str, int], size: int, microbatches: int) -> Setting:
    """A model of the paper and its training, on devices of ample memory."""
    task = build(model, **options)
    return Setting(
        task=task,
        profile=profile(task, microbatch_size=size, target="cuda"),
        cluster=Cluster.emulated((DEVICES, 1 << 50)),
        training=Training(batch_size=size * microbatches, microbatches=microbatches, schedule=SCHEDULES["except_last"]),
        recompute="except_last",
    )


def rows(given: Setting, model: str, seeds: int) -> list[Row]:
    """Brute force, and the optimisation with every seed."""
    costs = simulated_additive_costs(given)
    measured = replace(given, profile=replace(given.profile, additive=costs))
    lowest = outcome(given, planned(given, "exact")).highest_bytes
    layers = len(given.profile.layers)
    began = time.perf_counter()
    best = planned(measured, "mcap_bf")
    found = [("mcap_bf", best, comb(layers - 1, DEVICES - 1), time.perf_counter() - began)]
    for seed in range(seeds):
        began = time.perf_counter()
        values = estimates(costs, layers, DEVICES, seed=seed)
        edges = min(values, key=lambda edges: (values[edges], edges))
        found.append((f"mcap_bo {seed}", edges, len(values), time.perf_counter() - began))
    floor = highest(costs, best)
    return [
        Row(
            model=model,
            search=search,
            looked_at=looked_at,
            split=tuple(stop - start for start, stop in pairwise(edges)),
            estimated_bytes=highest(costs, edges),
            over=highest(costs, edges) / floor,
            true_over=outcome(given, edges).highest_bytes / lowest,
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
        for row in rows(setting(*model), model[0], asked.seeds):
            print(line(row), flush=True)
            found.append(row)
    if asked.json is not None:
        asked.json.write_text(
            json.dumps({"machine": machine(), "rows": [asdict(row) for row in found]}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
