"""Synchronous 1F1B: after a warm-up, one forward and one backward alternate (PipeDream-Flush, DAPPLE, 2021).

Stage s of P holds min(M, P-s) microbatches in flight instead of GPipe's M, at the same bubble, (P-1)/(M+P-1)
of a step. `eager_1f1b` warms up longer, to min(M, 2(P-s)-1) microbatches in flight, so that computing hides
messages that take as long. (DAPPLE's warm-up rules, PPoPP 2021, section 4; eager 1F1B, MLSys 2023.)
"""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.lowering.schedules import Compute, check_alone
from pipefit.schema.actions import Kind


def one_f_one_b(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Compute]:
    """Generate the compute actions of one rank, in order; each rank holds P-s microbatches in flight.

    Raises:
        UsageError: a rank holds several stages, for which this order is not defined.
    """
    return _after_warm_up("1f1b", rank, chunks, microbatches, ranks - rank - 1)


def eager_1f1b(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Compute]:
    """Generate the same order after twice the number of warm-up forwards.

    Raises:
        UsageError: a rank holds several stages, for which this order is not defined.
    """
    return _after_warm_up("eager-1f1b", rank, chunks, microbatches, 2 * (ranks - rank - 1))


def _after_warm_up(name: str, rank: int, chunks: int, microbatches: int, forwards: int) -> Iterator[Compute]:
    """Generate `forwards` forwards, then alternating forwards and backwards, then the remaining backwards."""
    check_alone(name, chunks)
    ahead = min(microbatches, forwards)
    yield from (Compute(Kind.FORWARD, rank, m) for m in range(ahead))
    for m in range(ahead, microbatches):
        yield Compute(Kind.FORWARD, rank, m)
        yield Compute(Kind.BACKWARD, rank, m - ahead)
    yield from (Compute(Kind.BACKWARD, rank, m) for m in range(microbatches - ahead, microbatches))
