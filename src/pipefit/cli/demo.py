"""`pipefit demo`: a complete example on real text.

No split fits; a plan that offloads and recomputes does, and trains.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipefit.cli.options import Json
from pipefit.cli.progress import cleared_away, progress
from pipefit.errors import OutOfMemory, PipefitError
from pipefit.tables import Block, Table, write
from pipefit.texts import counted
from pipefit.units import format_bytes

if TYPE_CHECKING:
    from pipefit.capture import Task
    from pipefit.schema.plan import Plan
    from pipefit.schema.trace import Trace

_MODEL: dict[str, int] = {"layers": 8, "hidden": 128, "heads": 4, "sequence": 128}
_CLUSTER = "emulated:4x12MiB"
_MICROBATCH, _MICROBATCHES = 2, 8
EXAMPLE = "pipefit demo --steps 80"


def command(
    steps: Annotated[int, typer.Option(metavar="N", min=2, help="Training steps.")] = 40,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of weights and data.")] = 0,
    as_json: Json = False,
) -> None:
    """Out of memory, then a plan, then training.

    A byte-level GPT learns the sources of Python's standard library on four emulated devices of 12 MiB, on
    which no split of it fits. Takes about a minute and needs no GPU, no network and no data.
    """
    from pipefit.schema.json_io import load_cluster

    say = _silent if as_json else _print
    with progress("profiling") as report:
        from pipefit.models import build
        from pipefit.planner import plan
        from pipefit.profiler import profile
        from pipefit.report.plan import describe_plan
        from pipefit.runtime import certify, train
        from pipefit.simulator import simulate

        task: partial[Task] = partial(build, "gpt-stdlib", **_MODEL)
        costs = profile(task(), microbatch_size=_MICROBATCH, progress=report)
    cluster = load_cluster(_CLUSTER)
    question = partial(
        plan, costs, cluster, batch_size=_MICROBATCH * _MICROBATCHES, microbatches=_MICROBATCHES
    )
    say([_introduction(costs.layers, cluster.name)])

    split = question(planner="exact", allow_infeasible=True)
    with progress("training the best split"), cleared_away():
        failure = _run_out(task, split, seed)
    say([f"1. The split with the lowest peak, which {_needs(split)}:", f"   {failure}"])

    with progress("planning"):
        chosen = question()
    say(["2. The fastest plan that fits (pipefit plan):", *describe_plan(chosen)])
    with progress("dry run"):
        certified = certify(task(), chosen)
    with progress("training") as report, cleared_away():
        losses, measured = train(
            task,
            chosen,
            steps=steps,
            seed=seed,
            on_step=lambda step: report(step.step + 1, steps, f"loss {step.loss:.3f}"),
        )
    say(["3. Training it (pipefit train), four processes with enforced memory limits:", _losses(losses)])
    predicted = simulate(chosen)
    say(["4. Peaks, predicted and measured:", _peaks(predicted, certified, measured)])
    if as_json:
        json.dump(_result(failure, chosen, losses, predicted, certified, measured), sys.stdout)
        print()


def _run_out(task: partial[Task], plan: Plan, seed: int) -> str:
    """Train a split that does not fit for a step; return the error message.

    Raises:
        PipefitError: another error, or none.
    """
    from pipefit.runtime import train

    try:
        train(task, plan, steps=1, seed=seed)
    except OutOfMemory as error:
        return str(error)
    raise PipefitError("the split should have run out of memory, but did not")


def _needs(plan: Plan) -> str:
    """Describe the memory of a split's fullest device."""
    assert plan.prediction is not None
    return f"needs {format_bytes(max(plan.prediction.peak_bytes))}"


def _introduction(layers: tuple[str, ...], cluster: str) -> str:
    tokens = _MICROBATCH * _MICROBATCHES * _MODEL["sequence"]
    return (
        f"A byte-level GPT of {counted(len(layers), 'layer')} learns the sources of Python's standard "
        "library, "
        f"{tokens} bytes a step in {_MICROBATCHES} microbatches, on {cluster}."
    )


def _losses(losses: list[float]) -> str:
    """Format the loss every ten steps, and the mean of the last ten."""
    marks = sorted({0, *range(9, len(losses), 10)})
    course = "  ".join(f"{mark + 1}: {losses[mark]:.2f}" for mark in marks)
    last = losses[-10:]
    return (
        f"   loss in nats per byte, by step   {course}\n   mean of the last {len(last)}: "
        f"{sum(last) / len(last):.2f}"
    )


def _peaks(predicted: Trace, certified: Trace, measured: Trace) -> Block:

    rows = tuple(
        (
            str(a.device),
            format_bytes(a.budget_bytes),
            *(format_bytes(n) for n in peaks),
            str(peaks[2] - peaks[0]),
        )
        for a, b, c in zip(predicted.devices, certified.devices, measured.devices, strict=True)
        for peaks in [(a.peak_bytes, b.peak_bytes, c.peak_bytes)]
    )
    return Table(("device", "cap", "simulated", "dry run", "measured", "bytes apart"), rows)


def _result(
    failure: str, plan: Plan, losses: list[float], predicted: Trace, certified: Trace, measured: Trace
) -> dict[str, Any]:
    return {
        "best_split": failure,
        "split": plan.split,
        "decisions": list(map(str, plan.decisions)),
        "losses": losses,
        "peak_bytes": {trace.source: trace.peak_bytes for trace in (predicted, certified, measured)},
    }


def _print(blocks: list[Block]) -> None:

    write(blocks)
    print(flush=True)


def _silent(blocks: list[Block]) -> None:
    """Print nothing: with --json, stdout has only the result."""
