"""Stages that run again as a whole, trimmed to the blocks that have to: the fewest of the first ones that fit.

The search (`hybrid.search`) knows the peaks of stages that keep everything, or their inputs alone. Between these the
peak of a run of the first blocks is read of the stage's program. Fewer blocks mostly need more memory, so that
bisection finds the fewest; whatever it finds fits.

Costs: log2 of a stage's blocks programs of the stage.
"""

from __future__ import annotations

from pipefit.decisions import Decision, Run, What
from pipefit.planner.hybrid.programme import Placed
from pipefit.planner.hybrid.reading import Reader
from pipefit.planner.hybrid.search import Hybrid
from pipefit.planner.question import Question


def trimmed(question: Question, found: Hybrid, reader: Reader) -> tuple[Decision, ...]:
    """The decisions of a plan: which blocks of its stages run again, for all microbatches."""
    decisions = list[Decision]()
    for number, one in enumerate(found.stages):
        if not one.way.again:
            continue
        room = min(question.cluster.budgets[device] for device in found.split.grid(number).devices)
        low, high = 0, one.stop - one.start  # blocks that are too few, and that are enough
        while high - low > 1:
            middle = (low + high) // 2
            (peak,) = reader.peaks(found.split, [number], [_again(question, number, one, middle)])
            low, high = (low, middle) if peak <= room else (middle, high)
        decisions.append(_again(question, number, one, high))
    return tuple(decisions)


def _again(question: Question, number: int, one: Placed, blocks: int) -> Decision:
    """The decision that so many of the first blocks of a stage run again."""
    layers = Run(start=question.edges[one.start], stop=question.edges[one.start + blocks])
    return Decision(stage=number, subject=layers, what=What.RECOMPUTE)
