"""`pipefit compare`: predicted and measured figures side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pipefit.cli.options import Json
from pipefit.tables import write

EXAMPLE = "pipefit compare predicted.json measured.json"


def command(
    predicted: Annotated[
        Path, typer.Argument(metavar="PREDICTED", help="Predicted trace, as pipefit simulate saves it.")
    ],
    measured: Annotated[Path, typer.Argument(metavar="MEASURED", help="Trace of a dry run or of training.")],
    as_json: Json = False,
) -> None:
    """Compare a prediction with a measurement.

    Prints the peak of every device, to the byte, and the seconds of the last step. pipefit diff compares two
    plans.
    """
    from pipefit.report.traces import compare, describe_comparison
    from pipefit.schema.json_io import load
    from pipefit.schema.trace import Trace

    result = compare(load(predicted, Trace), load(measured, Trace))
    if as_json:
        print(json.dumps(result.as_json()))
    else:
        write(describe_comparison(result))
