"""Claim: at mCAP's own scale the split alone makes room for at least 1.55 times the parameters that torchgpipe fits.

AmoebaNet-D(36, F) with the average pools of torchgpipe's benchmark, which mCAP measured: batch 32 = 4 x 8, GPipe, SGD
with momentum, four devices of 24 GB. Memory follows the kernels of CUDA; nothing but torchgpipe's timing is run for
real. For each setting of recomputation - torchgpipe's three, `except_last` its default, in torchgpipe's own order of
backwards; ours, `except_one`, in ours (`partitioners.py`) - and every partitioner:

    at F = 544    the split, the peak of the fullest device and the standard deviation over devices, to the byte;
                  throughput, simulated from the data sheet's figures. mCAP's paper: peak 35 % below torchgpipe's.
    largest F     of the multiples of 8, by bisection over plans, and its parameters. A dry run of this F shows that it
                  fits, one of the next F that it does not. mCAP's paper: 3.61 B against 2.32 B, 1.55 times as many.

The partitioners: `exact` is ours; `bisection`, `bayesian` and `additive` are the papers', the first two with our
predictor, the third with mCAP's, whose incremental runs are simulated here without a cap; the others are baselines.

torchgpipe's `balance_by_time` times each layer on this machine's CPU, at F = 544 only: at the largest F it would need
more memory than such a machine has. Of three measurings each layer's median is taken, and the split is used at every F.
It is given a microbatch of eight samples, as is trained; of one sample, a row of its own, a CPU spends the time on
reading weights, and the split is another one each time. What each measuring alone would have led to is in the JSON, and
the same at F = 256. Whatever the noise, `time` splits times modelled for the GPU, exactly; ratios are taken against
torchgpipe and against the best of all baselines. `bayesian` takes a minute a split: it, too, is asked at F = 544 only.

    PYTHONPATH=src python benchmarks/bench_amoebanet.py [--processes 2] [--times FILE] [--skip-bayesian] [--no-certify]
        [--json FILE]

Forty minutes on two cores, most of it for dry runs. The seconds that `exact` takes are those of its whole search:
profiles, plans and both dry runs, in one process, with nothing known before. `--no-certify` takes a quarter of the time
and believes the plans; `--times` reads torchgpipe's measurings from the JSON of an earlier run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from amoebanet_job import Job
from measured_on import machine
from partitioners import (
    BAYESIAN,
    OURS,
    PREDICTING,
    SCHEDULES,
    TORCHGPIPE,
    Edges,
    Setting,
    Splitter,
    lengths,
    median_splits,
    outcome,
    plan_at,
    planned,
    splits_of_times,
    splitters,
)
from pipefit.largest.growth import Growth, setting
from pipefit.largest.search import find
from pipefit.lowering.passes.recomputation import Recompute
from pipefit.planner import Answer
from pipefit.profiler.on_demand import OnDemand
from pipefit.runtime import certify
from pipefit.schema.fit import Attempt, Fit
from pipefit.schema.json_io import load_cluster
from pipefit.schema.plan import Prediction
from pipefit.schema.profile import ModelProfile
from pipefit.tables import Table, plain
from torchgpipe_balance import torchgpipe_times

FILTERS, SMALLER = 544, 256  # where splits are compared; where torchgpipe measures, too
MEASURINGS = 3
ONE_SAMPLE = "torchgpipe, one sample"

Costs = Callable[[int], ModelProfile]  # by filters
Each = Callable[..., Iterable[Any]]  # `map`, or the same in several processes
Edge = tuple[Attempt, Attempt]  # the largest F that fits, and the next one, which does not


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """A partitioner's split at one F."""

    partitioner: str
    split: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    deviation_bytes: int
    peak_to_torchgpipe: float
    samples_per_second: float
    throughput_to_torchgpipe: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest F under a partitioner. Bytes are the fullest device's at this F and the next one, in their dry runs
    or else in their plans.
    """

    partitioner: str
    filters: int
    parameters: int
    split: tuple[int, ...]
    need_bytes: int
    next_need_bytes: int
    certified: bool  # by dry runs: this one fits, and the next one does not
    off_plan_bytes: int | None  # largest difference between a dry run and its plan, on any device
    ours_to_this: float  # of parameters


class Comparison(NamedTuple):
    """All partitioners under one setting of recomputation. The seconds are those of our search for the largest, where
    it was certified.
    """

    balance: list[Balance]
    largest: list[Largest]
    our_seconds: float | None


def compare(
    job: Job,
    filters: int,
    recompute: Recompute,
    chosen: Mapping[str, Splitter],
    costs: Costs,
    *,
    once: Iterable[str] = (),
    certify: bool = True,
    each: Each = map,
) -> Comparison:
    """Both tables. Those partitioners that are asked `once` have the split of so many filters at every F."""
    given = job.setting(costs(filters), filters, recompute)
    edges = {name: split(given) for name, split in chosen.items()}
    asked = {name: fixed(edges[name]) if name in once else split for name, split in chosen.items()}
    if not certify:
        found = {name: searched(job, recompute, split, costs) for name, split in asked.items()}
        return Comparison(balance(given, edges), largest(found), None)
    began = time.perf_counter()
    ours = edge_of(find(setting("filters", job.task, job.demand(recompute), job.values)))
    our_seconds = time.perf_counter() - began
    found = {
        name: ours if name == OURS else searched(job, recompute, split, costs)
        for name, split in asked.items()
    }
    return Comparison(balance(given, edges), largest(certified(found, job, each)), our_seconds)


def fixed(edges: Edges) -> Splitter:
    """The same split of whatever is asked."""
    return lambda _: edges


def searched(job: Job, recompute: Recompute, split: Splitter, costs: Costs) -> Edge:
    """The edge under the plans of one partitioner."""

    def plan(_: OnDemand, filters: int, _ranks: Sequence[int]) -> Answer:
        given = job.setting(costs(filters), filters, recompute)
        edges = split(given)
        return Answer(
            replace(plan_at(given, edges), prediction=Prediction(**outcome(given, edges)._asdict()))
        )

    def profiles(filters: int) -> OnDemand:
        return OnDemand(job.task(filters), target=job.target)

    growth = Growth(
        name="filters", sense="largest", values=job.values, task=job.task, profiles=profiles, plan=plan,
        soon=lambda *_: None, searches=False, impossible=lambda *_: "", searched="Tried: splits of one partitioner.",
    )  # fmt: skip
    return edge_of(find(growth, certify=False))


def edge_of(fit: Fit) -> Edge:
    """The largest that fits and the next one."""
    assert fit.beyond is not None  # the values go beyond what any device holds
    return fit.best, fit.beyond


def balance(given: Setting, edges: Mapping[str, Edges]) -> list[Balance]:
    """The rows of one F."""
    found = {name: outcome(given, of) for name, of in edges.items()}
    reference = found[TORCHGPIPE]
    return [
        Balance(
            partitioner=name,
            split=lengths(edges[name]),
            peak_bytes=its.peak_bytes,
            deviation_bytes=round(its.deviation_bytes),
            peak_to_torchgpipe=its.highest_bytes / reference.highest_bytes,
            samples_per_second=given.training.batch_size / its.step_seconds,
            throughput_to_torchgpipe=reference.step_seconds / its.step_seconds,
        )
        for name, its in found.items()
    ]


def certified(found: Mapping[str, Edge], job: Job, each: Each) -> dict[str, Edge]:
    """The same with a dry run of every plan; equal plans are run once, and those that were run are not run again."""
    attempts = {place(attempt): attempt for edge in found.values() for attempt in edge}
    peaks = {
        place(a): a.certified_bytes for edge in found.values() for a in edge if a.certified_bytes is not None
    }
    missing = [attempt for of, attempt in attempts.items() if of not in peaks]
    runs = each(certify, [job.task(a.value) for a in missing], [a.plan for a in missing])
    peaks |= {place(attempt): run.peak_bytes for attempt, run in zip(missing, runs, strict=True)}
    return {
        name: (
            replace(best, certified_bytes=peaks[place(best)]),
            replace(beyond, certified_bytes=peaks[place(beyond)]),
        )
        for name, (best, beyond) in found.items()
    }


def place(attempt: Attempt) -> tuple[int, tuple[int, ...]]:
    """F and split: the rest is the same under one setting of recomputation."""
    return attempt.value, attempt.plan.split


def off_plan(edge: Edge) -> int | None:
    """By how much dry runs differ from their plans on the device where they differ most; None: there were none."""
    pairs = [(attempt.certified_bytes, attempt.plan.prediction) for attempt in edge]
    known = [(peaks, plan.peak_bytes) for peaks, plan in pairs if peaks is not None and plan is not None]
    return max((abs(a - b) for pair in known for a, b in zip(*pair, strict=True)), default=None)


def largest(found: Mapping[str, Edge]) -> list[Largest]:
    """The rows of the largest F."""
    return [
        Largest(
            partitioner=name,
            filters=best.value,
            parameters=best.parameters,
            split=best.plan.split,
            need_bytes=best.need_bytes,
            next_need_bytes=beyond.need_bytes,
            certified=off_plan((best, beyond)) is not None and best.fits and not beyond.fits,
            off_plan_bytes=off_plan((best, beyond)),
            ours_to_this=found[OURS][0].parameters / best.parameters,
        )
        for name, (best, beyond) in found.items()
    ]


def summarised(found: Comparison) -> dict[str, Any]:
    """Ours to torchgpipe's, and to that of the baseline that is best at the very thing."""
    balanced = {row.partitioner: row for row in found.balance}
    sizes = {row.partitioner: row for row in found.largest}
    baselines = [name for name in balanced if name not in PREDICTING]
    emptiest = min(baselines, key=lambda name: balanced[name].peak_to_torchgpipe)
    strongest = min(baselines, key=lambda name: sizes[name].ours_to_this)
    ours = balanced[OURS]
    return {
        "parameters_to_torchgpipe": sizes[TORCHGPIPE].ours_to_this,
        "parameters_to_best_baseline": sizes[strongest].ours_to_this,
        "best_baseline_by_parameters": strongest,
        "peak_to_torchgpipe": ours.peak_to_torchgpipe,
        "peak_to_best_baseline": ours.peak_to_torchgpipe / balanced[emptiest].peak_to_torchgpipe,
        "best_baseline_by_peak": emptiest,
        "throughput_to_torchgpipe": ours.throughput_to_torchgpipe,
        "throughput_to_best_baseline_by_peak": ours.samples_per_second
        / balanced[emptiest].samples_per_second,
        "search_seconds": found.our_seconds,
    }


