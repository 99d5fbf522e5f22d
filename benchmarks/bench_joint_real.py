"""Claim: where no split fits, the plan of `joint` trains on devices that enforce their caps, with the peaks that were
certified; and of the plans of `joint`, of `mpress` and of whole-stage recomputation, the one predicted to be faster is.

Fourteen models of the gallery (`tests/gallery`), each on four emulated devices under 1F1B in eight microbatches. The
cap is below the lowest peak of all splits, which `exact` proves, and the split with that peak is trained too: it has to
run out of memory. Of 60, 70, 80, 90 and 95 per cent of that peak it is the first on which all three plans fit, or else
the first on which that of `joint` does.

Four devices have two cores here, so computing is paced as copies are: a forward, recomputation, backward or update ends
no earlier than the plan's profile says after its start, by the estimates for a kind of device on which a microbatch
takes a quarter of a second forward and backward through all stages. It sleeps until then, and sleeping takes no core.
What a layer keeps takes as long to the host and back as its passes, and an eighth of that to another device. Messages
are not paced. What is real are tensors, memory, caps, copies, and who waits for whom.

Plans train by turns, several times over. A plan's figure is the median of all steps but the first of each turn. Two
plans of a model are in order if the one that is predicted to be faster is faster, and count if their predictions
differ by more than the noise, as in `bench_overlap.py`.

    python benchmarks/bench_joint_real.py [--models NAME ...] [--turns 3] [--steps 4] [--json FILE] [--again] [--tables]

A quarter of an hour on a quiet machine. Each model is written to the JSON as soon as it is done, and one that is there
is not trained again without `--again`. `--tables` trains nothing, and puts the table of the JSON into
docs/compaction.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import pipefit
from gallery import MODELS
from measured_on import machine
from page_tables import markdown, put
from pipefit.capture import Task
from pipefit.errors import InfeasibleError, OutOfMemory, PipefitWarning, UsageError
from pipefit.planner import PLANNERS, PlanOptions, Question, solved
from pipefit.profiler import profile
from pipefit.runtime.engine.forward_backward import Passes
from pipefit.runtime.engine.in_flight import Flight
from pipefit.runtime.engine.stage import StageRunner
from pipefit.schema.actions import Action
from pipefit.schema.cluster import Cluster
from pipefit.schema.devices import DeviceKind, Link, Member
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from pipefit.timing import PassSeconds, layer_seconds

RESULTS = Path(__file__).parent / "results" / "joint_real.json"
NAMES = (
    "resnet", "vit", "convnext", "swin", "mixer", "masked", "rotary decoder", "sloped attention", "next item",
    "conformer", "flow matching", "diagonal", "time mix", "continuous filters",
)  # fmt: skip
DEVICES, MICROBATCHES = 4, 8
LARGER = 4  # times the gallery's microbatches, so that activations are more than parameters
PASSES = 0.25  # seconds forward and backward of a microbatch, through all stages
PEERS = 8  # times the host's rate between two devices
PARTS = 0.6, 0.7, 0.8, 0.9, 0.95  # of the lowest peak of all splits
WAYS: dict[str, tuple[str, PlanOptions]] = {
    "joint": ("joint", PlanOptions()),
    "mpress": ("mpress", PlanOptions()),
    "recompute": ("joint", PlanOptions(recompute="always")),
}
NOISE = 0.03  # of the longer step


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One plan: seconds of a step as predicted and as measured, with quartiles; peaks as certified and as measured."""

    way: str
    split: tuple[int, ...]
    decisions: tuple[str, ...]
    predicted_seconds: float
    seconds: float
    quartile_seconds: tuple[float, float]
    certified_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]

    @property
    def spread(self) -> float:
        """The difference between the quartiles, as a part of the median."""
        low, high = self.quartile_seconds
        return (high - low) / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One model: the cap, the lowest peak of all splits, what training that split met, and the plans that fit."""

    model: str
    blocks: int
    cap_bytes: int
    lowest_split_bytes: int
    out_of_memory: str
    trained: tuple[Trained, ...]

    @property
    def as_certified(self) -> bool:
        """Whether every plan's peaks were those that were certified, and none above the cap."""
        return all(
            one.peak_bytes == one.certified_bytes and max(one.peak_bytes) <= self.cap_bytes
            for one in self.trained
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the models that are missing, and print what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of a turn; the first is not counted")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--tables", action="store_true")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", PipefitWarning)
    done = read(options.json)
    for name in () if options.tables else options.models:
        if name not in done or options.again:
            done[name] = result(name, turns=options.turns, steps=options.steps)
            print(*told(done[name]), sep="\n", flush=True)
            written(options.json, [*done.values()])
    if done:
        print(summary([*done.values()]))
    if options.tables:
        put(tables([*done.values()]))


