"""Steps of an asynchronous schedule as one program, for oracles without the notion of a step."""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.lowering import lower, lower_drain
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program, joined


def one_program(plan: Plan, sizes: Sequence[int], *, drained: bool = False) -> Program:
    """Return a program of consecutive steps with these numbers of microbatches, then a drain if `drained`."""
    parts = [
        lower(plan, microbatches=size, entered=sum(sizes[:step]), steps=step)
        for step, size in enumerate(sizes)
    ]
    return joined([*parts, lower_drain(plan, entered=sum(sizes), steps=len(sizes))] if drained else parts)