def measure(job: Job) -> dict[tuple[int, int], list[list[int]]]:
    """torchgpipe's microseconds of every layer, several times over, by F and samples."""
    kinds = ((FILTERS, job.microbatch_size), (FILTERS, 1), (SMALLER, job.microbatch_size))
    return {
        (filters, samples): [torchgpipe_times(job.task(filters), samples=samples) for _ in range(MEASURINGS)]
        for filters, samples in kinds
    }


def measured_before(path: Path) -> dict[tuple[int, int], list[list[int]]]:
    """The same, from the JSON of an earlier run."""
    found = json.loads(path.read_text())["torchgpipe"]
    return {(of["filters"], of["samples"]): [one["microseconds"] for one in of["measurings"]] for of in found}


def alone(job: Job, times: list[int], costs: Costs) -> dict[str, Any]:
    """What torchgpipe makes of one measuring: its split, and the largest F by plans."""
    edges = splits_of_times(times, len(job.cluster.devices)).own
    best = {recompute: searched(job, recompute, fixed(edges), costs)[0] for recompute in SCHEDULES}
    return {
        "microseconds": times,
        "split": lengths(edges),
        "largest": {
            recompute: {"filters": of.value, "parameters": of.parameters} for recompute, of in best.items()
        },
    }


# -------------------------------------------------------------------- printing


