"""Claim: `exact` finds the lowest peak there is, proven, in about the time of a heuristic; the heuristics may miss it.

Five searches of the same splits by the same peaks: `exact`; mCAP's brute force, where it has no more splits than it
tries; CAPSlog's bisection; mCAP's Bayesian optimisation with the paper's settings; and `best_split`, dynamic
programming over any predictor, here ours. The questions: VGG-11 and AmoebaNet-D(36, 544) with mCAP's batches and two
models of 96 layers, under GPipe and 1F1B; and four kinds of made-up chain (`tests/support/synthetic_models.py`) under
1F1B with four microbatches for each device.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/bench_search.py [--skip SEARCH ...] [--bayesian N] [--json FILE]

Ten minutes, half of them for `bayesian`, which is asked the first N questions of every size, with one seed. Peaks are
the simulator's, over two steps. "over optimum" is the fullest device's against that of `exact`; "all as low" says
whether all devices have the peaks of `exact`, which makes the next fullest device as empty as can be, too, and so on.
Seconds are the CPU's, in one thread, the least of as many runs as fit in two seconds, at most a hundred: "search" is
the search alone, "plan" the whole call, which checks the question and simulates the answer's step time. What is looked
at are candidate stages in `exact` and `bisection`, whole splits in the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from math import comb
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from measured_on import machine
from pipefit.models import build
from pipefit.planner import PLANNERS, PlannerResult, Question, best_split, solved, true_peaks
from pipefit.planner.baselines.simple import LIMIT
from pipefit.profiler import profile
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Measurement, ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from support import synthetic_models

SIZES = ((30, 4), (42, 4), (64, 8), (96, 16), (1000, 64))
CHAINS = (*((kind, seed) for kind in ("random", "skewed") for seed in range(3)), ("alike", 0), ("heavy", 0))
SEARCHES = ("exact", "exhaustive", "bisection", "bayesian", "best_split")  # all but the last are planners
REPEATS, ENOUGH = 100, 2.0  # runs of one search at most, and seconds in which no other is begun


class Real(NamedTuple):
    """A model of the zoo, the size that it has, and how it is trained."""

    size: tuple[int, int]
    model: str
    settings: dict[str, int]
    microbatch_size: int
    microbatches: int


REAL = (
    Real((30, 4), "vgg11", {}, 92, 12),
    Real((42, 4), "amoebanet", {"layers": 36, "filters": 544}, 8, 4),
    Real((96, 16), "amoebanet", {"layers": 90, "filters": 544}, 8, 32),
    Real((96, 16), "gpt", {"layers": 93}, 1, 64),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One question to all searches."""

    name: str
    profile: ModelProfile
    devices: int
    training: Training

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.profile.layers)

    @property
    def cluster(self) -> Cluster:
        """Devices on which everything fits."""
        return Cluster.emulated((self.devices, 1 << 50))

    @property
    def splits(self) -> int:
        """How many there are."""
        return comb(self.layers - 1, self.devices - 1)


class Answer(NamedTuple):
    """What a search found, and what it took."""

    edges: tuple[int, ...]  # stage s holds layers edges[s] to edges[s + 1] - 1
    seconds: float
    plan_seconds: float | None
    looked_at: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; without seconds, the search was not run, for the reason given."""

    model: str
    schedule: str
    layers: int
    devices: int
    search: str
    seconds: float | None = None
    plan_seconds: float | None = None
    looked_at: int | None = None
    peak_bytes: int | None = None
    over_optimum: float | None = None
    all_as_low: bool | None = None
    why_not: str = ""


def main() -> None:
    """Print both tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--skip", nargs="+", choices=SEARCHES[1:], default=[], help="searches to leave out")
    parser.add_argument(
        "--bayesian", type=int, default=2, help="questions of every size for Bayesian optimisation"
    )
    parser.add_argument("--json", type=Path, help="write summary, versions and rows here")
    options = parser.parse_args()
    rows: list[Row] = []
    print(HEADINGS)
    for layers, devices in SIZES:
        for number, case in enumerate(cases(layers, devices)):
            skip = options.skip if number < options.bayesian else [*options.skip, "bayesian"]
            for row in compared(case, skip):
                rows.append(row)
                print(line(row), flush=True)
    summary = summarise(rows)
    print(f"\n{SUMMARY_HEADINGS}", *map(summary_line, summary), sep="\n")
    if options.json is not None:
        document = {"machine": machine(), "summary": summary, "rows": [asdict(row) for row in rows]}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")


