"""GPipe: all forwards, then all backwards. (Huang et al., 2019.)

Simple, and every stage holds all M microbatches in flight. Bubble: (P-1)/(M+P-1) of a step.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.program import Kind


def gpipe(stage: int, stages: int, microbatches: int) -> Iterator[tuple[Kind, int]]:
    """The compute actions of one stage, in order. Backwards run in the order of plain gradient accumulation."""
    yield from ((Kind.FORWARD, m) for m in range(microbatches))
    yield from ((Kind.BACKWARD, m) for m in range(microbatches))
