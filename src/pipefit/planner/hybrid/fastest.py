"""The fastest plans that fit, of the fewest estimated seconds: by the exact programme, or of long questions by labels.

A question is long where numbers of stages, blocks and devices are too many to tell all of them apart. Then plans are
looked for that take little longer than the least that any takes (`hybrid.least`), and then ever longer ones: those of
all degrees together, and those of each alone, since what is found is no optimum (`hybrid.labels`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.planner.bounds import in_flight
from pipefit.planner.degrees import Degree
from pipefit.planner.hybrid.programme import Allowed, Choice, Floats, Placed, Way, banded, in_a_row
from pipefit.planner.hybrid.search import LONG, WORK, Hybrid, Search, budget_level, searches
from pipefit.planner.hybrid.tables import DegreeTables
from pipefit.planner.problem import Question
from pipefit.schema.grids import Sharding

# ----------------------------------------------------------------------------------------------------
# The dynamic programme of long questions, over (first block, devices used): one plan of the last stages for
# each.
#
# That of `hybrid.programme` also tells apart how many stages a plan has, which a thousand devices make too
# many. Here the plan of the fewest seconds stands for all that begin at a block and have taken as many
# devices. So what a stage in front of it costs is known to the last microbatch in flight: the highest of the
# lines of `planner.bounds`,
#
#     M c + e                                 where it works on all microbatches, and ends its step
#     c + rest                                where a stage behind it is the slowest
#     S + (M - n) c + (n - 1) max(f, b)       what comes behind its first backward, or before its last forward
#
# with S the seconds of a microbatch in it and all stages behind, and n the microbatches that it holds.
# Another plan of the last stages, that is slower and has fewer of them, might have been the better one where
# memory is short, or where the third line is the highest. So what is found is no optimum, but whatever is
# found is what it is said to be.
#
# Costs: for L blocks and G states of devices, L G numbers for every range that a stage may have from a block
# on. Those are few, as a stage may not take longer than `most` seconds, and so are the states that can still
# have all blocks.

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


# ----------------------------------------------------------------------------------------------------
# What no step of a question takes less than, of any plan on any grids.
#
# Of a stage on k devices that takes c seconds for each of M microbatches, these spend M k c. So all stages
# together spend what blocks take at least, each at the degree and on the kind of device at which that is the
# least.
#
# Nor can all devices work from the begin of a step to its end: a step of T seconds takes at least M c, and
# before and after that what one microbatch takes in the stages in front. No stage has more than w devices, as
# many as the largest degree. So of w devices that work on all microbatches, in a stage or in several, those
# behind have (1 - 1 / M) T left at most, and all of them do at most the work of 1 - (1 - 1 / M)^(G / w) of T
# w M seconds. An endless schedule waits for no first microbatch.
#
# Costs: a sum over the blocks for each degree.


class Least(NamedTuple):
    """The seconds of `work` that a microbatch is on one device, and what else the bound is made of."""

    work: float
    widest: int  # devices of a stage, at most
    microbatches: int
    endless: bool

    @staticmethod
    def of(question: Question) -> Least:
        """That of a question.

        Raises:
            UsageError: stages cannot have the degrees that are asked for.
        """
        how, widest = question.training, max(degree.devices for degree in question.degrees)
        return Least(float(work_before(question)[-1]), widest, how.microbatches, how.endless)

    def seconds(self, devices: int) -> float:
        """What no step takes less than on so many devices."""
        if self.endless:
            return self.microbatches * self.work / devices
        stages, rest = divmod(devices, self.widest)
        left = (1 - 1 / self.microbatches) ** stages * (1 - rest / self.widest / self.microbatches)
        return self.work / self.widest / (1 - left)


def work_before(question: Question) -> Floats:
    """The seconds of work that a microbatch is at least in the blocks before each edge."""
    kinds = {device.kind.key: device.kind for device in question.cluster.devices}.values()
    costs = [
        degree.devices * np.diff(forward + backward)
        for degree in question.degrees
        for kind in kinds
        for forward, backward, _ in (DegreeTables(question, degree).before(kind),)
    ]
    return np.concatenate(([0.0], np.cumsum(np.minimum.reduce(costs))))


# ----------------------------------------------------------------------------------------------------

_TIMES = 6  # that plans are looked for which turn out to fit
_FIRST = 1.5  # times what no step takes less than, in which plans are looked for first
_ROUNDING = 1 + 1e-9
_INFINITE = float("inf")


def fastest(
    question: Question, most: int, shards: Sequence[Sharding], at_most: float = _INFINITE, *, again: bool = False
) -> list[Hybrid]:
    """Plans that fit, whose replicas divide one of `shards`: for up to `most` numbers of stages the one of the fewest
    estimated seconds, if these are no more than `at_most`; the fastest first. Stages may keep their inputs alone if
    they may run `again`.

    Where state is divided, those that a few searches find.
    """
    level, found = budget_level(question), list[Hybrid]()
    for search in searches(question, shards, again=again):
        found += _fitting(search, level, at_most, most)
    return sorted(found, key=lambda one: one.value)[:most]


def _fitting(search: Search, level: float, at_most: float, most: int) -> list[Hybrid]:
    """Up to `most` plans that take no longer than `at_most` seconds and whose stages stay within a level."""
    search.expects = True
    long = search.evaluated * search.states.count > LONG
    for _ in range(1 + (_TIMES if long else min(_TIMES, WORK // search.candidates))):
        tried = (_labelled if long else Search.fastest)(search, level, at_most, most)
        fit = [one for one in tried if search.value(one) <= level]
        if fit[:1] == tried[:1]:
            return fit
    return fit


def _labelled(search: Search, level: float, at_most: float, most: int) -> list[Hybrid]:
    """Fast plans of a long question whose stages stay within a level, the fastest first."""
    longest = max(float(search.seconds(choice).step[0, -1]) for choice in search.choices)
    slowest = at_most
    if at_most == _INFINITE:
        slowest = _FIRST * Least.of(search.question).seconds(len(search.question.cluster.devices))
    found = _within(search, level, slowest)
    while not found and at_most == _INFINITE and slowest < longest:
        slowest *= 2
        found = _within(search, level, slowest)
    return found[:most]


def _within(search: Search, level: float, slowest: float) -> list[Hybrid]:
    """The same of those that take no longer than `slowest` seconds."""
    question, how = search.question, search.question.training
    options = [
        option
        for choice in search.choices
        for way in search.ways(choice.degree)
        for option in _options(search, choice, way, level, slowest)
    ]
    held = [0, *(in_flight(how, 0, left) for left in range(1, question.blocks + 1))]
    lines = Lines(how.microbatches, None if how.endless else np.array(held))
    spent = how.microbatches * work_before(question)[:-1] / (slowest * _ROUNDING)
    most_used = len(question.cluster.devices) - spent
    found = dict[tuple[int, ...], Hybrid]()
    for degrees in dict.fromkeys([tuple(search.tables), *((degree,) for degree in search.tables)]):
        own = [one for one in options if one.choice.degree in degrees]
        best = Labelled(question.blocks, search.states.used, own, lines, most_used, search.barred)
        stages = best.best() if best.value <= slowest else ()
        if len(stages) in search.counts:
            made = Hybrid(search.split(stages), best.value, sum(one.ranges for one in own), stages)
            found.setdefault(made.split.edges, made)
    return sorted(found.values(), key=lambda one: one.value)


def _options(search: Search, choice: Choice, way: Way, level: float, slowest: float) -> Iterator[Option]:
    """What stages cost that are this choice, if any of them takes no longer than `slowest`."""
    times = search.seconds(choice, way)
    starts, stops = np.nonzero(np.triu(times.step <= slowest, 1))
    if not len(starts):
        return
    width, step = int((stops - starts).max()), np.where(times.step <= slowest, times.step, _INFINITE)
    head, each, longer = (banded(one, width) for one in (step, times.each, times.longer))
    most_bytes = level * search.unit(choice)
    room = search.tables[choice.degree].room(counts_upto(search.counts[-1]), way, width, most_bytes)
    yield Option(choice, way, head, each, longer, room)
