"""`pipefit report`: a plan, a trace or a post-mortem as one HTML page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pipefit.cli.options import Json
from pipefit.cli.output import check_output, on_stderr, used_together
from pipefit.cli.progress import progress
from pipefit.errors import UsageError

EXAMPLE = "pipefit report plan.json measured.json -o page.html"


def command(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Plan (simulated first), trace, or post-mortem."),
    ],
    measured: Annotated[
        Path | None,
        typer.Argument(metavar="[MEASURED]", help="Trace of a dry run or of training to draw next to it."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Output page. Default: next to FILE."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a plan, trace or post-mortem as one HTML page.

    Memory over time, the timeline of every device, the contents of its peak, and decisions with their price.
    The page needs no network and no other file.
    """
    from pipefit.report.page import page
    from pipefit.schema.json_io import load, save_text
    from pipefit.schema.plan import Plan
    from pipefit.schema.post_mortem import PostMortem
    from pipefit.schema.trace import Trace

    document = load(file)  # first, because no page name can be derived from the name of a missing file
    target = file.with_suffix(".html") if output is None else output
    check_output(target, file, measured)
    if not isinstance(document, Plan | Trace | PostMortem):
        raise UsageError(f"{file} is not a plan, trace or post-mortem: pipefit show prints it")
    if isinstance(document, PostMortem) and measured is not None:
        raise UsageError(f"{file} already contains a trace: remove {measured}, or name a plan before it")
    beside = None if measured is None else load(measured, Trace)
    drawn = {file: document} if measured is None else {file: document, measured: beside}
    with progress("drawing"), used_together(page, drawn):
        made = page(document, beside)
    save_text(made, target)
    if as_json:
        print(json.dumps({"page": str(target)}))
    else:
        on_stderr(f"saved to {target}")