# -------------------------------------------------------------------- questions


def task_of(name: str) -> Task:
    """The model of that name, as a task."""
    return MODELS[name].task()


def question(name: str) -> Question:
    """The model on four devices with ample memory, whose speed and links are as the claim says."""
    size = LARGER * MODELS[name].size
    found = profile(task_of(name), microbatch_size=size)
    training = Training(batch_size=size * MICROBATCHES, microbatches=MICROBATCHES)
    return Question(profile=found, cluster=paced_cluster(found, training), training=training)


def paced_cluster(found: ModelProfile, training: Training) -> Cluster:
    """Devices so slow that a microbatch takes `PASSES` through all, with ample memory and links as slow."""
    ample = Cluster.emulated((DEVICES, 1 << 40))
    measurement, fast = found.at(training.microbatch_size), ample.devices[0].kind
    passes = sum(s.forward + s.backward for s in layer_seconds(measurement, fast, training))
    kind = slowed(fast, PASSES / passes)
    rate = 2 * sum(sum(cost.storages) for cost in measurement.costs) / PASSES
    devices = [Member.device(number) for number in range(DEVICES)]
    up = [Link(members=(device, Member.host(0)), bytes_per_second=rate) for device in devices]
    across = [Link(members=pair, bytes_per_second=PEERS * rate) for pair in combinations(devices, 2)]
    return replace(ample, devices=tuple(replace(d, kind=kind) for d in ample.devices), links=(*up, *across))


def slowed(kind: DeviceKind, times: float) -> DeviceKind:
    """A kind of device on which everything takes so many times as long."""
    return replace(
        kind,
        flops={dtype: rate / times for dtype, rate in kind.flops.items()},
        memory_bandwidth=kind.memory_bandwidth / times,
        operation_seconds=kind.operation_seconds * times,
    )


def capped(asked: Question, nbytes: int) -> Question:
    """The question with this memory on every device."""
    devices = tuple(replace(device, memory_bytes=nbytes) for device in asked.cluster.devices)
    return replace(asked, cluster=replace(asked.cluster, devices=devices))


def plans(asked: Question, lowest: int) -> tuple[int, dict[str, Plan]]:
    """The cap, and the plans that fit it."""
    best: tuple[int, dict[str, Plan]] | None = None
    for part in PARTS:
        cap = round(part * lowest)
        found = dict(fitting(capped(asked, cap)))
        if len(found) == len(WAYS):
            return cap, found
        if best is None and "joint" in found:
            best = cap, found
    if best is None:
        raise InfeasibleError(f"no plan of joint fits {asked.profile.model} below {lowest} bytes")
    return best


def fitting(asked: Question) -> Iterator[tuple[str, Plan]]:
    """The plans of all ways that fit."""
    for way, (planner, options) in WAYS.items():
        try:
            yield way, solved(replace(asked, options=options), PLANNERS[planner], name=planner)
        except (InfeasibleError, UsageError):
            continue


# -------------------------------------------------------------------- training


