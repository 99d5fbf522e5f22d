"""`pipefit diff`: the differences between two plans or two traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from pipefit.cli.options import Json
from pipefit.cli.output import used_together
from pipefit.errors import UsageError
from pipefit.tables import write

EXAMPLE = "pipefit diff plan.json other.json"


def command(
    first: Annotated[Path, typer.Argument(metavar="FIRST", help="A plan or a trace.")],
    second: Annotated[Path, typer.Argument(metavar="SECOND", help="Another document of the same kind.")],
    as_json: Json = False,
) -> None:
    """Show the differences between two plans or traces.

    The requests, moved layers, recomputation and offloading with their reasons, and the effect on the peak of
    every device and on the step. pipefit compare compares a prediction with a measurement.
    """
    from pipefit.report.difference import describe_difference, difference_of_plans, difference_of_traces
    from pipefit.schema.json_io import load, name_of_kind
    from pipefit.schema.plan import Plan
    from pipefit.schema.trace import Trace
    from pipefit.simulator import simulate

    one, two = load(first), load(second)
    if isinstance(one, Plan) and isinstance(two, Plan):
        with used_together(simulate, {first: one, second: two}):
            result = difference_of_plans(one, two)
    elif isinstance(one, Trace) and isinstance(two, Trace):
        result = difference_of_traces(one, two)
    else:
        kinds = " and ".join(
            f"{path} is a {name_of_kind(type(it))}" for path, it in ((first, one), (second, two))
        )
        raise UsageError(f"{kinds}: name two plans or two traces; pipefit simulate makes a trace of a plan")
    if as_json:
        print(json.dumps(result.as_json()))
    else:
        write(describe_difference(result), width=80)