def balance_table(recompute: str, filters: int, rows: Iterable[Balance]) -> Table:
    """The splits at one F."""
    cells = {
        "partitioner": [row.partitioner for row in rows],
        "split": ["-".join(map(str, row.split)) for row in rows],
        "peak GB": [f"{max(row.peak_bytes) / 1e9:.3f}" for row in rows],
        "deviation GB": [f"{row.deviation_bytes / 1e9:.3f}" for row in rows],
        "peak to torchgpipe's": [f"{row.peak_to_torchgpipe - 1:+.1%}" for row in rows],
        "samples/s": [f"{row.samples_per_second:.2f}" for row in rows],
        "samples/s to torchgpipe's": [f"{row.throughput_to_torchgpipe - 1:+.1%}" for row in rows],
    }
    return table(f"recompute {recompute}, F = {filters}", cells)


def largest_table(recompute: str, rows: Iterable[Largest]) -> Table:
    """The largest F."""
    cells = {
        "partitioner": [row.partitioner for row in rows],
        "largest F": [str(row.filters) for row in rows],
        "1e9 parameters": [f"{row.parameters / 1e9:.3f}" for row in rows],
        "split": ["-".join(map(str, row.split)) for row in rows],
        "GB": [f"{row.need_bytes / 1e9:.3f}" for row in rows],
        "of the next F": [f"{row.next_need_bytes / 1e9:.3f}" for row in rows],
        "by": ["dry run" if row.certified else "plan" for row in rows],
        "ours to this": [f"{row.ours_to_this:.2f}" for row in rows],
    }
    return table(f"recompute {recompute}, the largest F", cells)


