"""Any document as blocks of text: one function for each kind, chosen by type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipefit.cluster import Cluster
from pipefit.fits import Fit
from pipefit.overviews import Overview
from pipefit.plans import Plan
from pipefit.post_mortems import PostMortem
from pipefit.profiles import Measurement, ModelProfile
from pipefit.program import Program, UncheckedProgram
from pipefit.report.cluster import describe_cluster
from pipefit.report.compare import Comparison, describe_comparison
from pipefit.report.difference import Difference, describe_difference
from pipefit.report.fit import describe_fit
from pipefit.report.overview import describe_overview
from pipefit.report.plan import describe_plan
from pipefit.report.post_mortem import describe_post_mortem
from pipefit.report.profile import describe_measurement, describe_profile
from pipefit.report.trace import describe_trace
from pipefit.tables import Block
from pipefit.texts import counted
from pipefit.trace import Trace

Shows = (
    Cluster | Comparison | Difference | Fit | Measurement | ModelProfile | Overview | Plan | PostMortem | Program
    | Trace | UncheckedProgram
)  # fmt: skip


def describe(document: Shows) -> list[Block]:
    """What a person wants to see of a document."""
    words = next(words for kind, words in _WORDS.items() if isinstance(document, kind))
    return words(document)


def describe_program(program: UncheckedProgram) -> list[Block]:
    """The text form, a paragraph for each of its lines that is not empty."""
    head = f"program of {counted(program.stages, 'stage')} and {counted(program.microbatches, 'microbatch')}"
    return [head, *(line for line in str(program).splitlines() if not line.endswith(": "))]


_WORDS: dict[type, Callable[[Any], list[Block]]] = {
    Cluster: describe_cluster,
    Comparison: describe_comparison,
    Difference: describe_difference,
    Fit: describe_fit,
    Measurement: describe_measurement,
    ModelProfile: describe_profile,
    Overview: describe_overview,
    Plan: describe_plan,
    PostMortem: describe_post_mortem,
    Trace: describe_trace,
    UncheckedProgram: describe_program,
}
