"""The dynamic programme over (stages left, first block, devices used): every cut and every degree of every stage.

The cost of a whole plan is built from its last stage to its first. A stage in front of others that cost `rest` makes

    max(head, add + rest)

of them. With its peak as `head` and no `add`, that is the highest peak of all stages. With M microbatches of c seconds
each, head M c and add c, it is the longest of the times in which a stage works on all microbatches once the first one
has come through the stages before it, which is close to what a step takes (`planner.bounds`). Both fall where `rest`
falls, so that the best plan has the best plan of its last stages in it, and the programme is exact.

What a stage costs depends on its blocks, its degree, its devices and how many stages come behind it, as schedules give
the same actions to stages as far from the last one. So one run answers for every number of stages. Neighbours of
different degree may not be able to exchange what a cut divides; then the state knows the degree behind the cut too.

Costs: R L^2 / 2 G D numbers for R stages, L blocks, G devices and D degrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.lowering.passes.recomputation import Recompute
from pipefit.planner.degrees import Degree
from pipefit.schema.grids import Grid, Sharding

# ----------------------------------------------------------------------------------------------------
# Which devices the stages of a plan get: neighbours near each other, and the shards of a replica on one host.


def grids_of(
    stages: Sequence[tuple[Degree, int]], free: Sequence[Sequence[int]], hosts: Sequence[int]
) -> tuple[Grid, ...]:
    """The grids of stages that take devices of a class or of larger ones, of which each has these `free`.

    Stages that need the largest devices choose first, and of those the ones of the most shards, so that their groups
    find hosts with room; others take devices in order. The first device of a grid is of its smallest class.
    """
    left = [sorted(devices, key=lambda device: (hosts[device], device)) for devices in free]
    found: dict[int, Grid] = {}
    for number in sorted(range(len(stages)), key=lambda number: (-stages[number][1], -stages[number][0].tensor)):
        degree, lowest = stages[number]
        devices = list[int]()
        for own in left[lowest:]:
            devices += _taken(own, min(degree.devices - len(devices), len(own)), degree.tensor, hosts)
        found[number] = Grid(devices=tuple(devices), **degree.pins)
    return tuple(found[number] for number in range(len(stages)))


def _taken(free: list[int], count: int, together: int, hosts: Sequence[int]) -> list[int]:
    """Take so many devices, each group of so many `together` on one host if there is one with room."""
    taken = list[int]()
    while len(taken) < count:
        size = min(together, count - len(taken))
        groups = (free[at : at + size] for at in range(len(free) - size + 1))
        group = next((one for one in groups if hosts[one[0]] == hosts[one[-1]]), free[:size])
        taken += group
        free[:] = [device for device in free if device not in group]
    return taken


# ----------------------------------------------------------------------------------------------------
# Ways to take devices for a stage out of classes of equal ones.
#
# A stage on devices of several classes has what the smallest of them has. So what a stage asks for is a
# number of devices of some class or a larger one, and a state of the search is how many devices were asked
# for of each class. Devices can be found for all stages if, for every class, no more are asked for of it and
# the larger ones than there are: each set of devices that would do contains the next, so that nothing else
# can be in the way (Hall, 1935).

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


# ----------------------------------------------------------------------------------------------------

Floats = NDArray[np.float64]


class Choice(NamedTuple):
    """A degree of a stage, and the devices on which it has it."""

    degree: Degree
    take: Take


class Cost(NamedTuple):
    """What stages cost: row i and column w are the w + 1 blocks from i on; infinity if not allowed."""

    head: Floats
    add: Floats | None = None

    @staticmethod
    def of(head: Floats, add: Floats | None = None) -> Cost:
        """That of tables over ranges, in which row i and column j are blocks i to j - 1."""
        starts, stops = np.nonzero(np.triu(head < np.inf, 1))  # a stage has blocks
        width = int((stops - starts).max()) if len(starts) else 0
        return Cost(banded(head, width), None if add is None else banded(add, width))


class Way(NamedTuple):
    """How a stage saves memory: what its replicas divide, and what it recomputes besides what the question asks for."""

    shard: Sharding = "none"
    recompute: Recompute = "never"


WHOLE = Way()


class Placed(NamedTuple):
    """A stage of the best plan, and how it saves memory."""

    start: int
    stop: int
    choice: Choice
    way: Way = WHOLE


Costs = Callable[[int, Choice], Cost]  # of a stage with so many stages behind it and itself
Allowed = Callable[[int, Degree, Degree], bool]  # a cut before a block, between these degrees


class Programme:
    """The tables for up to `most` stages.

    Args:
        blocks: of the model.
        states: how many states of used devices there are; 0 is that of none.
        choices: what a stage may be.
        cost: of a stage.
        barred: the cuts at which not all degrees may meet, and those that may.
    """

    def __init__(
        self,
        blocks: int,
        states: int,
        choices: Sequence[Choice],
        cost: Costs,
        most: int,
        barred: Mapping[int, Allowed],
    ) -> None:
        self._blocks, self._choices, self._cost, self._barred = blocks, choices, cost, barred
        self._degrees = list(dict.fromkeys(choice.degree for choice in choices))
        end = np.full((blocks + 1, states), np.inf)
        end[blocks, 0] = 0.0  # nothing comes behind
        self._behind = [dict.fromkeys(self._degrees, end)]  # by the degree in front of the cut
        self.values = list[float]()  # the best, for 1, 2, ... stages
        for stages in range(1, most + 1):
            self._extend(stages)

    def _extend(self, stages: int) -> None:
        """The tables for one stage more."""
        shape, behind = self._behind[-1][self._degrees[0]].shape, self._behind[-1]
        found = {degree: np.full(shape, np.inf) for degree in self._degrees}
        for choice in self._choices:
            rest, best = behind[choice.degree], found[choice.degree]
            before, after = _reached(rest, choice.take)
            if isinstance(before, np.ndarray) and not len(before):
                continue  # nothing that this stage would stand in front of can be had
            head, add = self._cost(stages, choice)
            there = np.flatnonzero((rest[:, before] < np.inf).any(axis=1))
            low, high = int(there[0]), int(there[-1])
            for row in range(head.shape[1]):  # stages of so many blocks and one more
                own = slice(max(low - row - 1, 0), max(high - row, 0))
                here = rest[own.start + row + 1 : own.stop + row + 1, before]
                if add is not None:
                    here = add[own, row, None] + here
                here = np.maximum(head[own, row, None], here)
                best[own, after] = np.minimum(best[own, after], here)
        self.values.append(float(min(one[0].min() for one in found.values())))
        self._behind.append(self._met(found))

    def _met(self, found: dict[Degree, Floats]) -> dict[Degree, Floats]:
        """What lies behind a cut, by the degree in front of it."""
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
        """The best plan of so many stages; of equal ones, that of the earliest choices, and of the shortest stages."""
        front: Degree | None = None
        start, state, placed = 0, None, list[Placed]()
        for left in range(stages, 0, -1):
            found = min(self._options(left, start, state, front), key=lambda option: option[0])
            _, stop, state, choice = found
            placed.append(Placed(start, stop, choice))
            start, front = stop, choice.degree
        return tuple(placed)

    def _options(
        self, left: int, start: int, state: int | None, front: Degree | None
    ) -> list[tuple[float, int, int, Choice]]:
        """The best stage of every choice that begins here: its value, where it stops, and the state behind it."""
        found = []
        for choice in self._choices:
            bar = self._barred.get(start) if front is not None else None
            if front is not None and bar is not None and not bar(start, front, choice.degree):
                continue
            head, add = self._cost(left, choice)
            take = choice.take
            before = take.before if state is None else take.before[take.after == state]
            if not len(before):
                continue
            rest = self._behind[left - 1][choice.degree][start + 1 : start + 1 + head.shape[1]][:, before]
            if not len(rest):
                continue
            rest = rest if add is None else rest + add[start, : len(rest), None]
            values = np.maximum(head[start, : len(rest), None], rest)
            row, column = np.unravel_index(int(values.argmin()), values.shape)
            found.append((float(values[row, column]), start + 1 + int(row), int(before[column]), choice))
        return found


def _reached(rest: Floats, take: Take) -> tuple[Indices | slice, Indices | slice]:
    """The states before and after a stage takes devices, of those that stages behind it can have left."""
    there = np.isfinite(rest.min(axis=0))[take.before]
    return in_a_row(take.before[there]), in_a_row(take.after[there])


def in_a_row(states: Indices) -> Indices | slice:
    """States in a row as a slice, which is no copy."""
    if len(states) and states[-1] - states[0] == len(states) - 1 and (np.diff(states) == 1).all():
        return slice(int(states[0]), int(states[-1]) + 1)
    return states


def banded(square: Floats, width: int) -> Floats:
    """Of a table over ranges, those of up to so many blocks: row i and column w are the w + 1 blocks from i on."""
    blocks = len(square)
    starts, stops = np.arange(blocks)[:, None], np.arange(blocks)[:, None] + 1 + np.arange(width)
    found: Floats = np.where(stops <= blocks, square[starts, np.minimum(stops, blocks)], np.inf)
    return found
