"""`pipefit compare`: predicted beside measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pipefit.cli.options import Json

EXAMPLE = "pipefit compare predicted.json measured.json"


def command(
    predicted: Annotated[Path, typer.Argument(metavar="PREDICTED", help="A trace, such as pipefit simulate saves.")],
    measured: Annotated[Path, typer.Argument(metavar="MEASURED", help="A trace, of a dry run or of training.")],
    as_json: Json = False,
) -> None:
    """Compare what was predicted and measured.

    Peaks of every device, to the byte, and seconds of the last step. pipefit diff tells what two plans do
    otherwise.
    """
    from pipefit.files import load
    from pipefit.report.compare import compare, describe_comparison
    from pipefit.tables import write
    from pipefit.trace import Trace

    found = compare(load(predicted, Trace), load(measured, Trace))
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        write(describe_comparison(found))
