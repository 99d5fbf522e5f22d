"""`pipefit report`: a plan or trace as one HTML page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

EXAMPLE = "pipefit report plan.json measured.json -o page.html"


def command(
    file: Annotated[Path, typer.Argument(metavar="PLAN|TRACE", help="A plan, which is simulated, or a trace.")],
    measured: Annotated[
        Path | None,
        typer.Argument(metavar="[MEASURED]", help="A trace to draw beside it, of a dry run or of training."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Where the page goes; unless given, beside PLAN|TRACE."),
    ] = None,
) -> None:
    """Show a plan or trace as one HTML page.

    Memory over time, the timeline of every device, what fills it at its peak, decisions and their price. The page needs
    no network and no other file.
    """
    from pipefit.cli.output import check_output
    from pipefit.cli.progress import progress
    from pipefit.errors import UsageError
    from pipefit.files import load, save_text
    from pipefit.plans import Plan
    from pipefit.report.page import page
    from pipefit.trace import Trace

    document = load(file)  # first, for what is no file may have no name that the page's could be made of
    target = file.with_suffix(".html") if output is None else output
    check_output(target, file, measured)
    if not isinstance(document, Plan | Trace):
        raise UsageError(f"{file} is neither a plan nor a trace: pipefit show prints it")
    beside = None if measured is None else load(measured, Trace)
    with progress("drawing"):
        made = page(document, beside)
    save_text(made, target)
    print(f"saved to {target}", file=sys.stderr)
