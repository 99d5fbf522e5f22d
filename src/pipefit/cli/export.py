"""`pipefit export`: a plan or trace in the format of another tool."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from pipefit.files import Document

EXAMPLE = "pipefit export plan.json --to perfetto -o events.json"


def command(
    file: Annotated[Path, typer.Argument(metavar="PLAN|TRACE", help="A plan, or for perfetto also a trace.")],
    to: Annotated[
        Literal["perfetto", "pipelining"],
        typer.Option(help="perfetto: a trace for ui.perfetto.dev. pipelining: torch.distributed.pipelining's CSV."),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where it goes; stdout unless given.")
    ] = None,
) -> None:
    """Write a plan or trace in the format of another tool."""
    from pipefit.cli.output import check_output
    from pipefit.files import load, save_text

    check_output(output, file)
    text = _perfetto(file, load(file)) if to == "perfetto" else _pipelining(file, load(file))
    if output is None:
        sys.stdout.write(text)
        return
    save_text(text, output)
    print(f"saved to {output}", file=sys.stderr)


def _perfetto(file: Path, document: Document) -> str:
    """A plan is simulated first."""
    from pipefit.errors import UsageError
    from pipefit.export.perfetto import perfetto
    from pipefit.plans import Plan
    from pipefit.simulator import simulate
    from pipefit.trace import Trace

    trace = simulate(document) if isinstance(document, Plan) else document
    if not isinstance(trace, Trace):
        raise UsageError(f"{file} is neither a plan nor a trace")
    return perfetto(trace)


def _pipelining(file: Path, document: Document) -> str:
    from pipefit.errors import UsageError
    from pipefit.export.pipelining import pipelining_csv
    from pipefit.plans import Plan

    if not isinstance(document, Plan):
        raise UsageError(f"{file} is no plan: torch's schedules are made of plans")
    return pipelining_csv(document)
