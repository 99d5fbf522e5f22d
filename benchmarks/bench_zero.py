"""Claim: ZeRO-Offload and ZeRO-Infinity are plans, and train the GPTs of the MPress paper slower than `mpress` and
`joint` do, or do not fit.

GPT of 5.3 to 25.5 billion parameters, batches of 64 samples, on a DGX-1 and a DGX-2 with the caps of `bench_mpress.py`.
Plans are written by hand: one stage on all eight devices, in replicas that divide gradients and more, in a bucket for
each block. Both with all kept for the backward, and with every block recomputed:

    offload     replicas have all parameters; the host has the optimizer state, and updates (ZeRO-Offload)
    infinity    they divide parameters too. Either these stay on the devices, and the host updates; or parameters and
                optimizer state are at the host, and each bucket comes for what needs it, its update too

The head has a weight of its own, as no bucket ends between layers that share one: 4 % more parameters in the smallest.
The real ZeRO-Infinity has parameters and the update at the host, which a plan cannot say of one layer yet. Each has the
size of microbatches, 1 to 8 samples for a device, that is the fastest of those that fit.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/bench_zero.py [--only WORD ...] [--tables]

Ten minutes on one core. Rows that the JSON has are not made again. `--tables` plans nothing, and puts the table into
docs/compaction.md, beside the rows of `bench_mpress.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import bench_mpress
from bench_demands import GPT
from bench_mpress import GIB, MACHINES, capped
from measured_on import machine
from page_tables import markdown, put
from pipefit.errors import UsageError
from pipefit.lowering.passes.collectives import bucket_edges
from pipefit.memory.arenas import shortage
from pipefit.models import build
from pipefit.models.gpt import GPT_LAYERS, GptSize
from pipefit.profiler import profile
from pipefit.schema.decisions import Decision, Run, State, StateKind, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid, Sharding, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Simulation

RESULTS = Path(__file__).parent / "results" / "zero.json"
BATCH, DEVICES, SLICES = 64, 8, (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What replicas divide, and what is done with the state of their layers."""

    shard: Sharding
    moves: tuple[tuple[What, StateKind], ...]