# -------------------------------------------------------------------- questions


def cases(layers: int, devices: int) -> Iterator[Case]:
    """The real models of that size, each under both schedules, and the chains."""
    for real in REAL:
        if real.size == (layers, devices):
            yield from zoo_cases(real)
    for chain, seed in CHAINS:
        yield chain_case(chain, layers, devices, seed)


def zoo_cases(real: Real) -> Iterator[Case]:
    """The model under GPipe and under 1F1B, with kernels of CUDA."""
    costs = profile(build(real.model, **real.settings), microbatch_size=real.microbatch_size, target="cuda")
    assert len(costs.layers) == real.size[0]
    for schedule in ("gpipe", "1f1b"):
        batch_size = real.microbatch_size * real.microbatches
        training = Training(batch_size=batch_size, microbatches=real.microbatches, schedule=schedule)
        yield Case(name=real.model, profile=costs, devices=real.size[1], training=training)


def chain_case(chain: str, layers: int, devices: int, seed: int, *, schedule: str = "1f1b") -> Case:
    """A chain with four microbatches for each device."""
    return Case(
        name=f"{chain} {seed}",
        profile=synthetic_models.profile(drawn(chain, layers, Random(seed)), model=chain),
        devices=devices,
        training=synthetic_models.training(schedule, 4 * devices),
    )


def drawn(chain: str, layers: int, rng: Random) -> Measurement:
    """A made-up chain by its name in the tables."""
    match chain:
        case "random":
            return synthetic_models.even(rng, layers)
        case "skewed":
            return synthetic_models.skewed(rng, layers, heaviest=14, spread=1.5)
        case _:
            return synthetic_models.heavy(layers, times=100 if chain == "heavy" else 1)


# -------------------------------------------------------------------- searches


def compared(case: Case, skip: Sequence[str] = ()) -> Iterator[Row]:
    """One row for each search, `exact` first: it is proven, so no other may find less."""
    best: tuple[int, ...] = ()
    for search in SEARCHES:
        row = Row(
            model=case.name,
            schedule=case.training.schedule,
            layers=case.layers,
            devices=case.devices,
            search=search,
            why_not=reason(search, case, skip),
        )
        if not row.why_not:
            found = searched(case, search)
            peaks = descending_peaks(case, found.edges)
            best = best or peaks
            assert peaks >= best, f"{search} finds less than exact"
            assert peaks == best or search not in {"exhaustive", "best_split"}, f"{search} misses the best"
            row = replace(
                row,
                seconds=found.seconds,
                plan_seconds=found.plan_seconds,
                looked_at=found.looked_at,
                peak_bytes=peaks[0],
                over_optimum=peaks[0] / best[0],
                all_as_low=peaks == best,
            )
        yield row


def reason(search: str, case: Case, skip: Sequence[str]) -> str:
    """Why the search is not run; empty where it is."""
    if search in skip:
        return "left out"
    if search == "exhaustive" and case.splits > LIMIT:
        return f"{case.splits:.1e} splits"
    if search == "bayesian" and find_spec("skopt") is None:
        return "scikit-optimize is not installed"
    return ""


def searched(case: Case, search: str) -> Answer:
    """The answer, with the least seconds of several runs."""
    run: Callable[[Case], Answer] = (
        by_predictor if search == "best_split" else lambda of: by_planner(of, search)
    )
    began, found = time.perf_counter(), []
    while not found or (len(found) < REPEATS and time.perf_counter() - began < ENOUGH):
        found.append(run(case))
    whole = [answer.plan_seconds for answer in found if answer.plan_seconds is not None]
    fastest = min(answer.seconds for answer in found)
    return found[0]._replace(seconds=fastest, plan_seconds=min(whole, default=None))


