"""Steps of an endless schedule as one program, for oracles that know nothing of steps."""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.lowering import lower, lower_drain
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program, joined


def one_program(plan: Plan, sizes: Sequence[int], *, drained: bool = False) -> Program:
    """Steps of so many microbatches, one after the other, with a drain behind them if `drained`."""
    parts = [
        lower(plan, microbatches=size, entered=sum(sizes[:step]), steps=step)
        for step, size in enumerate(sizes)
    ]
    return joined([*parts, lower_drain(plan, entered=sum(sizes), steps=len(sizes))] if drained else parts)
