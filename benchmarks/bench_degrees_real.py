"""Claim: with a measured profile, the simulated step of two workers that share a model in any way is within 15 % of the
real one, in the median; and of larger plans on paced devices and links, the one that is predicted to be faster is.

    python benchmarks/bench_degrees_real.py [--part measured|paced] [--models NAME ...] [--turns 3] [--steps 5]

`measured`: each of `MODELS` on two workers of one thread, in four microbatches, as two stages, as two replicas that
divide nothing, optimizer state or all, and as two tensor-parallel shards. Steps of the small ones take tenths of a
second, much of which the machine needs to wake up threads. Devices have no meter, which would take its own time. Each
turn measures the profile and the link between two processes, predicts, and trains all plans, so that what else the
machine does is in both. The link is measured by what it is there for: sums of one number, and of a large tensor, as
soon as both processes have computed something. A plan's error is the median over turns of measured against predicted
seconds of a step. Rows of other models than those asked for are kept, and tell of their own run.

`paced`: a GPT on four workers, in all degrees of stages, replicas and shards, with one or many buckets, recomputed or
not. Four devices have two cores, so computing is paced as in `bench_joint_real.py`, the collectives of shards included,
and so are messages and sums: each begins when the link to its target is free, and arrives when the link has carried it.
Two plans are in order, and count, as in `bench_overlap.py`.

A quarter of an hour on a quiet machine, which `measured` needs.
"""

from __future__ import annotations

import argparse
import heapq
import json
import multiprocessing as mp
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations, count, product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import pipefit
from bench_joint_real import pace, slowed
from bench_overlap import Row, agreement, line, row
from measured_on import machine
from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.models import build
from pipefit.profiler import profile
from pipefit.runtime.comm.transport import Network
from pipefit.runtime.engine.forward_backward import Passes
from pipefit.runtime.engine.stage import StageRunner
from pipefit.schema.actions import SENDS, Action
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import Link, Member
from pipefit.schema.grids import Sharding
from pipefit.schema.layer_costs import Collective
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from pipefit.timing import Group, layer_seconds

