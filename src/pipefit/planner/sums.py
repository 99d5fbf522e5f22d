"""Splits a chain of weights so that the heaviest part is as light as can be: what baselines minimise.

Exact for integers: bisection on the heaviest part, each try a greedy filling by binary search. O(P log L) for each
of the few dozen tries. Among equals the first parts are filled first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise


def lightest_parts(weights: Sequence[int], parts: int) -> tuple[int, tuple[int, ...]]:
    """The heaviest sum, and edges 0 = e0 < e1 < ... = len(weights) of `parts` parts whose heaviest sum is lowest.
    Weights are not negative.
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
    """Parts of at most `most` each, early ones as long as can be; None where that is impossible."""
    layers = len(sums) - 1
    edges = [0]
    for later in reversed(range(parts)):
        stop = min(bisect_right(sums, sums[edges[-1]] + most) - 1, layers - later)
        if stop <= edges[-1]:
            return None
        edges.append(stop)
    return tuple(edges) if edges[-1] == layers else None


def _heaviest(sums: Sequence[int], edges: Sequence[int]) -> int:
    return max(sums[b] - sums[a] for a, b in pairwise(edges))
