"""Recomputation trimmed to the blocks that need it: the fewest first blocks of every stage with which it fits.

The search (`hybrid.search`) knows the peaks of stages that recompute nothing or everything, block by block or as a
whole. Between these the peak of a stage that recomputes its first blocks is read of the stage's program. Fewer blocks
mostly need more memory, so that bisection finds the fewest; whatever it finds fits.

Costs: log2 of a stage's blocks programs of the stage.
"""

from __future__ import annotations

from pipefit.decisions import Decision
from pipefit.planner.hybrid.reading import Reader
from pipefit.planner.hybrid.search import Hybrid, recomputed_blocks
from pipefit.planner.question import Question


def trimmed(question: Question, found: Hybrid, reader: Reader) -> tuple[Decision, ...]:
    """The decisions of a plan: which blocks of its stages run again, for all microbatches."""
    decisions = list[Decision]()
    for number, one in enumerate(found.stages):
        if one.way.recompute == "never":
            continue
        room = min(question.cluster.budgets[device] for device in found.split.grid(number).devices)
        low, high = 0, one.stop - one.start  # blocks that are too few, and that are enough
        while high - low > 1:
            middle = (low + high) // 2
            (peak,) = reader.peaks(found.split, [number], [*recomputed_blocks(question, number, one, middle)])
            low, high = (low, middle) if peak <= room else (middle, high)
        decisions += recomputed_blocks(question, number, one, high)
    return tuple(decisions)