def by_planner(case: Case, planner: str) -> Answer:
    """By a planner, inside the driver that makes a plan of what it finds."""
    spent: list[float] = []

    def timed(question: Question) -> PlannerResult:
        began = time.process_time()
        found = PLANNERS[planner](question)
        spent.append(time.process_time() - began)
        return found

    began = time.process_time()
    question = Question(profile=case.profile, cluster=case.cluster, training=case.training)
    made = solved(question, timed, name=planner)
    took = time.process_time() - began
    assert made.provenance is not None
    edges = (0, *made.boundaries, case.layers)
    return Answer(edges, spent[0], took, made.provenance.evaluated)


def by_predictor(case: Case) -> Answer:
    """By `best_split` over our predictor, whose tables are a part of its time."""
    began = time.process_time()
    edges = best_split(
        true_peaks(case.profile, case.training, stages=case.devices), case.layers, case.devices
    )
    return Answer(edges, time.process_time() - began, None, None)


def descending_peaks(case: Case, edges: Sequence[int]) -> tuple[int, ...]:
    """The peaks of all devices, the fullest first, simulated: no search's own word."""
    stages = tuple(
        Stage(start=a, stop=b, grid=Grid.of(device)) for device, (a, b) in enumerate(pairwise(edges))
    )
    split = Plan(profile=case.profile, cluster=case.cluster, training=case.training, stages=stages)
    return tuple(sorted(Simulation(split, steps=2).peak_bytes, reverse=True))


# -------------------------------------------------------------------- tables

HEADINGS = (
    f"{'model':10} {'schedule':8} {'layers':>6} {'devices':>7}  {'search':10} {'search s':>9} {'plan s':>9} "
    f"{'looked at':>10} {'over optimum':>12}  all as low"
)
SUMMARY_HEADINGS = (
    f"{'layers':>6} {'devices':>7}  {'search':10} {'cases':>5} {'slowest search s':>16} {'slowest plan s':>14} "
    f"{'over optimum, median':>20} {'worst':>7} {'all as low':>10}"
)


def line(row: Row) -> str:
    """One line of the first table."""
    start = f"{row.model:10} {row.schedule:8} {row.layers:6} {row.devices:7}  {row.search:10}"
    if row.seconds is None:
        return f"{start} {'-':>9} ({row.why_not})"
    looked_at = "-" if row.looked_at is None else f"{row.looked_at:,}"
    figures = f"{seconds(row.seconds)} {seconds(row.plan_seconds)} {looked_at:>10} {row.over_optimum:12.4f}"
    return f"{start} {figures}  {'yes' if row.all_as_low else 'no'}"


def seconds(value: float | None) -> str:
    """Nine characters."""
    return f"{'-' if value is None else format(value, '.4f'):>9}"


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For every size and search that was run: the slowest case, and how far from the optimum."""
    summary = []
    for size in dict.fromkeys((row.layers, row.devices) for row in rows):
        for search in SEARCHES:
            own = [
                r
                for r in rows
                if (r.layers, r.devices, r.search) == (*size, search) and r.seconds is not None
            ]
            if own:
                summary.append(totals(own))
    return summary


def totals(rows: Sequence[Row]) -> dict[str, Any]:
    """One line of the summary."""
    over = [row.over_optimum for row in rows if row.over_optimum is not None]
    whole = [row.plan_seconds for row in rows if row.plan_seconds is not None]
    return {
        "layers": rows[0].layers,
        "devices": rows[0].devices,
        "search": rows[0].search,
        "cases": len(rows),
        "slowest_search_seconds": max(row.seconds for row in rows if row.seconds is not None),
        "slowest_plan_seconds": max(whole, default=None),
        "median_over_optimum": median(over),
        "worst_over_optimum": max(over),
        "all_as_low": sum(row.all_as_low is True for row in rows),
    }


def summary_line(of: dict[str, Any]) -> str:
    """One line of the second table."""
    return (
        f"{of['layers']:6} {of['devices']:7}  {of['search']:10} {of['cases']:5} "
        f"{seconds(of['slowest_search_seconds']):>16} {seconds(of['slowest_plan_seconds']):>14} "
        f"{of['median_over_optimum']:20.4f} {of['worst_over_optimum']:7.4f} {of['all_as_low']:10}"
    )


if __name__ == "__main__":
    main()
