"""Synchronous 1F1B: after a warm-up, one forward and one backward in turn. (PipeDream-Flush, DAPPLE, 2021.)

Stage s of P holds min(M, P-s) microbatches in flight instead of GPipe's M, at the same bubble, (P-1)/(M+P-1) of a step.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.program import Kind


def one_f_one_b(stage: int, stages: int, microbatches: int) -> Iterator[tuple[Kind, int]]:
    """The compute actions of one stage, in order."""
    ahead = min(microbatches, stages - stage - 1)
    yield from ((Kind.FORWARD, m) for m in range(ahead))
    for m in range(ahead, microbatches):
        yield Kind.FORWARD, m
        yield Kind.BACKWARD, m - ahead
    yield from ((Kind.BACKWARD, m) for m in range(microbatches - ahead, microbatches))
