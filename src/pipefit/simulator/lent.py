"""Memory that one device lends to another, laid over its own memory by time.

All else on a device is a function of its program alone. Lent bytes come and go when the borrower says, so their place
among the lender's own actions follows from the clock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Loan(NamedTuple):
    """A change of the bytes that a device lends: when, by how much, in which action of whom."""

    seconds: float
    nbytes: int  # negative when they are given back
    step: int
    device: int
    position: int


def lent_during(loans: Sequence[Loan], intervals: Sequence[tuple[float, float]]) -> list[int]:
    """The most bytes lent within each interval; `loans` in order of time. What changes at its end is not within it."""
    times, levels = [loan.seconds for loan in loans], _levels(loans)
    highest = []
    for start, end in intervals:
        begin = bisect_right(times, start)
        highest.append(max(levels[begin : bisect_left(times, end, lo=begin) + 1]))
    return highest


def lent_at(loans: Sequence[Loan], ends: Sequence[float]) -> list[tuple[int, int]]:
    """For every loan: how many of the lender's actions had ended, and the most bytes lent as it changed."""
    levels = _levels(loans)
    return [(bisect_right(ends, loan.seconds), max(levels[k : k + 2])) for k, loan in enumerate(loans)]


def _levels(loans: Sequence[Loan]) -> list[int]:
    return list(accumulate((loan.nbytes for loan in loans), initial=0))