WAYS: dict[str, tuple[Way, ...]] = {
    "offload": (Way(shard="gradients", moves=((What.UPDATE, "optimizer"),)),),
    "infinity": (
        Way(shard="parameters", moves=((What.UPDATE, "optimizer"),)),
        Way(shard="parameters", moves=((What.OFFLOAD, "optimizer"), (What.OFFLOAD, "parameters"))),
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the rows that are missing, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(GPT.sizes), choices=GPT.sizes)
    parser.add_argument(
        "--tables", action="store_true", help="put the table of the JSON into the page, plan nothing"
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    rows = json.loads(options.json.read_text(encoding="utf-8"))["rows"] if options.json.exists() else []
    for size in () if options.tables else options.only:
        asked = [
            name
            for name in MACHINES
            if not any((row["machine"], row["size"]) == (name, size) for row in rows)
        ]
        costs = profiled(size) if asked else None
        for name in asked:
            assert costs is not None, "it is asked for"
            for way, plans in WAYS.items():
                rows.append({"machine": name, "size": size, "way": way, **best(by_hand(costs, name, plans))})
                print(rows[-1], flush=True)
            options.json.write_text(
                json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8"
            )
    print(table(rows))
    if options.tables:
        put({"zero": table(rows)})


def profiled(size: GptSize) -> ModelProfile:
    """What a GPT with a head of its own costs at the sizes of all microbatches and slices."""
    shape = {"layers": GPT_LAYERS[size], "hidden": 4096, "heads": 32}
    task = replace(build("gpt", **shape, attention="eager", optimizer="adam"), precision=GPT.precision)
    return profile(task, microbatch_size=sorted({*SLICES, *(DEVICES * one for one in SLICES)}), target="cuda")


def by_hand(costs: ModelProfile, name: str, ways: Sequence[Way]) -> Iterator[Plan]:
    """All plans of these ways, with microbatches of every size, kept and recomputed."""
    devices = tuple(range(DEVICES))
    for way in ways:
        for one in SLICES:
            grid = Grid(devices=devices, data=DEVICES, shard=way.shard, buckets=len(costs.edges) - 1)
            how = Training(
                batch_size=BATCH,
                microbatches=BATCH // (DEVICES * one),
                precision=GPT.precision,
                schedule="1f1b",
            )
            stage = Stage(start=0, stop=len(costs.layers), grid=grid)
            plan = Plan(profile=costs, cluster=capped(name), training=how, stages=(stage,))
            runs = [*pairwise([0, *bucket_edges(plan, 0), len(costs.layers)])]
            moves = [
                Decision(
                    stage=0,
                    subject=State(start=a, stop=b, kind=kind),
                    what=what,
                    place=parse_place("host"),
                    ahead=1,
                )
                for what, kind in way.moves
                for a, b in runs
            ]
            again = [
                Decision(stage=0, subject=Run(start=a, stop=b), what=What.RECOMPUTE) for a, b in runs[:-1]
            ]
            yield replace(plan, decisions=tuple(moves))
            yield replace(plan, decisions=(*moves, *again))


def best(plans: Iterator[Plan]) -> dict[str, Any]:
    """What is told of the fastest plan that fits, or else of the one that lacks the least."""
    found: list[tuple[int, float, int, dict[str, Any]]] = []
    for plan in plans:
        with suppress(UsageError):
            simulation = Simulation(plan)
            short = max(0, *(p - b for p, b in zip(simulation.peak_bytes, plan.cluster.budgets, strict=True)))
            host, seconds = shortage(plan, simulation.arenas), simulation.step_seconds[-1]
            told = {
                "samples_per_second": BATCH / seconds,
                "short_bytes": short,
                "host": host,
                "slice": plan.training.microbatch_size // DEVICES,
                "recomputed": any(one.what is What.RECOMPUTE for one in plan.decisions),
                "away": any(one.what is What.OFFLOAD for one in plan.decisions),
            }
            found.append((short + (1 << 50) * bool(host), seconds, len(found), told))
    return min(found)[-1]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Samples per second of every model, beside `mpress` and `joint`."""
    known = bench_mpress.read(bench_mpress.RESULTS)
    lines = []
    for name in MACHINES:
        for size in GPT.sizes:
            own = {row["way"]: row for row in rows if (row["machine"], row["size"]) == (name, size)}
            if own:
                others = [known[name, f"gpt-{size}", 32, way] for way in ("mpress", "joint")]
                made = [cell(own[way]) for way in WAYS]
                lines.append(
                    (name, f"gpt-{size}", *made, *map(bench_mpress.cell, others), *gains(own, others))
                )
    columns = "machine", "model", *WAYS, "mpress", "joint", "mpress / best ZeRO", "joint / best ZeRO"
    return markdown(columns, lines)


def cell(row: dict[str, Any]) -> str:
    """Samples per second and how, or what is missing."""
    if row["host"]:
        return "the host is too small"
    if row["short_bytes"]:
        return f"short {row['short_bytes'] / GIB:.1f} GiB"
    ways = ["recomputed"] * row["recomputed"] + ["parameters away"] * row["away"]
    return f"{row['samples_per_second']:.2f} ({', '.join([str(row['slice']), *ways])})"


def gains(own: dict[str, dict[str, Any]], others: Sequence[bench_mpress.Row]) -> Iterator[str]:
    """How many times the samples per second of the faster of the ZeRO plans that fit."""
    fastest = max(
        (r["samples_per_second"] for r in own.values() if not r["host"] and not r["short_bytes"]), default=0.0
    )
    for row in others:
        yield (
            f"{row.samples_per_second / fastest:.2f}"
            if row.fits and row.samples_per_second and fastest
            else ""
        )


if __name__ == "__main__":
    main()