def result(name: str, *, turns: int, steps: int) -> Result:
    """All plans of a model, certified and trained by turns."""
    asked = question(name)
    split = solved(asked, PLANNERS["exact"], name="exact")
    assert split.prediction is not None, "planners predict"
    lowest = max(split.prediction.peak_bytes)
    cap, found = plans(asked, lowest)
    taken: dict[str, list[float]] = {way: [] for way in found}
    peaks: dict[str, tuple[int, ...]] = {}
    for _ in range(turns):
        for way, plan in found.items():
            _, trace = pipefit.train(partial(paced_task, name, plan), plan, steps=steps)
            taken[way] += trace.step_seconds[1:]
            peaks[way] = tuple(map(max, trace.peak_bytes, peaks.get(way, trace.peak_bytes)))
    return Result(
        model=name,
        blocks=asked.blocks,
        cap_bytes=cap,
        lowest_split_bytes=lowest,
        out_of_memory=refusal(name, replace(split, cluster=capped(asked, cap).cluster)),
        trained=tuple(figures(name, way, plan, taken[way], peaks[way], steps) for way, plan in found.items()),
    )


def figures(
    name: str, way: str, plan: Plan, taken: Sequence[float], peaks: tuple[int, ...], steps: int
) -> Trained:
    """What is told of a plan that was trained."""
    low, middle, high = statistics.quantiles(taken, n=4)
    return Trained(
        way=way,
        split=plan.split,
        decisions=tuple(map(str, plan.decisions)),
        predicted_seconds=Simulation(plan).step_seconds[-1],
        seconds=middle,
        quartile_seconds=(low, high),
        certified_bytes=pipefit.certify(task_of(name), plan, steps=steps).peak_bytes,
        peak_bytes=peaks,
    )


def refusal(name: str, plan: Plan) -> str:
    """What training says that runs out of memory; empty if it does not."""
    try:
        pipefit.train(partial(task_of, name), plan, steps=2)
    except OutOfMemory as error:
        return str(error)
    return ""


def paced_task(name: str, plan: Plan) -> Task:
    """The task, in a worker whose computing is paced as the plan's profile says."""
    if mp.parent_process() is not None:
        seconds = layer_seconds(plan.measurement, plan.cluster.devices[0].kind, plan.training)
        pace(Passes, StageRunner, seconds)
    return task_of(name)


def pace(passes: type[Passes], stage: type[StageRunner], seconds: Sequence[PassSeconds]) -> None:
    """Make passes and updates of layers take these seconds, the last of which are those of the loss."""

    def loss(passes: Passes, end: int) -> PassSeconds:
        return seconds[-1] if passes.last and end == passes.stop else PassSeconds(0.0, 0.0, 0.0)

    def ahead(passes: Passes, _: Flight, first: int, end: int) -> float:
        return sum(one.forward for one in seconds[first:end]) + loss(passes, end).forward

    def back(passes: Passes, _: Flight, first: int, end: int) -> float:
        return sum(one.backward for one in seconds[first:end]) + loss(passes, end).backward

    def update(stage: StageRunner, action: Action) -> float:
        layers = range(*(action.layers or (stage.start, stage.stop)))
        return (
            sum(seconds[number].update for number in layers) if action.place is None else 0.0
        )  # else the host's

    for name, runner, least in (
        ("forward", passes, ahead),
        ("checkpoint", passes, ahead),
        ("recompute", passes, ahead),
        ("backward", passes, back),
        ("step", stage, update),
    ):
        setattr(runner, name, lasting(getattr(runner, name), least))


def lasting(method: Callable[..., Any], least: Callable[..., float]) -> Callable[..., Any]:
    """The method, which ends no earlier than so many seconds after its start."""

    def timed(self: Any, *arguments: Any) -> Any:
        until = time.monotonic() + least(self, *arguments)
        made = method(self, *arguments)
        time.sleep(max(0.0, until - time.monotonic()))
        return made

    return timed


# -------------------------------------------------------------------- the JSON, and what it says


