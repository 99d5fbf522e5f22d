"""GPipe: all forwards, then all backwards (Huang et al., 2019).

Every stage holds all M microbatches in flight. Bubble: (P-1)/(M+P-1) of a step. Two orders of the backwards:
`gpipe` runs them in the order of plain gradient accumulation, so that gradient sums equal those of plain
training bit by bit; `torchgpipe` runs them from the last microbatch to the first, as GPipe and torchgpipe do.

If a rank holds several stages, the microbatches go through them in groups as large as the number of ranks: a
rank computes one of its stages for all microbatches of a group, then its next stage. So rank 0 is ready for
an output of the last rank when it has computed the group, and no rank waits for a receiver that is busy with
later microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipefit.lowering.schedules import Compute
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
