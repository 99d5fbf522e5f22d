"""`pipefit train`: a plan, run by one worker process for each device."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import isfinite
from pathlib import Path
from time import perf_counter
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
        float,
        typer.Option(
            min=1, max=1e6, metavar="SECONDS", help="Longest that an action may take; over 120 s also the start."
        ),
    ] = 60.0,
    numbers: Annotated[
        bool,
        typer.Option("--numbers/--no-numbers", help="Compare the numbers of a traced model's chain first, if cheap."),
    ] = True,
    metrics: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a line of JSON as each step ends: its number, loss and seconds."),
    ] = None,
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
    from pipefit.plans import Plan

    check_output(output)
    check_output(metrics)
    document = load(plan, Plan)
    factory = partial(resolve, model, settings, document.training.precision)
    factory()  # a mistake in MODEL is told here, before any worker starts
    from pipefit.runtime import train
    from pipefit.runtime.launch import START_SECONDS

    with progress("training") as report, _metrics(metrics) as note:

        def on_step(step: int, loss: float) -> None:
            note(step, loss)
            report(step + 1, steps, f"loss {loss:.4f}")

        losses, trace = train(
            factory,
            document,
            steps=steps,
            seed=seed,
            timeout_seconds=timeout,
            start_seconds=max(timeout, START_SECONDS),
            numbers=numbers,
            on_step=on_step,
        )
    if output is not None:
        save(trace, output)
    _print(losses, trace, as_json=as_json)
    if output is not None and not as_json:
        print(f"saved to {output}", file=sys.stderr)


@contextmanager
def _metrics(path: Path | None) -> Iterator[Callable[[int, float], None]]:
    """A function to call with (step, loss) as each step ends. Its line is in the file at once, whatever happens later.

    Seconds are those since the step before ended; the first step's include the start of the workers.

    Raises:
        FileError: the file cannot be written, as on a full disk.
    """
    from pipefit.errors import FileError

    if path is None:
        yield lambda step, loss: None
        return
    last = perf_counter()
    with path.open("wb", buffering=0) as file:

        def note(step: int, loss: float) -> None:
            nonlocal last
            now = perf_counter()
            # a loss that is not finite has no number in JSON
            told = loss if isfinite(loss) else str(loss)
            line = json.dumps({"step": step, "loss": told, "seconds": now - last}) + "\n"
            try:
                file.write(line.encode())
            except OSError as error:
                raise FileError(f"{path} cannot be written: {error.strerror}; step {step} was the last") from error
            last = now

        yield note


def _print(losses: list[float], trace: Trace, *, as_json: bool) -> None:
    """The losses and the trace."""
    from pipefit.files import dumps
    from pipefit.report.trace import describe_trace
    from pipefit.tables import write

    if as_json:
        print(json.dumps({"losses": losses, "trace": json.loads(dumps(trace))}))
    else:
        write([f"loss {losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last", *describe_trace(trace)])
