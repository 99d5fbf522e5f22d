"""Rows: which samples of a microbatch a replica of a stage computes, and what of them it exchanges with its neighbours.

The replicas of a stage divide the samples of every microbatch, in order and equally. Where the stages next to each
other have different numbers of replicas, a message carries just the rows that both its ends have. A value that does
not depend on the samples, such as a table of positions, goes whole to every receiver, and once: from the replica that
has the receiver's first row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from math import prod
from typing import NamedTuple

from pipefit.errors import UsageError
from pipefit.layer_costs import Value
from pipefit.texts import counted

Rows = tuple[int, int]  # of a microbatch: the first, and the one behind the last


class Division(NamedTuple):
    """How the values between two stages are divided: `front` replicas send them to `behind` replicas.

    `dimensions` has for every value the dimension of its samples, which is divided. It is None where the value has
    none, and for all values where there are as many replicas on both sides: each then sends its partner all it has.
    """

    dimensions: tuple[int | None, ...]
    front: int
    behind: int

    def carries_all(self, sender: int, receiver: int) -> bool:
        """Whether the message between these replicas, towards the model's end or back, has values that go whole."""
        return receiver * self.front // self.behind == sender

    def carried(self, sender: int, receiver: int) -> list[tuple[int, int | None]]:
        """The numbers of the values in the message between these replicas, each with its divided dimension."""
        whole = self.carries_all(sender, receiver)
        return [(n, k) for n, k in enumerate(self.dimensions) if k is not None or whole]


def rows_of(replica: int, samples: int) -> Rows:
    """The rows of a replica that has so many samples."""
    return replica * samples, (replica + 1) * samples


def common_rows(own: Rows, samples: int) -> Iterator[tuple[int, Rows]]:
    """The replicas of another stage, of `samples` rows each, that have some of the `own` rows; and which these are."""
    first, end = own
    for replica in range(first // samples, -(-end // samples)):
        start, stop = rows_of(replica, samples)
        yield replica, (max(first, start), min(end, stop))


def dimensions(
    one: Sequence[Value], other: Sequence[Value], samples: tuple[int, int], *, gathers: bool = False
) -> tuple[int | None, ...]:
    """The dimension of the samples of every value, which is known in two sizes, for so many samples each.

    Raises:
        UsageError: a value depends on the number of samples, but not in one dimension that is this number; its rows lie
            apart in memory; or a sender `gathers` what several receivers have of a gradient without samples.
    """
    found = tuple(_dimension(a, b, samples, number) for number, (a, b) in enumerate(zip(one, other, strict=True)))
    for number, (dimension, value) in enumerate(zip(found, one, strict=True)):
        if gathers and dimension is None and value.has_gradient:
            raise UsageError(f"value {number} has a gradient but no samples, and several replicas would send one back")
    return found


def _dimension(one: Value, other: Value, samples: tuple[int, int], number: int) -> int | None:
    differing = [k for k, sizes in enumerate(zip_longest(one.shape, other.shape)) if sizes[0] != sizes[1]]
    if not differing:
        return None
    known = zip((one, other), samples, strict=True)
    shapes = " and ".join(f"{'x'.join(map(str, value.shape))} for {counted(count, 'sample')}" for value, count in known)
    alike = len(one.shape) == len(other.shape) and len(differing) == 1
    if not alike or (one.shape[differing[0]], other.shape[differing[0]]) != samples:
        raise UsageError(f"value {number} has no dimension of the samples that could be divided: it is {shapes}")
    if prod(one.shape[: differing[0]]) > 1:
        raise UsageError(f"value {number} has its samples along dimension {differing[0]}, not the first ({shapes})")
    return differing[0]