def read(path: Path) -> dict[str, Result]:
    """The models that are there."""
    if not path.exists():
        return {}
    found = [result_of(one) for one in json.loads(path.read_text(encoding="utf-8"))["models"]]
    return {one.model: one for one in found}


def result_of(document: dict[str, Any]) -> Result:
    """A result as it was written."""
    trained = [
        {name: tuple(v) if isinstance(v, list) else v for name, v in one.items()}
        for one in document["trained"]
    ]
    return Result(**{**document, "trained": tuple(Trained(**one) for one in trained)})


def written(path: Path, results: Sequence[Result]) -> None:
    """Write all results; they replace what was there."""
    document = {"machine": machine(), "models": [asdict(one) for one in results]}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    new.replace(path)


def told(one: Result) -> Iterator[str]:
    """The lines of a model."""
    part = one.cap_bytes / one.lowest_split_bytes
    peaks = "peaks as certified" if one.as_certified else "PEAKS NOT AS CERTIFIED"
    split = "runs out of memory" if one.out_of_memory else "TRAINS"
    yield f"{one.model}: {one.blocks} blocks, {part:.0%} of the lowest peak of any split, which {split}; {peaks}"
    for plan in one.trained:
        low, high = plan.quartile_seconds
        yield (
            f"    {plan.way:10} predicted {plan.predicted_seconds:.3f} s, measured {plan.seconds:.3f} s "
            f"({low:.3f} to {high:.3f})"
        )


def tables(results: Sequence[Result]) -> dict[str, str]:
    """The table of the docs, by its title: of every way, seconds as predicted and as measured; and the summary."""
    if not results:
        return {}
    lines = []
    for one in results:
        plans = {plan.way: plan for plan in one.trained}
        cells = [
            f"{p.predicted_seconds:.2f}, {p.seconds:.2f}" if (p := plans.get(way)) else "-" for way in WAYS
        ]
        lines.append((one.model, f"{one.cap_bytes / one.lowest_split_bytes:.0%}", *cells))
    text = "\n".join(f"- {line}." for line in summary(results).splitlines())
    return {"trained": f"{markdown(('model', 'cap', *WAYS), lines)}\n\n{text}"}


def ordered(one: Result) -> Iterator[bool]:
    """Of every two plans whose predictions differ by more than the noise, whether they are in order."""
    noise = max(NOISE, 2 * statistics.median(plan.spread for plan in one.trained))
    for a, b in combinations(one.trained, 2):
        if abs(a.predicted_seconds - b.predicted_seconds) > noise * max(
            a.predicted_seconds, b.predicted_seconds
        ):
            yield (a.predicted_seconds < b.predicted_seconds) == (a.seconds < b.seconds)


def summary(results: Sequence[Result]) -> str:
    """All models together."""
    pairs = [pair for one in results for pair in ordered(one)]
    off = [plan.seconds / plan.predicted_seconds for one in results for plan in one.trained]
    over = sum(bool(one.out_of_memory) for one in results)
    certified = sum(one.as_certified for one in results)
    lines = [
        f"{over} of {len(results)} models run out of memory under the split with the lowest peak",
        f"{certified} of {len(results)} train below the cap by all plans that fit, with the peaks that were certified",
        f"{sum(pairs)} of {len(pairs)} pairs of plans in the predicted order",
        f"measured steps are {min(off):.2f} to {max(off):.2f} of predicted, {statistics.median(off):.2f} in the median",
    ]
    for other in ("mpress", "recompute"):
        gains = [
            plans[other].seconds / plans["joint"].seconds
            for one in results
            if {"joint", other} <= (plans := {plan.way: plan for plan in one.trained}).keys()
        ]
        if gains:
            lines.append(
                f"joint is {statistics.mean(gains):.2f} times as fast as {other} in the mean of {len(gains)}, "
                f"{min(gains):.2f} to {max(gains):.2f}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
