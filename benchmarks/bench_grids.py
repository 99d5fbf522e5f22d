"""The peak of the fullest device, and a step's seconds, of planners that may put stages on several devices.

    python benchmarks/bench_grids.py [--models gpt bert ...] [--devices 4 8 ...] [--json FILE]

Models of several kinds train a batch of 128 samples on 4 to 64 A100 of 40 GB, eight to a host (NVLink inside, 25 GB/s
between hosts), in float32. Profiles are fake ones for CUDA, at all powers of two up to the number of devices. Every
planner has the same batch, schedule and devices, and each chooses the microbatch size too, by what it minimises itself:

    capture        lowest peak as CAPTURE predicts it, blind to what 1F1B releases early
    capture early  the same with runs of as many microbatches as a stage holds
    alpa           fewest seconds by Alpa's formula; memory only decides what fits
    megatron       equal stages, the same replicas for all: the fastest combination that fits, simulated
    deepspeed      equal parameters, the same replicas for all: the fastest combination that fits, simulated
    peak           pipefit's exact search for the lowest peak
    throughput     pipefit's fastest plan of those that keep everything (`planner.mixed`), simulated

Peaks and seconds of all plans are the same simulator's. `seconds` are those of the search, without profiles.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from measured_on import machine
from pipefit import zoo
from pipefit.capture import Task
from pipefit.cluster import Cluster
from pipefit.errors import UsageError
from pipefit.planner import Options, Question, alpa, capture, exact, parameters, uniform
from pipefit.planner.capture import CaptureOptions
from pipefit.planner.degrees import divisors
from pipefit.planner.driver import plan_of
from pipefit.planner.mixed import mixed
from pipefit.planner.question import Found, Planner, Split
from pipefit.planner.replicas import in_replicas
from pipefit.profiler import profile
from pipefit.profiles import ModelProfile
from pipefit.simulator import Simulation
from pipefit.training import Training
from pipefit.zoo.huggingface import hf

BATCH = 128
LARGE = {"layers": 24, "hidden": 1024, "heads": 16}
MODELS: dict[str, Callable[[], Task]] = {
    "gpt": lambda: zoo.build("gpt", **LARGE, sequence=512),
    "bert": lambda: zoo.build("bert", **LARGE, sequence=512),
    "wide resnet": lambda: zoo.build("resnet", width=160),
    "u-net": lambda: zoo.build("unet"),
    "amoebanet": lambda: zoo.build("amoebanet", layers=18, filters=256),
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
    seconds: float


def cluster(devices: int) -> Cluster:
    """So many A100 of 40 GB on hosts of eight."""
    hosts = -(-devices // 8)
    groups = [range(8 * host, min(8 * host + 8, devices)) for host in range(hosts)]
    kind = 'kinds.a100 = { flops = { float32 = 19.5e12 }, memory_bandwidth = "1555GB/s" }'
    text = [f'name = "a100s"\nbackend = "cuda"\n{kind}\n']
    text += [
        f'[[devices]]\ncount = {len(group)}\nkind = "a100"\nmemory = "40339MiB"\nhost = {host}\n'
        for host, group in enumerate(groups)
    ]
    text += ['[[hosts]]\nmemory = "948GB"\n' for _ in groups]
    for group in groups:
        near = f"device{group[0]}-{group[-1]}" if len(group) > 1 else f"device{group[0]}"
        text.append(f'[[links]]\nmembers = ["{near}"]\nbytes_per_second = "258GB/s"\nlatency_seconds = 1e-5\n')
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


def chosen(planner: Planner, asked: list[Question]) -> tuple[Question, Split]:
    """The plan with the lowest value over all sizes."""
    found: list[tuple[float, int, Found]] = []
    for number, question in enumerate(asked):
        with suppress(UsageError):
            made = planner(question)
            found.append((made.value, number, made))
    _, number, best = min(found, key=lambda one: one[:2])
    return asked[number], best.split


def fixed(planner: Planner, asked: list[Question]) -> tuple[Question, Split]:
    """The fastest combination of microbatch size, number of replicas and number of stages that fits."""
    found: list[tuple[bool, float, int, Question, Split]] = []
    for question in asked:
        devices = len(question.cluster.devices)
        for data in divisors(question.training.microbatch_size, devices):
            options = Options(data=data, stages=min(question.blocks, devices // data))
            with suppress(UsageError):
                pinned = replace(question, options=options)
                split = in_replicas(planner)(pinned).split
                simulation = Simulation(plan_of(pinned, split))
                short = max(simulation.peak_bytes) > min(question.cluster.budgets)
                found.append((short, simulation.step_seconds[-1], len(found), pinned, split))
    *_, question, split = min(found, key=lambda one: one[:3])
    return question, split


def throughput(asked: list[Question]) -> tuple[Question, Split]:
    """The fastest plan of all sizes."""
    best = min(filter(None, map(mixed, asked)), key=lambda one: one.seconds)
    return best.question, best.split


PLANNERS: dict[str, Callable[[list[Question]], tuple[Question, Split]]] = {
    "capture": lambda asked: chosen(capture, asked),
    "capture early": lambda asked: chosen(lambda one: capture(one, CaptureOptions(early_release=True)), asked),
    "alpa": lambda asked: chosen(alpa, asked),
    "megatron": lambda asked: fixed(uniform, asked),
    "deepspeed": lambda asked: fixed(parameters, asked),
    "peak": lambda asked: chosen(exact, asked),
    "throughput": throughput,
}


def rows(costs: ModelProfile, on: Cluster, schedule: str) -> Iterator[Row]:
    """What every planner finds."""
    for name, find in PLANNERS.items():
        began = time.process_time()
        question, split = find(questions(costs, on, schedule))
        seconds = time.process_time() - began
        simulation = Simulation(plan_of(question, split))
        peak = max(simulation.peak_bytes)
        grids = [split.grid(stage) for stage in range(len(split.devices))]
        ends = zip(pairwise(split.edges), grids, strict=True)
        stages = [f"{stop - start}x{grid.data}" for (start, stop), grid in ends]
        size = question.training.microbatch_size
        fits = peak <= min(on.budgets)
        yield Row(name, peak, simulation.step_seconds[-1], fits, stages, size, seconds)


def measured(model: str, most: int) -> ModelProfile:
    """The profile at all powers of two."""
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return profile(MODELS[model](), microbatch_size=sizes, target="cuda")


def main() -> None:
    """Plan every model on every number of devices, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--devices", nargs="+", type=int, default=[4, 8, 16, 32, 64])
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "gpipe"])
    parser.add_argument("--json", type=Path, help="write rows and machine here")
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    for model in options.models:
        began = time.process_time()
        try:
            costs = measured(model, max(options.devices))
        except UsageError as refusal:  # it is another model at another size
            print(f"{model}: {refusal}", flush=True)
            continue
        print(f"{model}: {costs.parts}, profiled in {time.process_time() - began:.1f} s", flush=True)
        for devices in options.devices:
            for schedule in options.schedules:
                few = [one for one in costs.measurements if one.microbatch_size <= devices]
                for row in rows(replace(costs, measurements=tuple(few)), cluster(devices), schedule):
                    found.append({"model": model, "devices": devices, "schedule": schedule, **row._asdict()})
                    print(
                        f"  {devices:3} {schedule:6} {row.planner:13} {row.peak_bytes / 2**30:7.2f} GiB "
                        f"{row.step_seconds:8.3f} s  {'' if row.fits else 'does not fit '}search {row.seconds:6.2f} s  "
                        f"b={row.microbatch_size} {' '.join(row.stages[:8])}",
                        flush=True,
                    )
                if options.json:
                    options.json.write_text(json.dumps({"machine": machine(), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
