"""Dynamic programming over (stages left, first block, devices used), for all cuts and degrees.

The cost of a plan is built from its last stage to its first. A stage before others that cost `rest` makes the
cost

    max(head, add + rest)

With its peak as `head` and without `add`, that is the highest peak of all stages. With M microbatches of c
seconds, head M c and add c, it is the longest time in which a stage works on all microbatches after the first
one has passed the stages before it, which is close to the seconds of a step (`planner.bounds`). Both fall if
`rest` falls, so the best plan contains the best plan of its last stages, and the search is exact.

The cost of a stage depends on its blocks, degree, devices and the number of later stages, as schedules give
equal actions to stages at the same distance from the last. So one run answers for every number of stages.
Neighbours of different degree may be unable to exchange the values at a cut; then the state includes the
degree after the cut.

Cost: R L^2 / 2 G D numbers for R stages, L blocks, G devices and D degrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.lowering import Recompute
from pipefit.planner.problem import Degree
from pipefit.schema.grids import Grid, Sharding

# ---- Placement of stages on devices


def grids_of(
    stages: Sequence[tuple[Degree, int]], free: Sequence[Sequence[int]], hosts: Sequence[int]
) -> tuple[Grid, ...]:
    """Return the grids of stages on the `free` devices of each class.

    A stage takes devices of a class or of larger ones. Neighbours are near each other, and the
    tensor-parallel ranks of a replica on one host. Stages that need the largest devices choose first, then
    those with the most tensor-parallel ranks, so that their groups find hosts with room; others take devices
    in order. The first device of a grid is of its smallest class.
    """
    left = [sorted(devices, key=lambda device: (hosts[device], device)) for devices in free]
    result: dict[int, Grid] = {}
    for number in sorted(
        range(len(stages)), key=lambda number: (-stages[number][1], -stages[number][0].tensor)
    ):
        degree, lowest = stages[number]
        devices = list[int]()
        for own in left[lowest:]:
            devices += _taken(own, min(degree.devices - len(devices), len(own)), degree.tensor, hosts)
        result[number] = Grid(devices=tuple(devices), **degree.pins)
    return tuple(result[number] for number in range(len(stages)))


def _taken(free: list[int], count: int, together: int, hosts: Sequence[int]) -> list[int]:
    """Remove and return `count` devices, each group of `together` on one host if a host has room."""
    taken = list[int]()
    while len(taken) < count:
        size = min(together, count - len(taken))
        groups = (free[at : at + size] for at in range(len(free) - size + 1))
        group = next((one for one in groups if hosts[one[0]] == hosts[one[-1]]), free[:size])
        taken += group
        free[:] = [device for device in free if device not in group]
    return taken


# ---- States of used devices
#
# A stage on devices of several classes has the budget of the smallest. So a stage requests a number of
# devices of some class or a larger one, and a state is the number of devices requested of each class. All
# stages can be placed if, for every class, the requests for it and larger classes do not exceed the devices
# in these classes (Hall, 1935).

Indices = NDArray[np.intp]


class Take(NamedTuple):
    """Request for devices of a class or a larger one; and the numbers of the states before and after it."""

    lowest: int
    devices: int
    before: Indices
    after: Indices


def states_of(sizes: Sequence[int]) -> float:
    """Return the number of states of classes of these sizes, the smallest devices first."""
    by_sum = np.ones(1)  # of the classes so far: the number of states by requested devices
    for size in reversed(sizes):
        by_sum = np.cumsum(np.pad(by_sum, (0, size)))
    return float(by_sum.sum())


class States:
    """Numbered states: the requested devices of each class.

    `sizes` are the numbers of devices of the classes, the smallest devices first.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = tuple(sizes)
        asked, there = np.zeros((1, 0), int), 0
        for size in reversed(sizes):
            there += size  # devices of a class and the larger ones
            left = there - asked.sum(axis=1)  # devices that may be requested of the class itself
            own = np.concatenate([np.arange(most + 1) for most in left])
            asked = np.column_stack([own, asked.repeat(left + 1, axis=0)])
        self._asked = asked[np.lexsort(asked.T[::-1])]
        self._numbers = {tuple(one): number for number, one in enumerate(self._asked.tolist())}

    @property
    def used(self) -> Indices:
        """Number of requested devices of every state."""
        result: Indices = self._asked.sum(axis=1)
        return result

    @property
    def count(self) -> int:
        """Number of states; state 0 requests nothing."""
        return len(self._asked)

    def takes(self, devices: int) -> Iterator[Take]:
        """Yield the requests by which a stage may have this number of devices."""
        for lowest in range(len(self._sizes)):
            more = np.zeros(len(self._sizes), int)
            more[lowest] = devices
            after = [self._numbers.get(tuple(one), -1) for one in (self._asked + more).tolist()]
            before = np.flatnonzero(np.array(after) >= 0)
            if len(before):
                yield Take(lowest, devices, before, np.array(after)[before])

    def classes(self, take: Take) -> list[int]:
        """Return the classes of the devices that a stage with this request gets if it chooses first."""
        result, left = [], take.devices
        for number in range(take.lowest, len(self._sizes)):
            if left > 0:
                result.append(number)
            left -= self._sizes[number]
        return result


