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

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.grids import Sharding
from pipefit.planner.degrees import Degree
from pipefit.planner.hybrid.takes import Indices, Take
from pipefit.schedule.recompute_settings import Recompute

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
