"""Claim: a fake profile costs no training run and tells more than runs do.

Three ways to learn what layers need, for the same models and emulated devices: mCAP's incremental runs of the whole
model, CAPSlog's trimmed runs, and the fake profiler, which every other part of pipefit uses. For each the number of
training runs, the CPU seconds, and how far its predictor is off the true peaks of random splits, in the fullest device:
the additive predictor for both kinds of runs, ours for the fake profile, whose kernels have been measured before. Truth
is the simulator's, which the benchmark of accuracy holds against the allocator. GPipe, two steps a run, without
recomputation and with it.

    python benchmarks/bench_profiling.py [--recompute never always] [--splits 500] [--json FILE]

About five minutes. Seconds are for models small enough to train here; the numbers of runs hold for any.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import quantiles
from typing import Any

import torch

from measured_on import machine
from partitioners import Edges, Setting, outcome
from pipefit.lowering.passes.recomputation import Recompute
from pipefit.models import build
from pipefit.planner import true_peaks
from pipefit.planner.baselines.mcap import Predictor
from pipefit.profiler import profile
from pipefit.profiler.training_runs.profilers import profile_incrementally, profile_trimmed
from pipefit.schema.cluster import Cluster
from pipefit.schema.profile import AdditiveCosts
from pipefit.schema.training import Training

MODELS: dict[str, tuple[dict[str, Any], int]] = {  # settings, devices
    "vgg11": ({"width": 16, "image_size": 64}, 4),
    "amoebanet": ({"layers": 36, "filters": 32, "image_size": 64}, 8),
    "gpt": ({"layers": 14, "hidden": 64, "heads": 4, "sequence": 64, "vocabulary": 1000}, 4),
}
RECOMPUTE: tuple[Recompute, ...] = ("never", "always")
MICROBATCHES, SIZE = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One way to profile one model. Errors are shares of the true peak, over random splits."""

    model: str
    layers: int
    devices: int
    recompute: Recompute
    way: str
    runs: int
    seconds: float
    largest_error: float
    ninth_decile_error: float


def setting(model: str, settings: dict[str, Any], devices: int, recompute: Recompute) -> Setting:
    """A model of the zoo on ample devices, with its fake profile."""
    task = build(model, **settings)
    return Setting(
        task=task,
        profile=profile(task, microbatch_size=SIZE),
        cluster=Cluster.emulated((devices, 1 << 40)),
        training=Training(batch_size=MICROBATCHES * SIZE, microbatches=MICROBATCHES, schedule="gpipe"),
        recompute=recompute,
    )


def rows(name: str, given: Setting, splits: int) -> list[Row]:
    """All three ways."""
    layers, devices = len(given.profile.layers), given.devices
    rng = Random(0)
    edges = [(0, *sorted(rng.sample(range(1, layers), devices - 1)), layers) for _ in range(splits)]
    truth = {split: outcome(given, split).highest_bytes for split in edges}
    began = time.process_time()
    found = profile(given.task, microbatch_size=SIZE)
    ours = true_peaks(found, given.training, stages=devices, recompute=given.recompute)
    ways: list[tuple[str, int, float, Predictor]] = [("fake", 0, time.process_time() - began, ours)]
    for way, runs in (("incremental", profile_incrementally), ("trimmed", profile_trimmed)):
        ways.append((way, *timed(runs, given)))
    return [
        Row(
            model=name,
            layers=layers,
            devices=devices,
            recompute=given.recompute,
            way=way,
            runs=runs,
            seconds=seconds,
            largest_error=max(wrong := errors(predictor, truth)),
            ninth_decile_error=quantiles(wrong, n=10)[-1],
        )
        for way, runs, seconds, predictor in ways
    ]


def timed(profiler: Callable[..., AdditiveCosts], given: Setting) -> tuple[int, float, AdditiveCosts]:
    """Runs made, seconds taken, costs found."""
    made: list[object] = []
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        costs = profiler(
            given.task,
            given.profile,
            given.cluster,
            given.training,
            recompute=given.recompute,
            store=Path(folder) / "runs.json",
            progress=lambda *what: made.append(what),
        )
    return len(made), time.process_time() - began, costs


def errors(predictor: Predictor, truth: dict[Edges, int]) -> list[float]:
    """How far the predicted peak of the fullest device is off, for every split."""
    return [
        abs(max(predictor(n, *ends) for n, ends in enumerate(itertools.pairwise(split))) / peak - 1)
        for split, peak in truth.items()
    ]


def main() -> None:
    """Prints the table, and writes it as JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--recompute", nargs="+", choices=RECOMPUTE, default=[*RECOMPUTE])
    parser.add_argument("--splits", type=int, default=500, help="random splits whose peaks are predicted")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: list[Row] = []
    print(
        f"{'model':11}{'layers':>7}{'devices':>8}  {'recompute':11}{'way':12}{'runs':>5}{'seconds':>9}",
        end="",
    )
    print(f"{'90 % within':>13}{'largest error':>15}")
    for (name, (settings, devices)), recompute in itertools.product(MODELS.items(), options.recompute):
        for row in rows(name, setting(name, settings, devices, recompute), options.splits):
            found.append(row)
            print(
                f"{row.model:11}{row.layers:7}{row.devices:8}  {row.recompute:11}{row.way:12}{row.runs:5}",
                end="",
            )
            print(f"{row.seconds:9.2f}{row.ninth_decile_error:13.2%}{row.largest_error:15.2%}", flush=True)
    if options.json is not None:
        document = {
            "machine": machine(),
            "rows": [asdict(row) for row in found],
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
