"""The dynamic programme of long questions, over (first block, devices used): one plan of the last stages for each.

That of `hybrid.programme` also tells apart how many stages a plan has, which a thousand devices make too many. Here the
plan of the fewest seconds stands for all that begin at a block and have taken as many devices. So what a stage in front
of it costs is known to the last microbatch in flight: the highest of the lines of `planner.bounds`,

    M c + e                                 where it works on all microbatches, and ends its step
    c + rest                                where a stage behind it is the slowest
    S + (M - n) c + (n - 1) max(f, b)       what comes behind its first backward, or before its last forward

with S the seconds of a microbatch in it and all stages behind, and n the microbatches that it holds. Another plan of
the last stages, that is slower and has fewer of them, might have been the better one where memory is short, or where
the third line is the highest. So what is found is no optimum, but whatever is found is what it is said to be.

Costs: for L blocks and G states of devices, L G numbers for every range that a stage may have from a block on. Those
are few, as a stage may not take longer than `most` seconds, and so are the states that can still have all blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.planner.degrees import Degree
from pipefit.planner.hybrid.programme import Allowed, Choice, Floats, Placed, Way, in_a_row

Ints = NDArray[np.int64]


class Option(NamedTuple):
    """A degree on some devices and a way to save memory, and what ranges of blocks take so: row i and column w are the
    w + 1 blocks from i on. Infinity where a stage cannot have them.
    """

    choice: Choice
    way: Way
    head: Floats  # seconds of all microbatches and of the end of a step
    each: Floats  # of one microbatch
    longer: Floats  # of the longer one of its passes
    room: Ints  # the most stages from itself to the last one with which it fits; 0 where it never does

    @property
    def ranges(self) -> int:
        """How many ranges a stage may have."""
        return int(np.isfinite(self.head).sum())


class Lines(NamedTuple):
    """What a schedule says of stages: the microbatches of a step, and those in flight by the stages that are left."""

    microbatches: int
    in_flight: Ints | None  # None where no stage waits for the first microbatch to come back


class Labelled:
    """The best plan of stages that each are one of some options.

    Args:
        blocks: of the model.
        used: devices that are used in every state; state 0 is that of none.
        options: what a stage may be.
        lines: of the schedule.
        most_used: devices that may be used for the blocks from each one on, so that there are enough for the others.
        barred: the cuts at which not all degrees may meet, and those that may.
    """

    def __init__(
        self,
        blocks: int,
        used: Ints,
        options: Sequence[Option],
        lines: Lines,
        most_used: Floats,
        barred: Mapping[int, Allowed],
    ) -> None:
        shape = blocks + 1, len(used)
        self._options, self._lines, self._used, self._most_used = options, lines, used, most_used
        self._barred, self._meet = barred, dict[tuple[int, Degree], NDArray[np.bool_]]()
        self._values, self._sums = np.full(shape, np.inf), np.zeros(shape)
        self._counts, self._came = np.zeros(shape, np.int64), np.full(shape, -1)  # stages, and the first one's option
        self._stops, self._states = np.zeros(shape, np.int64), np.zeros(shape, np.int64)  # what lies behind that
        self._values[blocks, 0] = 0.0
        for start in reversed(range(blocks)):
            for number, option in enumerate(options):
                self._extend(start, number, option)

    @property
    def value(self) -> float:
        """Seconds of the best plan; infinity if there is none."""
        return float(self._values[0].min())

    def best(self) -> tuple[Placed, ...]:
        """The stages of the best plan."""
        start, state, found = 0, int(self._values[0].argmin()), list[Placed]()
        while self._came[start, state] >= 0:
            option = self._options[self._came[start, state]]
            stop = int(self._stops[start, state])
            found.append(Placed(start, stop, option.choice, option.way))
            start, state = stop, int(self._states[start, state])
        return tuple(found)

    def _extend(self, start: int, number: int, option: Option) -> None:
        """Take note of the plans that begin with a stage from here on."""
        widths = np.flatnonzero(option.head[start] < np.inf)
        if not len(widths):
            return
        take, rows = option.choice.take, slice(start + 1, start + 2 + int(widths[-1]))
        there = np.isfinite(self._values[rows].min(axis=0))[take.before]
        there &= self._used[take.after] <= self._most_used[start]
        if not there.any():
            return
        before, after = in_a_row(take.before[there]), in_a_row(take.after[there])
        found, sums = self._costs(start, option, rows, before)
        row = found.argmin(axis=0)
        column = np.arange(len(row))
        best = found[row, column]
        better = best < self._values[start, after]

        def note(into: NDArray[np.float64] | Ints, what: NDArray[np.float64] | Ints | int) -> None:
            into[start, after] = np.where(better, what, into[start, after])

        note(self._values, best)
        note(self._sums, sums[row, column])
        note(self._counts, self._counts[rows, before][row, column] + 1)
        note(self._came, number)
        note(self._stops, start + 1 + row)
        note(self._states, take.before[there])

    def _costs(self, start: int, option: Option, rows: slice, before: Ints | slice) -> tuple[Floats, Floats]:
        """Seconds of the plans of a stage in front of those behind every stop, and of a microbatch in all of them."""
        width = rows.stop - rows.start
        head, each, longer, room = (
            table[start, :width, None] for table in (option.head, option.each, option.longer, option.room)
        )
        sums = self._sums[rows, before] + each
        found = np.maximum(head, each + self._values[rows, before])
        left = self._counts[rows, before] + 1
        if self._lines.in_flight is not None:
            held = self._lines.in_flight[left]
            late = sums + (self._lines.microbatches - held) * each + (held - 1) * longer
            found = np.maximum(found, late)
        found[left > np.broadcast_to(room, left.shape)] = np.inf
        for cut in range(rows.start, rows.stop) if self._barred else ():
            if cut in self._barred:
                behind = self._came[cut, before]
                found[cut - rows.start, ~self._meeting(cut, option.choice.degree)[behind]] = np.inf
        return found, sums

    def _meeting(self, cut: int, front: Degree) -> NDArray[np.bool_]:
        """Whether every option may be behind a cut that this degree is in front of."""
        if (cut, front) not in self._meet:
            allowed = self._barred[cut]
            self._meet[cut, front] = np.array([allowed(cut, front, one.choice.degree) for one in self._options])
        return self._meet[cut, front]


def counts_upto(most: int) -> list[int]:
    """Numbers of stages up to `most`: all of few, each about a tenth more than the one before."""
    found = [1]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, int(found[-1] * 1.1))))
    return found
