"""Splits a sequence of weights into consecutive parts so that the heaviest part is as light as possible.

Exact for integers: bisection on the weight of the heaviest part, with a greedy filling by binary search for each of the
few dozen tries, in O(P log L). Between equal solutions, the first parts are as long as possible.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise


def lightest_parts(weights: Sequence[int], parts: int) -> tuple[int, tuple[int, ...]]:
    """The lowest possible sum of the heaviest of `parts` parts, and their edges 0 = e0 < e1 < ... = len(weights).

    No weight is negative.
    """
    sums = [0, *accumulate(weights)]
    low, best = -1, (*range(parts), len(weights))
    high = _heaviest(sums, best)
    while high - low > 1:
        middle = (low + high) // 2
        edges = _filled(sums, parts, middle)
        if edges is None:
            low = middle
        else:
            best, high = edges, _heaviest(sums, edges)
    return high, best


def _filled(sums: Sequence[int], parts: int, most: int) -> tuple[int, ...] | None:
    """Edges of parts of at most `most` each, the first ones as long as possible; None where there are none."""
    count = len(sums) - 1
    edges = [0]
    for later in reversed(range(parts)):
        stop = min(bisect_right(sums, sums[edges[-1]] + most) - 1, count - later)
        if stop <= edges[-1]:
            return None
        edges.append(stop)
    return tuple(edges) if edges[-1] == count else None


def _heaviest(sums: Sequence[int], edges: Sequence[int]) -> int:
    return max(sums[b] - sums[a] for a, b in pairwise(edges))
