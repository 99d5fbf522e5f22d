"""The uniform planner: the same number of blocks on every device, or one more, as one would split by hand.

Good where all blocks are alike and memory is plenty. It ignores what blocks cost, and that early stages of 1F1B hold
more microbatches. Instant.
"""

from __future__ import annotations

from pipefit.planner.question import Found, Question
from pipefit.provenance import Objective


def uniform(question: Question) -> Found:
    """Stages of equal length; if that is impossible, the first ones have one block more. Stage s is on device s."""
    edges = equal_lengths(question.blocks, question.stages)
    longest = edges[1]
    return Found(question.in_order(edges), Objective.BLOCKS, longest)


def equal_lengths(blocks: int, stages: int) -> tuple[int, ...]:
    """Edges of stages of equal length, the first ones one block longer if that is impossible."""
    length, longer = divmod(blocks, stages)
    return tuple(stage * length + min(stage, longer) for stage in range(stages + 1))
