"""The peak of the fullest device, and a step's seconds, of planners that may put stages on several devices.

    python benchmarks/bench_grids.py [--models gpt bert ...] [--devices 4 8 ...] [--json FILE] [--tables]

Models of several kinds train a batch of 128 samples on 4 to 64 A100 of 40 GB, eight to a host (NVLink inside, 25 GB/s
between hosts), in float32. Profiles are fake ones for CUDA, at all powers of two up to the number of devices. Every
planner has the same batch, schedule and devices, and each chooses the microbatch size too, by what it minimises itself:

    capture        lowest peak as CAPTURE predicts it, blind to what 1F1B releases early
    capture early  the same with runs of as many microbatches as a stage holds
    alpa           fewest seconds by Alpa's formula; memory only decides what fits
    megatron       equal stages, the same replicas for all: the fastest combination that fits, simulated
    deepspeed      equal parameters, the same replicas for all: the fastest combination that fits, simulated
    peak           pipefit's exact search for the lowest peak, of plans that keep everything on the devices
    lean           pipefit's lowest peak with state at hosts where that lowers it
    throughput     pipefit's fastest plan of any degrees (`planner.mixed_degrees`), simulated

and plans written by hand, which put one stage on all devices, in replicas that sum in a bucket for each block, with the
microbatch size that is the fastest of those that fit, and, as `lean`, with the one of the lowest peak:

    fsdp           replicas divide parameters, gradients and optimizer state
    offload        they divide gradients and optimizer state, which the host has and updates (ZeRO-Offload)
    infinity       they divide all, and parameters and optimizer state are at the host, from which they come and to
                   which they go, a bucket after the other (ZeRO-Infinity, but for the update, which is the device's)

Peaks and seconds of all plans are the same simulator's. `seconds` are CPU seconds of the search, without profiles, and
`memory_bytes` what the process had allocated at most by then. What the JSON has is not made again, so that planners may
be run one by one (`--planners`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any, NamedTuple

from measured_on import machine
from page_tables import markdown, put
from pipefit import models
from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.lowering.passes.collectives import bucket_edges
from pipefit.memory.arenas import shortage
from pipefit.models.hugging_face import hf
from pipefit.planner import PlanOptions, Question, alpa, capture, exact, lean, parameters, uniform
from pipefit.planner.baselines.capture import CaptureOptions
from pipefit.planner.mixed_degrees import mixed
from pipefit.planner.problem import Planner, PlannerResult, Split, divisors, plan_of
from pipefit.planner.replicas import in_replicas
from pipefit.profiler import profile
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, State, StateKind, What
from pipefit.schema.devices import parse_place
from pipefit.schema.grids import Grid, Sharding, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Simulation

RESULTS = Path(__file__).parent / "results" / "grids.json"
PAGE = Path(__file__).parents[1] / "docs" / "planners" / "capture.md"
GIB = 1 << 30
BATCH = 128
LARGE = {"layers": 24, "hidden": 1024, "heads": 16}
MODELS: dict[str, Callable[[], Task]] = {
    "gpt": lambda: models.build("gpt", **LARGE, sequence=512),
    "bert": lambda: models.build("bert", **LARGE, sequence=512),
    "wide resnet": lambda: models.build("resnet", width=160),
    "u-net": lambda: models.build("unet"),
    "amoebanet": lambda: models.build("amoebanet", layers=18, filters=256),
    "encoder-decoder": lambda: hf("t5", num_layers=12, d_model=768, d_ff=3072, num_heads=12, sequence=256),
    "experts": lambda: hf(
        "mixtral", num_hidden_layers=8, hidden_size=512, intermediate_size=1792, num_attention_heads=8,
        num_key_value_heads=4, num_local_experts=8, vocab_size=32000, sequence=256,
    ),
}  # fmt: skip


class Row(NamedTuple):
    """What one planner's plan needs."""

    planner: str
    peak_bytes: int
    step_seconds: float
    fits: bool
    stages: list[str]
    microbatch_size: int
    recomputed: int  # runs of layers
    seconds: float
    memory_bytes: int


