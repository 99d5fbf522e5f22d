"""Synchronous 1F1B: after a warm-up, one forward and one backward in turn. (PipeDream-Flush, DAPPLE, 2021.)

Stage s of P holds min(M, P-s) microbatches in flight instead of GPipe's M, at the same bubble, (P-1)/(M+P-1) of a step.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.actions import Kind
from pipefit.errors import UsageError
from pipefit.schedule.order import Compute


def one_f_one_b(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Compute]:
    """The compute actions of one rank, in order.

    Raises:
        UsageError: a rank holds several stages, for which this order is not defined.
    """
    if chunks > 1:
        raise UsageError(
            f"1f1b is an order for one stage on each device, not for {chunks}: use schedule gpipe, or give every stage "
            "a device of its own"
        )
    ahead = min(microbatches, ranks - rank - 1)
    yield from (Compute(Kind.FORWARD, rank, m) for m in range(ahead))
    for m in range(ahead, microbatches):
        yield Compute(Kind.FORWARD, rank, m)
        yield Compute(Kind.BACKWARD, rank, m - ahead)
    yield from (Compute(Kind.BACKWARD, rank, m) for m in range(microbatches - ahead, microbatches))
