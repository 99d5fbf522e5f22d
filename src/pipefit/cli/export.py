"""`pipefit export`: a plan or trace in the format of another tool."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pipefit.cli.options import Json
from pipefit.cli.output import check_output, on_stderr, used
from pipefit.errors import UsageError

if TYPE_CHECKING:
    from pipefit.schema.json_io import Document
    from pipefit.schema.plan import Plan
    from pipefit.schema.trace import Trace

EXAMPLE = "pipefit export plan.json --to perfetto -o events.json"

Format = Literal[
    "perfetto", "memory-viz", "pipelining", "split-points", "megatron", "torchtitan", "automodel",
    "deepspeed", "trainer", "accelerate", "lightning", "slurm", "kubernetes",
]  # fmt: skip


def command(
    file: Annotated[
        Path, typer.Argument(metavar="PLAN|TRACE", help="A plan; for perfetto and memory-viz also a trace.")
    ],
    to: Annotated[
        Format,
        typer.Option(
            metavar="TOOL",
            help="perfetto: a trace for ui.perfetto.dev. memory-viz: one for pytorch.org/memory_viz. "
            "pipelining: torch.distributed.pipelining's CSV. split-points: the stages of its pipeline. "
            "megatron: arguments. torchtitan, automodel, deepspeed, accelerate: a configuration. trainer: "
            "Hugging Face's TrainingArguments. lightning: the arguments of its Trainer. slurm, kubernetes: "
            "a launch file.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Output file. Default: stdout.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a plan or trace in the format of another tool.

    Whatever a tool cannot do is refused by name, so that its file never trains differently from the plan.
    """
    from pipefit.schema.json_io import load, save_text

    check_output(output, file)
    text = _written(file, load(file), to)
    if output is None:
        if isinstance(text, bytes):
            raise UsageError(f"{to} is not a text format: name an output file, such as -o snapshot.pickle")
        sys.stdout.write(json.dumps({"tool": to, "text": text}) + "\n" if as_json else text)
        return
    save_text(text, output)
    if as_json:
        print(json.dumps({"tool": to, "file": str(output)}))
    else:
        on_stderr(f"saved to {output}")


def _written(file: Path, document: Document, to: Format) -> str | bytes:
    """Return the text, or the bytes, of the other format."""
    from pipefit import export

    match to:
        case "perfetto":
            return export.perfetto(_trace(file, document))
        case "memory-viz":
            return export.memory_snapshot(_trace(file, document))
        case "slurm":
            return export.slurm_script(_plan(file, document, "launch files"), str(file))
        case "kubernetes":
            return export.kubernetes_job(_plan(file, document, "launch files"), file.name)
    write, written = export.PLANS[to]
    plan = _plan(file, document, written)
    text = write(plan)
    for line in export.script_lines(plan) if to == "deepspeed" else ():
        on_stderr(f"the script itself must call {line}")
    return text


def _trace(file: Path, document: Document) -> Trace:
    """Return a trace; a plan is simulated first."""
    from pipefit.schema.plan import Plan
    from pipefit.schema.trace import Trace
    from pipefit.simulator import simulate

    if isinstance(document, Plan):
        with used(file):
            return simulate(document)
    if not isinstance(document, Trace):
        raise UsageError(f"{file} is not a plan or a trace")
    return document


def _plan(file: Path, document: Document, what: str) -> Plan:
    from pipefit.schema.plan import Plan

    if not isinstance(document, Plan):
        raise UsageError(f"{file} is not a plan: {what} are made of plans")
    return document
