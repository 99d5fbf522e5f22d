"""The synchronous schedules: GPipe and 1F1B.

GPipe: all forwards, then all backwards (Huang et al., 2019).

Every stage holds all M microbatches in flight. Bubble: (P-1)/(M+P-1) of a step. Two orders of the backwards:
`gpipe` runs them in the order of plain gradient accumulation, so that gradient sums equal those of plain
training bit by bit; `torchgpipe` runs them from the last microbatch to the first, as GPipe and torchgpipe do.

If a rank holds several stages, the microbatches go through them in groups as large as the number of ranks: a
rank computes one of its stages for all microbatches of a group, then its next stage. So rank 0 is ready for
an output of the last rank when it has computed the group, and no rank waits for a receiver that is busy with
later microbatches.

Synchronous 1F1B: after a warm-up, one forward and one backward alternate (PipeDream-Flush, DAPPLE, 2021).

Stage s of P holds min(M, P-s) microbatches in flight instead of GPipe's M, at the same bubble, (P-1)/(M+P-1)
of a step. `eager_1f1b` warms up longer, to min(M, 2(P-s)-1) microbatches in flight, so that computing hides
messages that take as long. (DAPPLE's warm-up rules, PPoPP 2021, section 4; eager 1F1B, MLSys 2023.)
"""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.lowering.schedules import Compute, check_alone
from pipefit.schema.actions import Kind


def gpipe(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Compute]:
    """Generate the compute actions of one rank, in order. Backwards run from the first microbatch to the
    last.
    """
    numbers = range(microbatches)
    yield from _rounds(Kind.FORWARD, rank, ranks, range(chunks), numbers)
    yield from _rounds(Kind.BACKWARD, rank, ranks, reversed(range(chunks)), numbers)


def torchgpipe(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Compute]:
    """Generate the compute actions of one rank, in order. Backwards run from the last microbatch to the
    first.
    """
    numbers = range(microbatches)
    yield from _rounds(Kind.FORWARD, rank, ranks, range(chunks), numbers)
    yield from _rounds(Kind.BACKWARD, rank, ranks, reversed(range(chunks)), numbers[::-1])


def _rounds(
    kind: Kind, rank: int, ranks: int, chunks: Iterator[int] | range, numbers: range
) -> Iterator[Compute]:
    """Generate `kind` for every stage of the rank and every microbatch, in groups of `ranks` microbatches."""
    order = list(chunks)
    for first in range(0, len(numbers), ranks):
        for chunk in order:
            for microbatch in numbers[first : first + ranks]:
                yield Compute(kind, chunk * ranks + rank, microbatch)


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
