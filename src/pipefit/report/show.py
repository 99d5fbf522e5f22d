"""Any document as blocks of text: one function for each kind, chosen by type."""

from __future__ import annotations

from pipefit.cluster import Cluster
from pipefit.plans import Plan
from pipefit.profiles import ModelProfile
from pipefit.program import Program
from pipefit.report.cluster import describe_cluster
from pipefit.report.profile import describe_profile
from pipefit.report.trace import describe_trace
from pipefit.tables import Block
from pipefit.texts import counted
from pipefit.trace import Trace


def describe(document: Cluster | ModelProfile | Plan | Program | Trace) -> list[Block]:
    """What a person wants to see of a document."""
    match document:
        case Cluster():
            return describe_cluster(document)
        case ModelProfile():
            return describe_profile(document)
        case Plan():
            return list(document.explanation)
        case Program():
            return describe_program(document)
        case Trace():
            return describe_trace(document)


def describe_program(program: Program) -> list[Block]:
    """The text form, a paragraph for each of its lines that is not empty."""
    head = f"program of {counted(program.stages, 'stage')} and {counted(program.microbatches, 'microbatch')}"
    return [head, *(line for line in str(program).splitlines() if not line.endswith(": "))]
