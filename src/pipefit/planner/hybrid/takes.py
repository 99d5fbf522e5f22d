"""Ways to take devices for a stage out of classes of equal ones.

A stage on devices of several classes has what the smallest of them has. So what a stage asks for is a number of devices
of some class or a larger one, and a state of the search is how many devices were asked for of each class. Devices can
be found for all stages if, for every class, no more are asked for of it and the larger ones than there are: each set of
devices that would do contains the next, so that nothing else can be in the way (Hall, 1935).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.intp]


class Take(NamedTuple):
    """So many devices of a class or a larger one; and the states before and after that, as numbers of states."""

    lowest: int
    devices: int
    before: Indices
    after: Indices


def states_of(sizes: Sequence[int]) -> float:
    """The number of states of classes of these sizes, those of the smallest devices first, without listing them."""
    by_sum = np.ones(1)  # of the classes so far: the states in which so many devices are asked for
    for size in reversed(sizes):
        by_sum = np.cumsum(np.pad(by_sum, (0, size)))
    return float(by_sum.sum())


class States:
    """How many devices of each class are asked for, numbered; `sizes` are those of the classes, the smallest first."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        asked, there = np.zeros((1, 0), int), 0
        for size in reversed(sizes):
            there += size  # of a class and the larger ones
            left = there - asked.sum(axis=1)  # that may be asked for of the class itself
            own = np.concatenate([np.arange(most + 1) for most in left])
            asked = np.column_stack([own, asked.repeat(left + 1, axis=0)])
        self._asked = asked[np.lexsort(asked.T[::-1])]
        self._numbers = {tuple(one): number for number, one in enumerate(self._asked.tolist())}

    @property
    def used(self) -> Indices:
        """How many devices are asked for in every state."""
        found: Indices = self._asked.sum(axis=1)
        return found

    @property
    def count(self) -> int:
        """The number of states; 0 is that in which nothing is asked for."""
        return len(self._asked)

    def takes(self, devices: int) -> Iterator[Take]:
        """The ways in which a stage may have so many devices."""
        for lowest in range(len(self._sizes)):
            more = np.zeros(len(self._sizes), int)
            more[lowest] = devices
            after = [self._numbers.get(tuple(one), -1) for one in (self._asked + more).tolist()]
            before = np.flatnonzero(np.array(after) >= 0)
            if len(before):
                yield Take(lowest, devices, before, np.array(after)[before])

    def classes(self, take: Take) -> list[int]:
        """The classes whose devices a stage that takes so gets, if it is the first one to choose."""
        found, left = [], take.devices
        for number in range(take.lowest, len(self._sizes)):
            if left > 0:
                found.append(number)
            left -= self._sizes[number]
        return found
