"""The first_last planner: equal numbers of blocks, but one less on the first stage and on the last.

As torchtitan does, where an embedding and a head come on top of the blocks and weigh as much as one each. So L + 2
blocks are distributed evenly, with one more on the first stages if that is impossible, and then the first and the last
stage lose one. A stage that would be empty takes a block from the longest. It ignores what blocks cost. Instant.
(torchtitan, `generate_llm_fqn_per_model_part` with both weights one.)
"""

from __future__ import annotations

from itertools import accumulate

from pipefit.planner.question import Found, Question
from pipefit.provenance import Objective


def first_last(question: Question) -> Found:
    """Stages of equal length, the first and the last one block shorter. Stage s is on device s."""
    counts = _lengths(question.blocks, question.stages)
    edges = (0, *accumulate(counts))
    return Found(question.in_order(edges), Objective.BLOCKS, max(counts), proven=False)


def _lengths(blocks: int, stages: int) -> list[int]:
    """Number of blocks of every stage."""
    length, longer = divmod(blocks + 2, stages)
    counts = [length + (stage < longer) for stage in range(stages)]
    counts[0] -= 1
    counts[-1] -= 1
    for stage in (0, stages - 1):
        while counts[stage] < 1:
            counts[counts.index(max(counts))] -= 1
            counts[stage] += 1
    return counts