def summary_table(summary: Mapping[str, Mapping[str, Any]]) -> Table:
    """Ours against torchgpipe, and against the best baseline."""
    rows = summary.values()
    cells = {
        "recompute": list(summary),
        "parameters": [f"{of['parameters_to_torchgpipe']:.2f}" for of in rows],
        "to the best": [
            f"{of['parameters_to_best_baseline']:.2f} ({of['best_baseline_by_parameters']})" for of in rows
        ],
        "peak": [f"{of['peak_to_torchgpipe'] - 1:+.1%}" for of in rows],
        "to the lowest": [
            f"{of['peak_to_best_baseline'] - 1:+.1%} ({of['best_baseline_by_peak']})" for of in rows
        ],
        "samples/s": [f"{of['throughput_to_torchgpipe'] - 1:+.1%}" for of in rows],
        "to the same": [f"{of['throughput_to_best_baseline_by_peak'] - 1:+.1%}" for of in rows],
        "search s": ["-" if of["search_seconds"] is None else f"{of['search_seconds']:.0f}" for of in rows],
    }
    return table("ours to torchgpipe's, and to the best baseline's", cells)


def table(title: str, cells: Mapping[str, list[str]]) -> Table:
    """Of columns by their headings."""
    return Table(tuple(cells), tuple(zip(*cells.values(), strict=True)), title)


# -------------------------------------------------------------------- running


def papers_job() -> Job:
    """That of mCAP's paper."""
    return Job(
        cluster=load_cluster("4x-titan-rtx").reserving([0] * 4),  # torchgpipe leaves nothing either
        layers=36,
        image_size=224,
        microbatches=4,
        microbatch_size=8,
        values=range(64, 3001, 8),
        target="cuda",
    )


def run(job: Job, options: argparse.Namespace, each: Each) -> dict[str, Any]:
    """All comparisons, printed as they come; what there is to write."""
    began, devices = time.perf_counter(), len(job.cluster.devices)
    measured = measure(job) if options.times is None else measured_before(options.times)
    torchgpipe, one = (median_splits(measured[FILTERS, size], devices) for size in (job.microbatch_size, 1))
    slow: dict[str, Splitter] = (
        {} if options.skip_bayesian else {BAYESIAN: partial(planned, planner=BAYESIAN)}
    )
    chosen = splitters(lambda _: torchgpipe) | {ONE_SAMPLE: fixed(one.own)} | slow
    costs, rows, summary = cache(job.profile), {}, {}
    for recompute in SCHEDULES:
        found = compare(
            job,
            FILTERS,
            recompute,
            chosen,
            costs,
            once=(BAYESIAN,),
            certify=not options.no_certify,
            each=each,
        )
        tables = [balance_table(recompute, FILTERS, found.balance), largest_table(recompute, found.largest)]
        print(plain(tables), end="\n\n", flush=True)
        rows[recompute] = {"balance": [*map(asdict, found.balance)], "largest": [*map(asdict, found.largest)]}
        summary[recompute] = summarised(found)
    every = [row for of in rows.values() for row in of["largest"]]
    return {
        "summary": summary,
        "totals": {
            "rows": len(every),
            "certified": sum(row["certified"] for row in every),
            "equal_to_plans": sum(row["off_plan_bytes"] == 0 for row in every),
            "largest_off_plan_bytes": max((row["off_plan_bytes"] or 0 for row in every), default=0),
            "seconds": time.perf_counter() - began,
        },
        "torchgpipe": [
            {"filters": filters, "samples": samples, "measurings": [alone(job, of, costs) for of in times]}
            for (filters, samples), times in measured.items()
        ],
        "rows": rows,
    }


def main() -> None:
    """Run, print, and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--processes", type=int, default=2, help="for dry runs")
    parser.add_argument("--times", type=Path, help="torchgpipe's measurings: the JSON of an earlier run")
    parser.add_argument("--skip-bayesian", action="store_true", help="leave out Bayesian optimisation")
    parser.add_argument("--no-certify", action="store_true", help="believe the plans; no dry runs")
    parser.add_argument("--json", type=Path, help="write all rows, ratios, seconds and the machine here")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        found = run(papers_job(), options, pool.map)
    totals = found["totals"]
    print(plain([summary_table(found["summary"])]))
    for of in found["torchgpipe"]:
        splits = [single["split"] for single in of["measurings"]]
        print(f"torchgpipe at F = {of['filters']}, {of['samples']} samples, of each measuring: {splits}")
    print(
        f"{totals['certified']} of {totals['rows']} largest F certified; dry runs equal to their plans on every device "
        f"in {totals['equal_to_plans']}, off by at most {totals['largest_off_plan_bytes']} bytes; "
        f"{totals['seconds']:.0f} s in all"
    )
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine()} | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