# ---- Tables

Floats = NDArray[np.float64]


class StageRequest(NamedTuple):
    """Degree of a stage, and its request for devices."""

    degree: Degree
    take: Take


class Cost(NamedTuple):
    """Costs of stages: row i and column w are the w + 1 blocks from `first` + i on; infinity if not allowed.

    Stages that start at blocks without a row are not allowed.
    """

    head: Floats
    add: Floats | None = None
    first: int = 0

    @staticmethod
    def of(head: Floats, add: Floats | None = None) -> Cost:
        """Return costs from tables over ranges, in which row i and column j are blocks i to j - 1."""
        starts, stops = np.nonzero(np.triu(head < np.inf, 1))  # a stage has blocks
        width = int((stops - starts).max()) if len(starts) else 0
        return Cost(banded(head, width), None if add is None else banded(add, width))


class Way(NamedTuple):
    """Way to save memory: the state that replicas divide, and recomputation in addition to the question's."""

    shard: Sharding = "none"
    recompute: Recompute = "never"


WHOLE = Way()


class Placed(NamedTuple):
    """Stage of the best plan, and its way to save memory."""

    start: int
    stop: int
    choice: StageRequest
    way: Way = WHOLE


Costs = Callable[[int, StageRequest], Cost]  # by the number of stages from this one to the last
Allowed = Callable[
    [int, Degree, Degree], bool
]  # by the block after a cut and the degrees before and after it


