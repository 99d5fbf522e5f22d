"""`pipefit train`: a plan, run by one worker process for each device."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from pipefit.cli.options import Json, Model, Output, PlanFile, Settings, Steps

if TYPE_CHECKING:
    from pipefit.trace import Trace


def command(
    plan: PlanFile,
    model: Model,
    settings: Settings = [],  # noqa: B006 - typer reads it and makes a list of its own
    steps: Steps = 10,
    seed: Annotated[int, typer.Option(min=0, help="Decides weights, data and dropout.")] = 0,
    timeout: Annotated[
        float, typer.Option(min=1, max=1e6, metavar="SECONDS", help="Longest wait for another worker.")
    ] = 60.0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Train MODEL as PLAN says.

    One worker process for each device of the plan; what it measured is a trace, like a prediction.
    """
    from pipefit.cli.model import resolve
    from pipefit.cli.output import check_output
    from pipefit.cli.progress import progress
    from pipefit.files import load, save
    from pipefit.plan import Plan

    check_output(output)
    document = load(plan, Plan)
    factory = partial(resolve, model, settings, document.training.precision)
    factory()  # a mistake in MODEL is told here, before any worker starts
    from pipefit.runtime import train

    with progress("training") as report:
        losses, trace = train(
            factory,
            document,
            steps=steps,
            seed=seed,
            timeout_seconds=timeout,
            on_step=lambda step, loss: report(step + 1, steps, f"loss {loss:.4f}"),
        )
    if output is not None:
        save(trace, output)
    _print(losses, trace, as_json=as_json)
    if output is not None and not as_json:
        print(f"saved to {output}", file=sys.stderr)


def _print(losses: list[float], trace: Trace, *, as_json: bool) -> None:
    """The losses and the trace."""
    from pipefit.files import dumps
    from pipefit.report.tables import write
    from pipefit.report.trace import describe_trace

    if as_json:
        print(json.dumps({"losses": losses, "trace": json.loads(dumps(trace))}))
    else:
        write([f"loss {losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last", *describe_trace(trace)])
