"""How long the simulator takes: a program of 100 layers, 8 stages and 64 microbatches that offloads in every layer.

    PYTHONPATH=src python benchmarks/bench_simulator.py [--json PATH] [--repeat N]

Three readings of each program: the peaks alone, the step time alone (both without a trace), and the whole trace.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from pipefit.plans import Plan
from pipefit.program import Program
from pipefit.schedule import lower
from pipefit.simulator import Costs, Simulation, simulate
from pipelines import equal_profile, make_cluster, make_plan, offload_all

LAYERS, STAGES, MICROBATCHES = 100, 8, 64


def example() -> Plan:
    """The plan that is measured: uneven stages, links of 10 GB/s."""
    profile = equal_profile(
        LAYERS, input_bytes=10**7, output_bytes=10**7, kept_bytes=10**7, forward_seconds=1e-3, backward_seconds=2e-3
    )
    split = [LAYERS // STAGES + (number < LAYERS % STAGES) for number in range(STAGES)]
    return make_plan(profile, split, microbatches=MICROBATCHES, cluster=make_cluster(STAGES, bytes_per_second=1e10))


def best_seconds(work: Callable[[], object], repeat: int) -> float:
    """The shortest of `repeat` runs."""
    times = []
    for _ in range(repeat):
        start = perf_counter()
        work()
        times.append(perf_counter() - start)
    return min(times)


def measure(name: str, plan: Plan, program: Program, repeat: int) -> list[dict[str, str | int | float]]:
    """One row per reading."""
    actions, costs = sum(map(len, program.actions)), Costs.of(plan)
    readings: dict[str, Callable[[], object]] = {
        "peaks": lambda: Simulation(plan, program=program, costs=costs).peak_bytes,
        "peaks and seconds": lambda: _figures(Simulation(plan, program=program, costs=costs)),
        "trace": lambda: simulate(plan, program=program),
    }
    rows: list[dict[str, str | int | float]] = []
    for reading, run in readings.items():
        seconds = best_seconds(run, repeat)
        rows.append(
            {
                "program": name,
                "reading": reading,
                "actions": actions,
                "seconds": seconds,
                "us_per_action": seconds / actions * 1e6,
            }
        )
    return rows


def _figures(simulation: Simulation) -> tuple[object, object]:
    return simulation.peak_bytes, simulation.step_seconds


def main() -> None:
    """Print the table; with --json, write it too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    plan = example()
    rows = measure("plain 1f1b", plan, lower(plan), options.repeat)
    rows += measure("offload in every layer", plan, offload_all(plan), options.repeat)
    for row in rows:
        print(
            "{program:24} {reading:18} {actions:6} actions  {seconds:.4f} s  {us_per_action:.2f} us per action".format(
                **row
            )
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
