"""Claim: the peaks of all 3,654 splits of VGG-11 over four devices are predicted exactly, so the best one is chosen.

The setting of mCAP's paper: batch 1104 = 12 x 92, images of 224 x 224, SGD with momentum, four equal devices (preset
`4x-titan-rtx`; budgets are not enforced), under torchgpipe's three settings of recomputation in its own order of
backwards, `except_last` its default, and under ours, `except_one`, in ours (`partitioners.py`). Against the true peaks
of all splits: mCAP's additive predictor (listing 1.1) and ours. An error is |predicted / true - 1| of a split's peak,
which is its fullest device's. The paper measured errors under 14 % in 90 % of the splits, and a chosen split of 1.05
times the lowest peak, the third best.

The truth is the dry run: no run of this size is possible here. A device's memory is a function of the layers it holds
and of its own actions, so a stage's peak is looked up by its place: first layer, stop, and what its program does (under
GPipe: the first stage's, the last one's, or one of those between). Splits are dry-run until every place that occurs in
any split was in one, chosen greedily; the peaks of the others are composed. A random sample is dry-run wholly, too, and
compared. The additive predictor's incremental runs are read from the dry runs. They follow the kernels of CUDA, as the
paper's GPUs would; `--target cpu` follows this machine's, but what the largest of them take inside is not measured.
`--truth simulator` has the simulator in place of all dry runs but those of the sample, in minutes.

For real, at a reduced size: random splits are trained, and the CPU allocator's own events compared with the dry run,
with our simulator and with the additive predictor, whose incremental runs are real there.

Then each partitioner's split, with its true peak and simulated throughput; torchgpipe's is timed on this machine's CPU,
so it varies from run to run. The last two are those that the paper prints.

    PYTHONPATH=src python benchmarks/bench_vgg.py [--recompute never except_last always except_one]
        [--truth "dry run"] [--real 60] [--whole 30] [--samples 92] [--target cuda] [--processes 2] [--seed 0]
        [--json FILE]

Half an hour on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any, get_args

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from measured_on import machine
from partitioners import (
    SCHEDULES,
    Edges,
    Setting,
    TorchgpipeSplits,
    lengths,
    outcome,
    plan_at,
    splitters,
    torchgpipe_splits,
)
from pipefit.capture import Task
from pipefit.lowering import lower
from pipefit.lowering.passes.recomputation import Recompute
from pipefit.models import vgg11
from pipefit.planner import best_split, true_peaks
from pipefit.profiler import profile
from pipefit.profiler.training_runs.profilers import profile_incrementally
from pipefit.runtime import certify
from pipefit.schema.cluster import Cluster
from pipefit.schema.plan import Plan
from pipefit.schema.profile import AdditiveCosts, Target
from pipefit.schema.training import Training
from pipefit.tables import Table, plain
from support.allocator_events import measured_peaks

MICROBATCHES, MICROBATCH = 12, 92
REDUCED, REDUCED_MICROBATCH = {"width": 8, "image_size": 64, "num_classes": 100}, 8
ROOM = 1 << 40  # bytes of a device, for real runs: none is refused
PUBLISHED = {"mCAP's, published": (0, 3, 6, 11, 30), "torchgpipe's, published": (0, 6, 8, 13, 30)}

Place = tuple[int, int, int]  # role, first layer, stop
Peaks = tuple[int, ...]  # bytes, of every stage
Predictor = Callable[[int, int, int], int]
Each = Callable[
    [Callable[[Edges], Any], Sequence[Edges]], Iterable[Any]
]  # `map`, or the same in several processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Of predicted highest peaks, and shares of the splits. `share_equal` means on every device, to the byte."""

    percentile_90: float
    largest: float
    share_under_14_percent: float
    share_under_1_percent: float
    share_equal: float

    @property
    def cells(self) -> tuple[str, ...]:
        """Of a table."""
        shares = (self.share_under_14_percent, self.share_under_1_percent, self.share_equal)
        return *map("{:.2%}".format, (self.percentile_90, self.largest)), *map("{:.1%}".format, shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A split among all: its true peaks, the highest over the lowest there is, and its rank (the lowest has 1)."""

    split: tuple[int, ...]
    peak_bytes: Peaks
    over_best: float
    rank: int

    @property
    def cells(self) -> tuple[str, ...]:
        """Of a table."""
        gibibytes = " ".join(f"{nbytes / 2**30:6.2f}" for nbytes in self.peak_bytes)
        return "-".join(map(str, self.split)), gibibytes, f"{self.over_best:.3f}", str(self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One way of recomputing. The true peaks of all splits are composed from those of some, by the `truth`; of the
    splits dry-run wholly, so many have the peaks composed for them.
    """

    recompute: Recompute
    truth: str
    splits: int
    composed_from: int
    run_wholly: int
    composed_equal: int
    errors: dict[str, Errors]  # by predictor
    chosen: dict[str, Standing]  # by predictor
    partitioners: dict[str, Standing]
    samples_per_second: dict[str, float]  # by partitioner
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRuns:
    """Splits trained for real, for one way of recomputing."""

    recompute: Recompute
    splits: int
    errors: dict[str, Errors]  # by what predicted the allocator's own account
    seconds: float


def setting_of(
    task: Task, cluster: Cluster, recompute: Recompute, size: tuple[int, int], target: Target = "cpu"
) -> Setting:
    """`task` under the schedule that belongs to `recompute`; `size` is how many microbatches, of how many samples."""
    count, samples = size
    training = Training(batch_size=count * samples, microbatches=count, schedule=SCHEDULES[recompute])
    found = profile(task, microbatch_size=samples, target=target)
    return Setting(task=task, profile=found, cluster=cluster, training=training, recompute=recompute)


def all_splits(setting: Setting) -> list[Edges]:
    """Every way to split the layers over all devices."""
    layers = len(setting.profile.layers)
    return [(0, *cuts, layers) for cuts in itertools.combinations(range(1, layers), setting.devices - 1)]


def roles(setting: Setting) -> tuple[int, ...]:
    """For every stage, the first one whose program is the same but for the stage's number."""
    program = lower(plan_at(setting, all_splits(setting)[0]))
    texts = [
        [str(action).removeprefix(str(stage)) for action in own] for stage, own in enumerate(program.actions)
    ]
    return tuple(map(texts.index, texts))


def places(of: Sequence[int], edges: Edges) -> list[Place]:
    """The places of the stages between `edges`, whose roles are `of`."""
    return [(role, *ends) for role, ends in zip(of, itertools.pairwise(edges), strict=True)]


def covering(setting: Setting) -> list[Edges]:
    """Some of the splits, in which every place of any is found. Greedy: first those in which all places are new."""
    of, known, chosen = roles(setting), set[Place](), []
    for fresh in range(setting.devices, 0, -1):
        for edges in all_splits(setting):
            if len(found := set(places(of, edges)) - known) >= fresh:
                chosen.append(edges)
                known |= found
    return chosen


def dry_run(setting: Setting, edges: Edges) -> Peaks:
    """The peaks of the first step and a steady one."""
    return certify(setting.task, plan_at(setting, edges)).peak_bytes


def simulated(setting: Setting, edges: Edges) -> Peaks:
    """The same by the simulator, in a hundredth of the time."""
    return outcome(setting, edges).peak_bytes


TRUTHS: dict[str, Callable[[Setting, Edges], Peaks]] = {"dry run": dry_run, "simulator": simulated}


def runs_of(
    setting: Setting, splits: Sequence[Edges], each: Each = map, *, truth: str = "dry run"
) -> dict[Edges, Peaks]:
    """The peaks of all these splits."""
    return dict(zip(splits, each(partial(TRUTHS[truth], setting), splits), strict=True))


def composed(setting: Setting, runs: Mapping[Edges, Peaks]) -> dict[Edges, Peaks]:
    """The peaks of all splits, from those in which every place was found."""
    of = roles(setting)
    known = {
        place: nbytes
        for edges, peaks in runs.items()
        for place, nbytes in zip(places(of, edges), peaks, strict=True)
    }
    return {edges: tuple(known[place] for place in places(of, edges)) for edges in all_splits(setting)}


def additive_costs(setting: Setting, run: Callable[[Plan], Peaks] | None = None) -> AdditiveCosts:
    """mCAP's additive predictor, from incremental runs: what `run` says of each, or real ones."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs.json"
        return profile_incrementally(
            setting.task,
            setting.profile,
            setting.cluster,
            setting.training,
            recompute=setting.recompute,
            store=store,
            run=run,
        )


def predicted(predictor: Predictor, splits: Iterable[Edges]) -> list[Peaks]:
    """What a predictor says of all these splits."""
    return [
        tuple(predictor(stage, *ends) for stage, ends in enumerate(itertools.pairwise(edges)))
        for edges in splits
    ]


def errors(said: Sequence[Peaks], true: Sequence[Peaks]) -> Errors:
    """What was said of splits against their true peaks."""
    off = np.array([abs(max(one) / max(other) - 1) for one, other in zip(said, true, strict=True)])
    return Errors(
        percentile_90=float(np.quantile(off, 0.9)),
        largest=float(off.max()),
        share_under_14_percent=float((off < 0.14).mean()),
        share_under_1_percent=float((off < 0.01).mean()),
        share_equal=float(np.mean([one == other for one, other in zip(said, true, strict=True)])),
    )


def standing(edges: Edges, true: Mapping[Edges, Peaks]) -> Standing:
    """A split among those whose true peaks are given."""
    own, highest = max(true[edges]), [max(peaks) for peaks in true.values()]
    return Standing(
        split=lengths(edges),
        peak_bytes=true[edges],
        over_best=own / min(highest),
        rank=1 + sum(nbytes < own for nbytes in highest),
    )


def compare(
    setting: Setting,
    timed: TorchgpipeSplits,
    *,
    others: Mapping[str, Edges],
    whole: int,
    seed: int,
    truth: str = "dry run",
    each: Each = map,
) -> Comparison:
    """Both predictors against the `truth`, `whole` splits of which are dry-run wholly, and all partitioners: those that
    plan here, torchgpipe as `timed`, and the splits of `others`.
    """
    began = time.perf_counter()
    runs = runs_of(setting, covering(setting), each, truth=truth)
    true = composed(setting, runs)
    again = runs_of(setting, Random(seed).sample([*true], whole), each)
    predictors: dict[str, Predictor] = {
        "additive": additive_costs(setting, lambda plan: true[0, *(stage.stop for stage in plan.stages)]),
        "ours": true_peaks(
            setting.profile, setting.training, stages=setting.devices, recompute=setting.recompute
        ),
    }
    layers, batch = len(setting.profile.layers), setting.training.batch_size
    splits = {name: split(setting) for name, split in splitters(lambda _: timed).items()} | dict(others)
    return Comparison(
        recompute=setting.recompute,
        truth=truth,
        splits=len(true),
        composed_from=len(runs),
        run_wholly=len(again),
        composed_equal=sum(true[edges] == peaks for edges, peaks in again.items()),
        errors={name: errors(predicted(says, true), [*true.values()]) for name, says in predictors.items()},
        chosen={
            name: standing(best_split(says, layers, setting.devices), true)
            for name, says in predictors.items()
        },
        partitioners={name: standing(edges, true) for name, edges in splits.items()},
        samples_per_second={
            name: batch / outcome(setting, edges).step_seconds for name, edges in splits.items()
        },
        seconds=time.perf_counter() - began,
    )


def allocated(setting: Setting, edges: Edges) -> Peaks:
    """The peaks of the first two steps of real training, by the allocator's own account."""
    torch.set_num_threads(setting.profile.assumptions.threads)
    return tuple(map(max, measured_peaks(setting.task, plan_at(setting, edges))))


def real_runs(setting: Setting, count: int, *, seed: int, each: Each = map) -> RealRuns:
    """Random splits trained for real, against what is said of them."""
    began = time.perf_counter()
    sample = Random(seed).sample(all_splits(setting), count)
    said = {
        "additive": predicted(additive_costs(setting), sample),
        "ours": [outcome(setting, edges).peak_bytes for edges in sample],
        "dry run": [*runs_of(setting, sample, each).values()],
    }
    true = list(each(partial(allocated, setting), sample))
    return RealRuns(
        recompute=setting.recompute,
        splits=count,
        errors={name: errors(peaks, true) for name, peaks in said.items()},
        seconds=time.perf_counter() - began,
    )


ERRORS = ("90th percentile", "largest error", "< 14 %", "< 1 %", "equal")
STANDING = ("split", "GiB on every device", "peak/best", "rank")


def show(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Print a table."""
    print(plain([Table(columns, tuple(rows), title)]), end="\n\n", flush=True)


def show_comparison(found: Comparison) -> None:
    """Print both tables."""
    show(
        f"Recompute {found.recompute}, schedule {SCHEDULES[found.recompute]}: {found.splits} splits composed from "
        f"{found.composed_from} by {found.truth}, equal in {found.composed_equal} of {found.run_wholly} dry-run wholly "
        f"({found.seconds:.0f} s)",
        ("predictor", *ERRORS, *STANDING),
        ((name, *one.cells, *found.chosen[name].cells) for name, one in found.errors.items()),
    )
    show(
        f"Recompute {found.recompute}: partitioners",
        ("partitioner", *STANDING, "samples/s"),
        (
            (name, *one.cells, f"{found.samples_per_second[name]:.0f}")
            for name, one in found.partitioners.items()
        ),
    )


def show_real(found: RealRuns) -> None:
    """Print the table."""
    size = ", ".join(f"{name} {value}" for name, value in REDUCED.items())
    show(
        f"Recompute {found.recompute}: {found.splits} splits trained for real, {MICROBATCHES} x {REDUCED_MICROBATCH}, "
        f"{size} ({found.seconds:.0f} s)",
        ("against the allocator", *ERRORS),
        ((name, *one.cells) for name, one in found.errors.items()),
    )


def parsed() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--recompute", nargs="+", choices=SCHEDULES, default=[*SCHEDULES])
    parser.add_argument(
        "--real", type=int, default=60, help="splits to train for real, for each way of recomputing"
    )
    parser.add_argument(
        "--whole", type=int, default=30, help="splits to dry-run wholly, to check the composed ones"
    )
    parser.add_argument("--truth", choices=TRUTHS, default="dry run", help="whose peaks are the true ones")
    parser.add_argument(
        "--samples", type=int, default=MICROBATCH, help="that torchgpipe times the layers with"
    )
    parser.add_argument(
        "--target", choices=get_args(Target), default="cuda", help="whose kernels the dry run follows"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write everything here, with the machine")
    return parser.parse_args()


def main() -> None:
    """Run, print, and write."""
    options = parsed()
    torch.set_num_threads(1)  # profiles assume one thread
    titan, room = Cluster.preset("4x-titan-rtx"), Cluster.emulated((4, ROOM))
    timed = torchgpipe_splits(vgg11(), samples=options.samples, devices=4)
    compared, real = [], []
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        given = {"seed": options.seed, "each": partial(pool.map, chunksize=4)}
        for recompute in options.recompute:
            paper = setting_of(vgg11(), titan, recompute, (MICROBATCHES, MICROBATCH), options.target)
            compared.append(
                compare(paper, timed, others=PUBLISHED, whole=options.whole, truth=options.truth, **given)
            )
            show_comparison(compared[-1])
            write(options, compared, real)
        for recompute in options.recompute if options.real else ():
            small = setting_of(vgg11(**REDUCED), room, recompute, (MICROBATCHES, REDUCED_MICROBATCH))
            real.append(real_runs(small, options.real, **given))
            show_real(real[-1])
            write(options, compared, real)


def write(options: argparse.Namespace, compared: Iterable[Comparison], real: Iterable[RealRuns]) -> None:
    """Everything that was found by now, as JSON where one was asked for."""
    if options.json is None:
        return
    document = {
        "options": {name: value for name, value in vars(options).items() if name != "json"},
        "machine": machine(),
        "all_splits": [asdict(found) for found in compared],
        "reduced_size": REDUCED | {"microbatches": MICROBATCHES, "microbatch_size": REDUCED_MICROBATCH},
        "real_runs": [asdict(found) for found in real],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