class Programme:
    """Tables for up to `most` stages.

    Args:
        blocks: blocks of the model.
        states: number of states of used devices; state 0 uses none.
        choices: choices of a stage.
        cost: cost of a stage.
        most: largest number of stages.
        barred: cuts at which not all degrees may meet, and the test of degrees.
    """

    def __init__(
        self,
        blocks: int,
        states: int,
        choices: Sequence[StageRequest],
        cost: Costs,
        most: int,
        barred: Mapping[int, Allowed],
    ) -> None:
        self._blocks, self._choices, self._cost, self._barred = blocks, choices, cost, barred
        self._degrees = list(dict.fromkeys(choice.degree for choice in choices))
        end = np.full((blocks + 1, states), np.inf)
        end[blocks, 0] = 0.0  # no stage follows
        self._behind = [dict.fromkeys(self._degrees, end)]  # by the degree before the cut
        self.values = list[float]()  # the best values, for 1, 2, ... stages
        for stages in range(1, most + 1):
            self._extend(stages)

    def _extend(self, stages: int) -> None:
        """Extend the tables by one stage."""
        shape, behind = self._behind[-1][self._degrees[0]].shape, self._behind[-1]
        result = {degree: np.full(shape, np.inf) for degree in self._degrees}
        for choice in self._choices:
            rest, best = behind[choice.degree], result[choice.degree]
            before, after = _reached(rest, choice.take)
            if isinstance(before, np.ndarray) and not len(before):
                continue  # no plan exists that could follow this stage
            head, add, first = self._cost(stages, choice)
            there = np.flatnonzero((rest[:, before] < np.inf).any(axis=1))
            low, high = int(there[0]), int(there[-1])
            for column in range(head.shape[1]):  # stages of column + 1 blocks
                own = slice(max(low - column - 1, first), min(high - column, first + len(head)))
                if own.start >= own.stop:
                    continue
                rows = slice(own.start - first, own.stop - first)
                here = rest[own.start + column + 1 : own.stop + column + 1, before]
                if add is not None:
                    here = add[rows, column, None] + here
                here = np.maximum(head[rows, column, None], here)
                best[own, after] = np.minimum(best[own, after], here)
        self.values.append(float(min(value[0].min() for value in result.values())))
        self._behind.append(self._met(result))

    def _met(self, found: dict[Degree, Floats]) -> dict[Degree, Floats]:
        """Return the values after a cut, by the degree before it."""
        lowest: Floats = np.minimum.reduce(list(found.values()))
        if not self._barred:
            return dict.fromkeys(self._degrees, lowest)
        met = {degree: lowest.copy() for degree in self._degrees}
        for cut, allowed in self._barred.items():
            for front in self._degrees:
                rows = [found[behind][cut] for behind in self._degrees if allowed(cut, front, behind)]
                met[front][cut] = np.minimum.reduce(rows)
        return met

    def best(self, stages: int) -> tuple[Placed, ...]:
        """Return the best plan of this number of stages.

        Of equal plans, the one with the earliest choices, then with the shortest stages.
        """
        front: Degree | None = None
        start, state, placed = 0, None, list[Placed]()
        for left in range(stages, 0, -1):
            result = min(self._options(left, start, state, front), key=lambda option: option[0])
            _, stop, state, choice = result
            placed.append(Placed(start, stop, choice))
            start, front = stop, choice.degree
        return tuple(placed)

    def _options(
        self, left: int, start: int, state: int | None, front: Degree | None
    ) -> list[tuple[float, int, int, StageRequest]]:
        """Return the best stage of every choice that starts here: its value, stop, next state, and choice."""
        result = []
        for choice in self._choices:
            bar = self._barred.get(start) if front is not None else None
            if front is not None and bar is not None and not bar(start, front, choice.degree):
                continue
            head, add, first = self._cost(left, choice)
            take, row = choice.take, start - first
            before = take.before if state is None else take.before[take.after == state]
            if not len(before) or not 0 <= row < len(head):
                continue
            rest = self._behind[left - 1][choice.degree][start + 1 : start + 1 + head.shape[1]][:, before]
            if not len(rest):
                continue
            rest = rest if add is None else rest + add[row, : len(rest), None]
            values = np.maximum(head[row, : len(rest), None], rest)
            more, column = np.unravel_index(int(values.argmin()), values.shape)
            result.append((float(values[more, column]), start + 1 + int(more), int(before[column]), choice))
        return result


def _reached(rest: Floats, take: Take) -> tuple[Indices | slice, Indices | slice]:
    """Return the states before and after a stage takes devices, of those that later stages can leave."""
    there = np.isfinite(rest.min(axis=0))[take.before]
    return in_a_row(take.before[there]), in_a_row(take.after[there])


def in_a_row(states: Indices) -> Indices | slice:
    """Return consecutive states as a slice, which avoids a copy."""
    if len(states) and states[-1] - states[0] == len(states) - 1 and (np.diff(states) == 1).all():
        return slice(int(states[0]), int(states[-1]) + 1)
    return states


def banded(square: Floats, width: int) -> Floats:
    """Return a table over ranges with row i and column w for the w + 1 blocks from i on, up to `width`."""
    blocks = len(square)
    starts, stops = np.arange(blocks)[:, None], np.arange(blocks)[:, None] + 1 + np.arange(width)
    result: Floats = np.where(stops <= blocks, square[starts, np.minimum(stops, blocks)], np.inf)
    return result