def cluster(devices: int) -> Cluster:
    """So many A100 of 40 GB on hosts of eight, of which two share a link to their host."""
    hosts = -(-devices // 8)
    groups = [range(8 * host, min(8 * host + 8, devices)) for host in range(hosts)]
    kind = 'kinds.a100 = { flops = { float32 = 19.5e12 }, memory_bandwidth = "1555GB/s" }'
    text = [f'name = "a100s"\nbackend = "cuda"\n{kind}\n']
    text += [
        f'[[devices]]\ncount = {len(group)}\nkind = "a100"\nmemory = "40339MiB"\nhost = {host}\n'
        for host, group in enumerate(groups)
    ]
    text += ['[[hosts]]\nmemory = "948GB"\nmemory_bandwidth = "409.6GB/s"\n' for _ in groups]
    for group in groups:
        near = f"device{group[0]}-{group[-1]}" if len(group) > 1 else f"device{group[0]}"
        text.append(
            f'[[links]]\nmembers = ["{near}"]\nbytes_per_second = "258GB/s"\nlatency_seconds = 1e-5\n'
        )
        for first in group[::2]:
            pair = f"device{first}-{first + 1}" if first + 1 in group else f"device{first}"
            text.append(
                f'[[links]]\neach = "{pair}"\nto = "host{first // 8}"\nbytes_per_second = "24.8GB/s"\n'
                f'latency_seconds = 1e-5\nwire = "pcie{first // 2}"\n'
            )
    if hosts > 1:
        text.append('[[links]]\nmembers = ["device*"]\nbytes_per_second = "25GB/s"\nlatency_seconds = 2e-5\n')
    return Cluster.parse("\n".join(text))


def questions(costs: ModelProfile, on: Cluster, schedule: str) -> list[Question]:
    """One for every microbatch size."""
    return [
        Question(
            profile=costs,
            cluster=on,
            training=Training(batch_size=BATCH, microbatches=BATCH // one.microbatch_size, schedule=schedule),
        )
        for one in costs.measurements
    ]


def chosen(planner: Planner, asked: list[Question]) -> Plan:
    """The plan with the lowest value over all sizes."""
    found: list[tuple[float, int, PlannerResult]] = []
    for number, question in enumerate(asked):
        with suppress(UsageError):
            made = planner(question)
            found.append((made.value, number, made))
    _, number, best = min(found, key=lambda one: one[:2])
    return plan_of(asked[number], best.split, decisions=best.decisions)


def fixed(planner: Planner, asked: list[Question]) -> Plan:
    """The fastest combination of microbatch size, number of replicas and number of stages that fits."""
    return quickest(pinned for question in asked for pinned in equal(planner, question))


def equal(planner: Planner, question: Question) -> Iterator[Plan]:
    """The plans of a planner with the same replicas for all stages, on as many stages as there are devices for."""
    devices = len(question.cluster.devices)
    for data in divisors(question.training.microbatch_size, devices):
        options = PlanOptions(data=data, stages=min(question.blocks, devices // data), shard="none")
        with suppress(UsageError):
            pinned = replace(question, options=options)
            yield plan_of(pinned, in_replicas(planner)(pinned).split)


def quickest(plans: Iterable[Plan]) -> Plan:
    """The fastest plan that fits."""
    return best_of(plans, lambda plan, simulation: simulation.step_seconds[-1])


def leanest(plans: Iterable[Plan]) -> Plan:
    """The plan with the lowest peak."""
    return best_of(plans, lambda plan, simulation: max(simulation.peak_bytes))


def best_of(plans: Iterable[Plan], value: Callable[[Plan, Simulation], float]) -> Plan:
    """The plan of the lowest value of those that fit, or of all if none does."""
    found: list[tuple[bool, float, int, Plan]] = []
    for plan in plans:
        with suppress(UsageError):
            simulation = Simulation(plan)
            short = max(simulation.peak_bytes) > min(plan.cluster.budgets)
            found.append((short, value(plan, simulation), len(found), plan))
    return min(found, key=lambda one: one[:3])[-1]


def throughput(asked: list[Question]) -> Plan:
    """The fastest plan of all sizes."""
    best = min(filter(None, map(mixed, asked)), key=lambda one: one.seconds)
    return plan_of(best.question, best.split, decisions=best.decisions or None)


def on_all(asked: list[Question], shard: Sharding, *kinds: tuple[What, StateKind]) -> Iterator[Plan]:
    """One stage on all devices that divides so much, with what is done with its state, at all sizes that it divides."""
    for question in asked:
        size, devices = question.training.microbatch_size, tuple(range(len(question.cluster.devices)))
        sizes = {one.microbatch_size for one in question.profile.measurements}
        if size % len(devices) or size // len(devices) not in sizes:
            continue
        grid = Grid(devices=devices, data=len(devices), shard=shard, buckets=question.blocks)
        plan = plan_of(question, Split((0, question.blocks), devices[:1], (grid,)))
        cuts = [0, *bucket_edges(plan, 0), len(question.profile.layers)]
        decisions = [
            Decision(
                stage=0,
                subject=State(start=a, stop=b, kind=kind),
                what=what,
                place=parse_place("host"),
                ahead=1,
            )
            for what, kind in kinds
            for a, b in pairwise(cuts)
        ]
        yield replace(plan, decisions=tuple(decisions))


OFFLOAD: tuple[tuple[What, StateKind], ...] = ((What.UPDATE, "optimizer"),)
INFINITY: tuple[tuple[What, StateKind], ...] = ((What.OFFLOAD, "optimizer"), (What.OFFLOAD, "parameters"))
PLANNERS: dict[str, Callable[[list[Question]], Plan]] = {
    "capture": lambda asked: chosen(capture, asked),
    "capture early": lambda asked: chosen(
        lambda one: capture(one, CaptureOptions(early_release=True)), asked
    ),
    "alpa": lambda asked: chosen(alpa, asked),
    "megatron": lambda asked: fixed(uniform, asked),
    "deepspeed": lambda asked: fixed(parameters, asked),
    "fsdp": lambda asked: quickest(on_all(asked, "parameters")),
    "fsdp lean": lambda asked: leanest(on_all(asked, "parameters")),
    "offload": lambda asked: quickest(on_all(asked, "gradients", *OFFLOAD)),
    "offload lean": lambda asked: leanest(on_all(asked, "gradients", *OFFLOAD)),
    "infinity": lambda asked: quickest(on_all(asked, "parameters", *INFINITY)),
    "infinity lean": lambda asked: leanest(on_all(asked, "parameters", *INFINITY)),
    "peak": lambda asked: chosen(exact, asked),
    "lean": lambda asked: chosen(lean, asked),
    "throughput": throughput,
}


def rows(costs: ModelProfile, on: Cluster, schedule: str, names: Iterable[str]) -> Iterator[Row]:
    """What each of some planners finds."""
    for name in names:
        find = PLANNERS[name]
        began = time.process_time()
        plan = find(questions(costs, on, schedule))
        seconds = time.process_time() - began
        simulation = Simulation(plan)
        peak = max(simulation.peak_bytes)
        stages = [
            f"{count(plan, stage)}x{stage.grid.data}{SHARDED[stage.grid.shard]}" for stage in plan.stages
        ]
        again = sum(decision.what is What.RECOMPUTE for decision in plan.decisions)
        yield Row(
            planner=name,
            peak_bytes=peak,
            step_seconds=simulation.step_seconds[-1],
            fits=peak <= min(on.budgets) and not shortage(plan, simulation.arenas),
            stages=stages,
            microbatch_size=plan.training.microbatch_size,
            recomputed=again,
            seconds=seconds,
            memory_bytes=1024 * getrusage(RUSAGE_SELF).ru_maxrss,
        )


SHARDED: dict[Sharding, str] = {"none": "", "optimizer": "z1", "gradients": "z2", "parameters": "z3"}


def count(plan: Plan, stage: Stage) -> int:
    """The blocks of a stage."""
    return sum(stage.start <= edge < stage.stop for edge in plan.profile.edges[:-1])


def measured(model: str) -> ModelProfile:
    """The profile at all powers of two up to 64."""
    return profile(MODELS[model](), microbatch_size=[1 << power for power in range(7)], target="cuda")


def main() -> None:
    """Plan every model on every number of devices, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--devices", nargs="+", type=int, default=[4, 8, 16, 32, 64])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "gpipe"])
    parser.add_argument("--planners", nargs="+", choices=PLANNERS, default=list(PLANNERS))
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument(
        "--tables", action="store_true", help="put the tables of the JSON into the page, plan nothing"
    )
    options = parser.parse_args()
    kept = json.loads(options.json.read_text()) if options.json.exists() else {"rows": []}
    made = kept["rows"]
    for model in () if options.tables else options.models:
        asked = [(devices, schedule) for schedule in options.schedules for devices in options.devices]
        known = {(*key(row), row["planner"]) for row in made}
        missing = {
            one: [name for name in options.planners if (model, *one, name) not in known] for one in asked
        }
        if not any(missing.values()):
            continue
        began = time.process_time()
        costs = measured(model)
        print(f"{model}: {costs.parts}, profiled in {time.process_time() - began:.1f} s", flush=True)
        for (devices, schedule), names in missing.items():
            found = []
            for row in rows(costs, cluster(devices), schedule, names):
                found.append({"model": model, "devices": devices, "schedule": schedule, **row._asdict()})
                print(line(found[-1]), flush=True)
            made = sorted(
                [*made, *found],
                key=lambda row: (list(MODELS).index(row["model"]), row["schedule"], row["devices"]),
            )
            options.json.write_text(json.dumps({**kept, "machine": machine(), "rows": made}, indent=1) + "\n")
    if options.tables:
        put(
            {
                "grids": table(made),
                "grids by hand": by_hand(made),
                "grids in short": "\n".join(summary(made)),
            },
            page=PAGE,
        )


def key(row: dict[str, Any]) -> tuple[str, int, str]:
    """What a row answers, but for the planner."""
    return row["model"], row["devices"], row["schedule"]


def line(row: dict[str, Any]) -> str:
    """One line for whoever waits."""
    return (
        f"  {row['devices']:3} {row['schedule']:6} {row['planner']:13} {row['peak_bytes'] / GIB:7.2f} GiB "
        f"{row['step_seconds']:8.3f} s  {'' if row['fits'] else 'does not fit '}search {row['seconds']:6.2f} s  "
        f"b={row['microbatch_size']} {' '.join(row['stages'][:8])}"
    )


def groups(made: list[dict[str, Any]]) -> Iterator[dict[str, dict[str, Any]]]:
    """The rows of each question, by their planners."""
    found: dict[tuple[str, int, str], dict[str, dict[str, Any]]] = {}
    for row in made:
        found.setdefault(key(row), {})[row["planner"]] = row
    return iter(found.values())


PLANS = "capture", "capture early", "alpa", "megatron", "deepspeed", "peak", "throughput"
HAND = "fsdp", "fsdp lean", "offload", "offload lean", "infinity", "infinity lean"
OURS = "peak", "lean", "throughput"


def table(made: list[dict[str, Any]]) -> str:
    """GiB and seconds of the planners, what `peak` saves against `alpa`, and what the search of `throughput` took."""
    columns = ("model, devices, schedule", *PLANS, "`peak` against alpa", "searches")
    lines = []
    for own in groups(made):
        saved = 1 - own["peak"]["peak_bytes"] / own["alpa"]["peak_bytes"]
        searches = f"{own['peak']['seconds']:.1f} s, {own['throughput']['seconds']:.1f} s"
        lines.append((title(own), *(cell(own[name]) for name in PLANS), f"-{100 * saved:.0f} %", searches))
    return markdown(columns, lines)


def by_hand(made: list[dict[str, Any]]) -> str:
    """The same of plans by hand, beside ours."""
    columns = ("model, devices, schedule", *HAND, *OURS)
    return markdown(
        columns, [(title(own), *(cell(own.get(name)) for name in columns[1:])) for own in groups(made)]
    )


def title(own: dict[str, dict[str, Any]]) -> str:
    """What the rows of a question have in common."""
    return ", ".join(map(str, key(own["peak"])))


def cell(row: dict[str, Any] | None) -> str:
    """GiB of the fullest device, and seconds of a step; nothing where that was not run."""
    if row is None:
        return ""
    return f"{row['peak_bytes'] / GIB:.2f} / {row['step_seconds']:.3g}" + (
        "" if row["fits"] else " (does not fit)"
    )


def summary(made: list[dict[str, Any]]) -> Iterator[str]:
    """How often, and by how much at most, another planner's plan is leaner or faster than ours."""
    others = [name for name in PLANNERS if name not in OURS]
    kept = [name for name in others if not name.startswith(("offload", "infinity"))]
    for ours, what, names in (
        ("peak", "peak_bytes", kept),
        ("lean", "peak_bytes", others),
        ("throughput", "step_seconds", others),
    ):
        worse, asked = [], [own for own in groups(made) if ours in own]
        for own in asked:
            best = min((own[name] for name in names if own[name]["fits"]), key=lambda row: row[what])
            if best[what] < own[ours][what] * (1 - 1e-9):
                worse.append(
                    f"{title(own)}: {best['planner']} {100 * (1 - best[what] / own[ours][what]):.1f} % less"
                )
        yield f"- `{ours}` against {len(names)} others in {len(asked)} questions: " + (
            f"not the best in {len(worse)}: {'; '.join(worse)}." if worse else "the best in all."
        )


if __name__ == "__main__":
    main()
