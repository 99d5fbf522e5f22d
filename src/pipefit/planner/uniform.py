"""The uniform planner: the same number of layers on every device, or one more, as one would split by hand.

Good where all layers are alike and memory is plenty. It ignores what layers cost, and that early stages of 1F1B hold
more microbatches. Instant.
"""

from __future__ import annotations

from pipefit.planner.question import Found, Question
from pipefit.provenance import Objective


def uniform(question: Question) -> Found:
    """Stages of equal length; if that is impossible, the first ones have one layer more. Stage s is on device s."""
    edges = equal_lengths(question.blocks, question.stages)
    longest = edges[1]
    return Found(question.in_order(edges), Objective.LAYERS, longest)


def equal_lengths(layers: int, stages: int) -> tuple[int, ...]:
    """Edges of stages of equal length, the first ones one layer longer if that is impossible."""
    length, longer = divmod(layers, stages)
    return tuple(stage * length + min(stage, longer) for stage in range(stages + 1))
