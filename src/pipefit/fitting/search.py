"""The largest number of which a statement is true: exponential search, then bisection.

The statement is true up to some number and false beyond it. Finding the two neighbours at the edge takes about
2 log2(n) judgements if the edge is n places from the start, however far the end is. A number may also be refused: the
statement has no answer there (a hidden size that is no multiple of the number of heads). Then the next larger number is
judged; refusals are assumed to be cheap.

Who knows where the edge is likely to be may say so (`Guess`): such a number is judged in place of the middle, or of one
twice as far, until a few have left more than half of what there was, or have been nearer. A wrong guess costs a
judgement, and never changes the answer. None is followed much farther than what is known, for a number far beyond the
edge may take very long to judge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

_GUESSES = 3  # that may leave more than half of the numbers, or be nearer than twice as far
_FAR = 16  # times what is known to be true, beyond which no guess is followed
PATIENCE = 64  # refusals in a row, after which nothing larger is asked for

Judge = Callable[[int], bool | None]
Guess = Callable[[int], int]  # the largest number that is likely to be true, by the largest that is known to be


class Edge(NamedTuple):
    """The largest number found true and the smallest found false; all between were refused. None: there is no such."""

    holds: int | None
    fails: int | None


def edge(judge: Judge, numbers: range, guess: Guess | None = None) -> Edge:
    """The edge of a statement among rising `numbers`. `judge` says True, then False; None is a refusal."""
    place = _accepted(judge, numbers, range(min(len(numbers), PATIENCE)))
    if place is None:
        return Edge(None, None)
    if not judge(numbers[place]):
        return Edge(None, numbers[place])
    low, high = _gallop(judge, numbers, place, guess)
    left = _GUESSES
    while high is not None:
        wanted = (low + high) // 2 if guess is None or not left else _place(numbers, guess(numbers[low]), low, high)
        place, width = _between(judge, numbers, low, high, wanted), high - low
        if place is None:
            break
        low, high = (place, high) if judge(numbers[place]) else (low, place)
        left -= bool(left) and high - low > width // 2
    return Edge(numbers[low], None if high is None else numbers[high])


def _gallop(judge: Judge, numbers: range, first: int, guess: Guess | None) -> tuple[int, int | None]:
    """From a place that holds, in strides: the last that holds, and a later one that fails, if there is one.

    Strides double, or are as long as a guess says; where everything ahead is refused they are halved, down to the very
    next numbers.
    """
    low, stride, last, left = first, 1, len(numbers) - 1, _GUESSES
    while low < last:
        start = usual = min(low + stride, last)
        if guess is not None:
            wanted = _place(numbers, guess(numbers[low]), low, min(_FAR * (low + 1), last + 1))
            start, left = (wanted, left - (wanted < usual)) if wanted > usual or left else (usual, left)
        place = _accepted(judge, numbers, range(start, min(start + PATIENCE, last + 1)))
        if place is None and start > usual:
            guess = None
        elif place is None and stride == 1:
            break
        elif place is None:
            stride //= 2
        elif judge(numbers[place]):
            low, stride = place, 2 * stride
        else:
            return low, place
    return low, None


def _place(numbers: range, number: int, low: int, high: int) -> int:
    """The place of a number, or of the nearest one before it; kept between `low` and `high`."""
    return max(low + 1, min((number - numbers.start) // numbers.step, high - 1))


def _between(judge: Judge, numbers: range, low: int, high: int, wanted: int) -> int | None:
    """A place between `low` and `high` that is not refused: the nearest from `wanted` up, or else down from it."""
    above = _accepted(judge, numbers, range(max(wanted, low + 1), high))
    return above if above is not None else _accepted(judge, numbers, range(wanted - 1, low, -1))


def _accepted(judge: Judge, numbers: range, places: range) -> int | None:
    """The first of `places` whose number is not refused."""
    return next((place for place in places if judge(numbers[place]) is not None), None)