RESULTS = Path(__file__).parent / "results" / "degrees_real.json"
GPT = {"layers": 4, "hidden": 512, "heads": 8, "vocabulary": 1000, "sequence": 256}
SMALL = {"layers": 4, "hidden": 256, "heads": 4, "vocabulary": 1000, "sequence": 128}
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {  # of the zoo, and samples of a microbatch
    "gpt": ("gpt", 4, GPT),
    "bert": ("bert", 4, GPT),
    "mlp": ("mlp", 128, {"widths": (2048, 2048, 2048, 2048), "inputs": 2048}),
    "resnet": ("resnet", 4, {"blocks": (1, 1, 1, 1), "image_size": 128, "num_classes": 100}),
    "small gpt": ("gpt", 4, SMALL),
    "small bert": ("bert", 4, SMALL),
    "small mlp": ("mlp", 4, {"widths": (1024, 1024, 1024, 1024), "inputs": 1024}),
}
MICROBATCHES = 4
WAYS: dict[str, dict[str, Any]] = {
    "pp 2": {"stages": 2, "data": 1, "tensor": 1},
    "dp 2": {"stages": 1, "data": 2, "tensor": 1, "shard": "none"},
    "dp 2, ZeRO-1": {"stages": 1, "data": 2, "tensor": 1, "shard": "optimizer"},
    "dp 2, ZeRO-3": {"stages": 1, "data": 2, "tensor": 1, "shard": "parameters"},
    "tp 2": {"stages": 1, "data": 1, "tensor": 2},
}
SUMS_MADE, COMPUTED = 20, 8  # sums of a kind, and products of 512 x 512 numbers before each
LARGE_BYTES = 1 << 24
PACED = 4  # devices
PASSES, SUMS = 0.5, 0.5  # seconds of a microbatch through all layers, and of all gradients over a link
NOISE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Seconds of a plan's steps, in the median over turns, and how far they are from the turn's prediction."""

    model: str
    way: str
    predicted_seconds: float
    seconds: float
    error: float  # measured / predicted - 1


# -------------------------------------------------------------------- measured


def of_model(model: str, turns: int, steps: int) -> Iterator[Step]:
    """All plans of a model, predicted and trained by turns."""
    name, samples, settings = MODELS[model]
    make: Callable[[], Task] = partial(build, name, **settings)
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(turns):
        costs = profile(make(), microbatch_size=[samples, samples // 2], tensor=2, device="cpu")
        cluster = linked(*link_between_processes())
        how = Training(batch_size=samples * MICROBATCHES, microbatches=MICROBATCHES)
        for way, degrees in WAYS.items():
            plan = pipefit.plan(
                costs, cluster, how, planner="time", **degrees
            )  # stages take as equal times as can be
            _, trace = pipefit.train(make, plan, steps=steps)
            predicted, seconds = Simulation(plan).step_seconds[-1], statistics.median(trace.step_seconds[1:])
            taken[way].append((predicted, seconds))
            print(f"{model:10} {way:14} predicted {predicted:.4f} s  measured {seconds:.4f} s", flush=True)
    for way, found in taken.items():
        predictions, seconds = zip(*found, strict=True)
        yield Step(
            model=model,
            way=way,
            predicted_seconds=statistics.median(predictions),
            seconds=statistics.median(seconds),
            error=statistics.median(real / predicted - 1 for predicted, real in found),
        )


def linked(latency: float, rate: float) -> Cluster:
    """Two CPU devices with ample memory, and a link between them."""
    ample = Cluster.emulated((2, 1 << 40))
    link = Link(members=ample.links[0].members, bytes_per_second=rate, latency_seconds=latency)
    return replace(ample, backend="cpu", links=(link,))


def link_between_processes() -> tuple[float, float]:
    """Seconds of a round of a small sum of two processes, and bytes per second of a large one."""
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answers = context.SimpleQueue()
        ends = [context.Process(target=_add_up, args=(rank, f"{folder}/store", answers)) for rank in range(2)]
        for end in ends:
            end.start()
        small, large = answers.get()
        for end in ends:
            end.join()
    return small / 2, LARGE_BYTES / max(large - small, 1e-9)


def _add_up(rank: int, store: str, answers: Any) -> None:
    """Compute, add up a number or a large tensor with the other process, as trainers do; tell the median seconds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found, square = [], torch.randn(512, 512)
    for nbytes in (4, LARGE_BYTES):
        tensor, times = torch.zeros(nbytes // 4), []
        for _ in range(SUMS_MADE):
            dist.barrier()
            for _ in range(COMPUTED):
                torch.mm(square, square)
            began = time.perf_counter()
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            work.wait()
            times.append(time.perf_counter() - began)
        found.append(statistics.median(times))
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


# -------------------------------------------------------------------- paced


def small_gpt() -> Task:
    """What is trained on paced devices; its layers are hardly computed."""
    return build("gpt", layers=6, hidden=64, heads=4, vocabulary=256, sequence=16, optimizer="sgd")


def paced_plans() -> Iterator[tuple[str, Plan]]:
    """All degrees of all stages on four devices, with one bucket and many, recomputed and not, of two sizes."""
    costs = profile(small_gpt(), microbatch_size=[8, 4, 2, 1], tensor=[2, 4])
    cluster = paced_cluster(costs)
    ways = product(
        (8, 4), ((4, 1, 1), (2, 2, 1), (1, 4, 1), (2, 1, 2), (1, 2, 2), (1, 1, 4)), ("never", "always")
    )
    for size, (stages, data, tensor), again in ways:
        how = Training(batch_size=32, microbatches=32 // size)
        shard: Sharding | None = "none" if data > 1 else None
        try:
            plan = pipefit.plan(
                costs, cluster, how, planner="time", stages=stages, data=data, tensor=tensor, shard=shard,
                recompute=again,
            )  # fmt: skip
        except UsageError:
            continue
        name = f"b{size} pp{stages} dp{data} tp{tensor}{' again' if again == 'always' else ''}"
        yield name, plan
        if data > 1:
            stages_ = (replace(one, grid=replace(one.grid, buckets=8)) for one in plan.stages)
            yield f"{name} buckets", replace(plan, stages=tuple(stages_))


def paced_cluster(costs: ModelProfile) -> Cluster:
    """Devices and links between every two of them, so slow as the claim says."""
    ample = Cluster.emulated((PACED, 1 << 40))
    measurement, fast = costs.at(8), ample.devices[0].kind
    alone = Training(batch_size=8, microbatches=1)
    passes = sum(one.forward + one.backward for one in layer_seconds(measurement, fast, alone))
    kind = slowed(fast, PASSES / passes)
    rate = sum(cost.gradient_bytes for cost in measurement.costs) / SUMS
    devices = [Member.device(number) for number in range(PACED)]
    links = (Link(members=pair, bytes_per_second=rate) for pair in combinations(devices, 2))
    return replace(ample, devices=tuple(replace(one, kind=kind) for one in ample.devices), links=tuple(links))


def paced_task(plan: Plan) -> Task:
    """The task, in a worker whose computing and messages are paced as the plan's profile and cluster say."""
    if mp.parent_process() is not None:
        grid = plan.stages[0].grid
        kind, group = plan.cluster.devices[0].kind, Group.of(plan.cluster, grid.group_of(grid.devices[0]))
        pace(Passes, StageRunner, layer_seconds(plan.measured(0), kind, plan.training, group))
        pace_messages(Network, Wires(), plan.cluster)
    return small_gpt()


class Later:
    """Transfers that begin, for torch, when their link has carried them."""

    def __init__(self, begin: Callable[[], list[Any]]) -> None:
        self._begin, self._there, self._found = begin, threading.Event(), list[Any]()
        self._error: RuntimeError | None = None

    def run(self) -> None:
        """Begin them."""
        try:
            self._found = self._begin()
        except RuntimeError as error:  # a peer is gone: told where they are waited for
            self._error = error
        self._there.set()

    def wait(self, *arguments: Any) -> None:
        """Wait until they are there."""
        self._there.wait()
        if self._error is not None:
            raise self._error
        for one in self._found:
            one.wait(*arguments)


class Wires:
    """The links of a device to others: each carries one transfer after the other, and a thread says when."""

    def __init__(self) -> None:
        self._free: dict[int, float] = {}
        self._due: list[tuple[float, int, Later]] = []
        self._number, self._changed = count(), threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def carry(self, target: int, seconds: float, begin: Callable[[], list[Any]]) -> Later:
        """Transfers to a device that begin so many seconds after its link is free."""
        until = max(time.monotonic(), self._free.get(target, 0.0)) + seconds
        self._free[target], later = until, Later(begin)
        with self._changed:
            heapq.heappush(self._due, (until, next(self._number), later))
            self._changed.notify()
        return later

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._due or self._due[0][0] > time.monotonic():
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                later = heapq.heappop(self._due)[2]
            later.run()


def pace_messages(network: type[Network], wires: Wires, cluster: Cluster) -> None:
    """Make sends and sums take what the cluster's links take."""
    start, collect = network.start, network.collect

    def started(self: Network, action: Action, tensors: list[Tensor], message: Any) -> Any:
        if action.kind not in SENDS or message.target == self.device:
            return start(self, action, tensors, message)
        route = cluster.route(Member.device(self.device), Member.device(message.target))
        seconds = route.seconds(sum(tensor.nbytes for tensor in tensors))
        return [wires.carry(message.target, seconds, lambda: start(self, action, tensors, message))]

    def collected(
        self: Network,
        action: Action,
        tensors: list[Tensor],
        members: tuple[int, ...],
        device: int,
        owners: Any = (),
    ) -> Any:
        around = members[(members.index(device) + 1) % len(members)]
        summed = Collective(kind="all_reduce", nbytes=sum(tensor.nbytes for tensor in tensors))
        seconds = Group.of(cluster, members).seconds([summed])
        return [wires.carry(around, seconds, lambda: collect(self, action, tensors, members, device, owners))]

    network.start, network.collect = started, collected  # type: ignore[method-assign]


def paced(turns: int, steps: int) -> list[Row]:
    """All paced plans, trained by turns."""
    plans = list(paced_plans())
    taken: dict[str, list[float]] = {name: [] for name, _ in plans}
    for turn in range(turns):
        for name, plan in plans:
            _, trace = pipefit.train(partial(paced_task, plan), plan, steps=steps)
            taken[name] += trace.step_seconds[1:]
            print(f"turn {turn} {name:24} {statistics.median(taken[name]):.3f} s, predicted", end=" ")
            print(f"{Simulation(plan).step_seconds[-1]:.3f} s", flush=True)
    return [row(name, plan, taken[name]) for name, plan in plans]


def without(runs: list[dict[str, Any]], models: list[str]) -> Iterator[dict[str, Any]]:
    """What earlier runs have measured of other models than these."""
    for run in runs:
        if rows := [row for row in run["rows"] if row["model"] not in models]:
            yield {**run, "rows": rows}


def main() -> None:
    """Run a part, print, and write the JSON, which keeps the other part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=["measured", "paced"], default="measured")
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS], metavar="NAME")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULTS)
    asked = parser.parse_args()
    warnings.simplefilter("ignore", pipefit.PipefitWarning)
    told = {"machine": machine(), "turns": asked.turns, "steps": asked.steps}
    known = json.loads(asked.json.read_text()) if asked.json.exists() else {}
    if asked.part == "measured":
        made = [asdict(one) for model in asked.models for one in of_model(model, asked.turns, asked.steps)]
        runs = [*without(known.get("measured", []), asked.models), {**told, "rows": made}]
        made = sorted(
            (row for run in runs for row in run["rows"]), key=lambda row: [*MODELS].index(row["model"])
        )
        for row in made:
            print(f"{row['model']:10} {row['way']:14} {row['error']:+.1%}")
        for small in (False, True):
            errors = [abs(row["error"]) for row in made if row["model"].startswith("small") <= small]
            which = "with small models" if small else "without small models"
            if errors:  # there may be none but of small ones
                print(f"median error {statistics.median(errors):.1%} {which}")
        known["measured"] = runs
    else:
        rows = paced(asked.turns, asked.steps)
        agreed = agreement(rows, NOISE)
        print(*map(line, rows), sep="\n")
        print(f"{agreed.in_order} of {agreed.pairs} pairs in order; tau over all pairs {agreed.tau:.2f}")
        known["paced"] = {**told, "rows": [*map(asdict, rows)], "agreement": asdict(agreed)}
    asked.json.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
