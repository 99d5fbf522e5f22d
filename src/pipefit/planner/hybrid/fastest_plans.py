"""The fastest plans that fit, by estimated seconds: exact, or by a heuristic for long questions.

A question is long if the number of stages, blocks and devices is too large to distinguish all of them. Then
the search looks for plans that take little longer than the lower bound of all plans (`Least`), and then for
ever longer ones: for all degrees together, and for each degree alone, since the results are not optimal
(`LabelSearch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.planner.bounds import in_flight
from pipefit.planner.hybrid.programme import Allowed, Floats, Placed, StageRequest, Way, banded, in_a_row
from pipefit.planner.hybrid.search import LONG, WORK, Hybrid, HybridSearch, budget_level, searches
from pipefit.planner.hybrid.tables import DegreeTables
from pipefit.planner.memory_choices import BlockPrices
from pipefit.planner.problem import Degree, Question
from pipefit.schema.devices import DeviceKind
from pipefit.schema.grids import Sharding

# ---- Dynamic programming for long questions, over (first block, devices used)

Ints = NDArray[np.int64]


class Option(NamedTuple):
    """A degree on some devices with a way to save memory, and its costs for ranges of blocks.

    Row i and column w are the w + 1 blocks from i on; infinity if a stage cannot have them.
    """

    choice: StageRequest
    way: Way
    head: Floats  # seconds of all microbatches and of the end of a step
    each: Floats  # seconds of one microbatch
    longer: Floats  # seconds of the longer of its passes
    room: Ints  # most stages from this one to the last with which it fits; 0 if it never does

    @property
    def ranges(self) -> int:
        """Number of possible ranges of a stage."""
        return int(np.isfinite(self.head).sum())


class Lines(NamedTuple):
    """Numbers of the schedule: microbatches of a step, and microbatches in flight by the remaining stages."""

    microbatches: int
    in_flight: Ints | None  # None if no stage waits for the first microbatch to return


class LabelSearch:
    """The best plan whose stages each have one of some options; a heuristic.

    `hybrid.programme` also distinguishes the number of stages, which is too much for a thousand devices. Here
    the plan with the fewest seconds represents all plans of the last stages that start at a block and use the
    same devices. The cost of a stage before it is then exact, the highest of the lines of `planner.bounds`:

        M c + e                                 the stage works on all microbatches, and ends its step
        c + rest                                a later stage is the slowest
        S + (M - n) c + (n - 1) max(f, b)       the work after its first backward, or before its last forward

    with c the seconds of a microbatch (f forward, b backward), e those of the step's end, S the seconds of a
    microbatch in this and all later stages, M the microbatches of a step and n those that the stage holds. A
    slower plan with fewer last stages might be better if memory is short or the third line is the highest. So
    the result is not optimal, but its value is exact.

    Cost: for L blocks and G states of devices, L G numbers for every possible range of a stage from a block
    on. The limit on a stage's seconds keeps ranges and states few.

    Args:
        blocks: blocks of the model.
        used: devices used in every state; state 0 uses none.
        options: options of a stage.
        lines: numbers of the schedule.
        most_used: most devices that may be used from each block on, so that enough remain for the others.
        barred: cuts at which not all degrees may meet, and the test of degrees.
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
        self._counts, self._came = (
            np.zeros(shape, np.int64),
            np.full(shape, -1),
        )  # stages, and the first one's option
        self._stops, self._states = (
            np.zeros(shape, np.int64),
            np.zeros(shape, np.int64),
        )  # its stop and next state
        self._values[blocks, 0] = 0.0
        for start in reversed(range(blocks)):
            for number, option in enumerate(options):
                self._extend(start, number, option)

    @property
    def value(self) -> float:
        """Seconds of the best plan; infinity if there is none."""
        return float(self._values[0].min())

    def best(self) -> tuple[Placed, ...]:
        """Return the stages of the best plan."""
        start, state, result = 0, int(self._values[0].argmin()), list[Placed]()
        while self._came[start, state] >= 0:
            option = self._options[self._came[start, state]]
            stop = int(self._stops[start, state])
            result.append(Placed(start, stop, option.choice, option.way))
            start, state = stop, int(self._states[start, state])
        return tuple(result)

    def _extend(self, start: int, number: int, option: Option) -> None:
        """Record the plans whose first stage starts at `start` with this option."""
        widths = np.flatnonzero(option.head[start] < np.inf)
        if not len(widths):
            return
        take, rows = option.choice.take, slice(start + 1, start + 2 + int(widths[-1]))
        there = np.isfinite(self._values[rows].min(axis=0))[take.before]
        there &= self._used[take.after] <= self._most_used[start]
        if not there.any():
            return
        before, after = in_a_row(take.before[there]), in_a_row(take.after[there])
        result, sums = self._costs(start, option, rows, before)
        row = result.argmin(axis=0)
        column = np.arange(len(row))
        best = result[row, column]
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
        """Return the seconds of plans with this stage before each stop's best plan, and of a microbatch."""
        width = rows.stop - rows.start
        head, each, longer, room = (
            table[start, :width, None] for table in (option.head, option.each, option.longer, option.room)
        )
        sums = self._sums[rows, before] + each
        result = np.maximum(head, each + self._values[rows, before])
        left = self._counts[rows, before] + 1
        if self._lines.in_flight is not None:
            held = self._lines.in_flight[left]
            late = sums + (self._lines.microbatches - held) * each + (held - 1) * longer
            result = np.maximum(result, late)
        result[left > np.broadcast_to(room, left.shape)] = np.inf
        for cut in range(rows.start, rows.stop) if self._barred else ():
            if cut in self._barred:
                behind = self._came[cut, before]
                result[cut - rows.start, ~self._meeting(cut, option.choice.degree)[behind]] = np.inf
        return result, sums

    def _meeting(self, cut: int, front: Degree) -> NDArray[np.bool_]:
        """Return, for every option, whether it may follow a cut after a stage of degree `front`."""
        if (cut, front) not in self._meet:
            allowed = self._barred[cut]
            self._meet[cut, front] = np.array(
                [allowed(cut, front, option.choice.degree) for option in self._options]
            )
        return self._meet[cut, front]


def counts_upto(most: int) -> list[int]:
    """Return numbers of stages up to `most`: all small ones, later ones about a tenth apart."""
    result = [1]
    while result[-1] < most:
        result.append(min(most, max(result[-1] + 1, int(result[-1] * 1.1))))
    return result


# ---- Lower bound of a step over all grids


@dataclass(frozen=True, slots=True, kw_only=True)
class Least:
    """Lower bound of the seconds of a step, over all stages on all grids, without collectives.

    A stage on k devices does the work of `rates` device seconds in a second, more or less than k as its
    kernels are more or less efficient for its local batches. In a step of T seconds with M microbatches it
    takes c seconds for each of them, and r for recomputation, where by the lines of `planner.bounds`, with P
    the seconds of a microbatch in all stages before and S in all stages,

        P + M (c + r) <= T        and        S + m c <= T

    with m = M - n + (n - 1) b for n microbatches in flight; backwards take at least the part b of all
    seconds. All stages together do the `work` of all blocks with the devices that there are. By each line
    alone, this is a knapsack whose Lagrangian relaxation bounds the work in a second:

    - by the first line, stages work no more than if one after s others worked for (1 - 1/M)^s T, the fastest
      first (a linear programme, as in `planner.bounds.simple_bound`);
    - by the second line, c <= (T - S) / m. At w units of work a second on average, each second of a
      microbatch in a stage of rate v gains v - w, and all gain w T. Every stage between others has at least
      one device.

    At the end of its forward, a microbatch's saved tensors that are not recomputed are on the stage's own
    devices. If they exceed the memory of all devices, the cheapest are recomputed. Recomputation takes at
    most as long as the forward, so c is at least 1 / (2 - b) of c + r, and the first line has that part of
    1/M.

    A slower device counts as the part of a device of the fastest kind that it is for some block. An
    asynchronous schedule waits for no microbatch.

    Cost: some milliseconds, and a sum over the layers for each degree and kind of device.
    """

    work: float  # device seconds of a microbatch
    again: float  # device seconds of a microbatch that memory makes all stages recompute
    backward: float  # least part of the backward in the seconds of a block
    degrees: Floats  # numbers of devices that a stage may have
    rates: Floats  # work in a second, of devices of the fastest kind
    speeds: Floats  # of all devices, falling, as parts of the fastest kind
    stages: int  # most stages
    microbatches: int
    late: Floats | None  # m by the number of stages after; None for asynchronous schedules

    @staticmethod
    def of(question: Question, schedules: Sequence[str] = ()) -> Least:
        """Return the lower bound of a question under any of these schedules, by default under its own.

        Raises:
            UsageError: stages cannot have the requested degrees.
        """
        kinds = {device.kind.key: device.kind for device in question.cluster.devices}
        passes = np.array(
            [
                [np.diff(DegreeTables(question, degree).before(kind)[:2]) for kind in kinds.values()]
                for degree in question.degrees
            ]
        )  # by degree, kind, forward or backward, and block
        degrees, costs = np.array([degree.devices for degree in question.degrees], float), passes.sum(axis=2)
        fewest = costs.min(axis=1)
        of_blocks = degrees[:, None] * fewest
        excess = of_blocks.sum(axis=1) / of_blocks.sum(axis=1).min()
        part = float(np.min(passes[:, :, 1][costs > 0] / costs[costs > 0], initial=1.0))
        prices = [BlockPrices(question.of_one(degree)) for degree in question.degrees]
        speeds = {
            kind.key: max(_speed(fewest, costs[:, number]), *(_speed_again(one, kind) for one in prices))
            for number, kind in enumerate(kinds.values())
        }
        return Least(
            work=float((of_blocks / excess[:, None]).min(axis=0).sum()),
            again=_recomputed(question, prices, degrees, excess),
            backward=part,
            degrees=degrees,
            rates=degrees / excess,
            speeds=np.sort([speeds[one.kind.key] for one in question.cluster.devices])[::-1],
            stages=question.stages,
            microbatches=question.training.microbatches,
            late=None if question.training.endless else _late(question, schedules, part),
        )

    def seconds(self, devices: int) -> float:
        """Return the lower bound of a step on this number of devices; infinity if they lack memory."""
        room, stages = float(self.speeds[:devices].sum()), min(self.stages, devices)
        every, work, again = self.microbatches, self.work, self.work + self.again
        if self.late is None:
            return every * again / self._at_once(np.ones(stages), room)
        after: Floats = np.arange(stages, dtype=float)
        rate = self._at_once((1 - 1 / every) ** after, room) / every
        if self.late[:stages].min() > 0:  # else a stage without backwards holds all microbatches
            rate = self._on_average(self.late[:stages], room, rate)
        if not self.again:
            return work / rate
        rate_again = self._at_once((1 - 1 / (2 - self.backward) / every) ** after, room) / every
        return max(work / rate, again / rate_again)

    def _at_once(self, parts: Floats, room: float) -> float:
        """Return a bound of the work in a second of stages that work for these parts of it."""

        def bound(prices: Floats) -> Floats:
            gains = parts[:, None, None] * self.rates - prices[:, None] * self.degrees
            result: Floats = prices * room + np.maximum(gains.max(axis=2), 0.0).sum(axis=0)
            return result

        return float(_least_of(bound, np.array([(self.rates / self.degrees).max()]))[0])

    def _on_average(self, late: Floats, room: float, known: float) -> float:
        """Return a bound of the work in a second, at most `known`, by the stages' m."""
        edges = np.array([0, *counts_upto(len(late))])
        starts, counts = edges[:-1], np.diff(edges).astype(float)
        most = 1 / np.minimum.reduceat(late, starts)  # part of the time that a stage has for a microbatch
        least = float(self.degrees.min() * self.speeds[-1])  # devices of a stage
        degrees = np.append(self.degrees, least)
        rates = np.append(self.rates, least * (self.rates / self.degrees).max())
        behind = np.tri(len(starts), k=-1)

        def reached(rate: float) -> float:
            """Return a bound of the gain of all stages, for the best number of stages."""
            gains = most[:, None] * np.maximum(rates - rate, 0.0)

            def bound(prices: Floats) -> Floats:  # by the group of the first stage
                best = (gains - prices[:, None, None] * degrees).max(axis=2)
                needed = np.maximum(best, -prices[:, None] * least) * behind
                others = np.maximum(best, 0.0) * np.eye(len(starts))
                result: Floats = prices * room + (needed + others) @ counts
                return result

            return float(_least_of(bound, np.full(len(starts), (gains / degrees).max())).max())

        low, high = known / 2, known
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if reached(middle) <= middle else (middle, high)
        return high


_HALVINGS = 12  # of the interval of rates
_PRICES = 24  # compared prices of a device


def _least_of(bound: Callable[[Floats], Floats], top: Floats) -> Floats:
    """Return about the least values of convex bounds over prices from zero to `top`, each of its own."""
    low, high = np.zeros_like(top), top
    part = (5**0.5 - 1) / 2
    result = np.minimum(bound(low), bound(high))
    left, right = high - part * (high - low), low + part * (high - low)
    at_left, at_right = bound(left), bound(right)
    for _ in range(_PRICES):
        result = np.minimum(result, np.minimum(at_left, at_right))
        lower = at_left <= at_right
        low, high = np.where(lower, low, left), np.where(lower, right, high)
        new = np.where(lower, high - part * (high - low), low + part * (high - low))
        at_new = bound(new)
        left, right = np.where(lower, new, right), np.where(lower, left, new)
        at_left, at_right = np.where(lower, at_new, at_right), np.where(lower, at_left, at_new)
    return np.minimum(result, np.minimum(at_left, at_right))


def _late(question: Question, schedules: Sequence[str], backward: float) -> Floats:
    """Return m of `Least` for stages with 0, 1, ... stages after them; the least of the schedules'."""
    every, result = question.training.microbatches, list[Floats]()
    for schedule in schedules or (question.training.schedule,):
        how = replace(question.training, schedule=schedule)
        held = np.array([in_flight(how, 0, left) for left in range(1, question.stages + 1)], float)
        waits = 1.0 if held[0] == every else backward  # all stages for all forwards, as under GPipe
        result.append(every - held + (held - 1) * waits)
    least: Floats = np.minimum.reduce(result)
    return least


def _speed(fastest: Floats, seconds: Floats) -> float:
    """Return the largest part of the fastest speed that seconds mean; 1 if nothing takes time."""
    return float(np.max(fastest[seconds > 0] / seconds[seconds > 0], initial=0.0)) or 1.0


def _speed_again(prices: BlockPrices, kind: DeviceKind) -> float:
    """Return the largest part of the fastest speed with which a kind of device recomputes a layer."""
    own = BlockPrices(prices.question, (kind,))
    return _speed(np.array(prices.layers), np.array(own.layers))


def _recomputed(question: Question, prices: Sequence[BlockPrices], degrees: Floats, excess: Floats) -> float:
    """Return the least device seconds, over `excess`, of a microbatch's recomputation for lack of memory.

    Infinity if nothing may be recomputed.
    """
    kept = np.array([one.kept_by_layers() for one in prices])
    nbytes = (degrees[:, None] * kept).min(axis=0)
    seconds = np.array([one.layers for one in prices]) / excess[:, None]
    each = np.min(seconds / np.maximum(kept, 1), axis=0)
    missing = nbytes.sum() - sum(question.cluster.budgets)
    if missing <= 0:
        return 0.0
    if "never" == question.means.recompute == question.options.recompute:
        return _INFINITE
    cheapest = np.argsort(each)
    freed = np.minimum(np.cumsum(nbytes[cheapest]), missing)
    return float(each[cheapest] @ np.diff(freed, prepend=0.0))


def work_before(question: Question) -> Floats:
    """Return the least device seconds of a microbatch in the blocks before each edge."""
    kinds = {device.kind.key: device.kind for device in question.cluster.devices}.values()
    costs = [
        degree.devices * np.diff(forward + backward)
        for degree in question.degrees
        for kind in kinds
        for forward, backward, _ in (DegreeTables(question, degree).before(kind),)
    ]
    return np.concatenate(([0.0], np.cumsum(np.minimum.reduce(costs))))


# ---- Search

_TIMES = 6  # number of searches for plans that turn out to fit
_FIRST = 1.5  # factor on the lower bound for the first search
_ROUNDING = 1 + 1e-9
_INFINITE = float("inf")


def fastest(
    question: Question,
    most: int,
    shards: Sequence[Sharding],
    at_most: float = _INFINITE,
    *,
    again: bool = False,
) -> list[Hybrid]:
    """Return the plans with the fewest estimated seconds that fit, the fastest first.

    For up to `most` numbers of stages the fastest plan of at most `at_most` seconds, whose replicas divide
    one of `shards`. With `again`, stages may keep only their inputs and recompute. If state is divided, the
    result is what a few repeated searches find.
    """
    level, result = budget_level(question), list[Hybrid]()
    for search in searches(question, shards, again=again):
        result += _fitting(search, level, at_most, most)
    return sorted(result, key=lambda hybrid: hybrid.value)[:most]


def _fitting(search: HybridSearch, level: float, at_most: float, most: int) -> list[Hybrid]:
    """Return up to `most` plans of at most `at_most` seconds whose stages stay within a level."""
    search.expects = True
    long = search.evaluated * search.states.count > LONG
    for _ in range(1 + (_TIMES if long else min(_TIMES, WORK // search.candidates))):
        tried = (_labelled if long else HybridSearch.fastest)(search, level, at_most, most)
        fit = [hybrid for hybrid in tried if search.value(hybrid) <= level]
        if fit[:1] == tried[:1]:
            return fit
    return fit


def _labelled(search: HybridSearch, level: float, at_most: float, most: int) -> list[Hybrid]:
    """Return fast plans of a long question whose stages stay within a level, the fastest first."""
    longest = max(float(search.seconds(choice).step[0, -1]) for choice in search.choices)
    slowest = at_most
    if at_most == _INFINITE:
        slowest = _FIRST * Least.of(search.question).seconds(len(search.question.cluster.devices))
        if slowest == _INFINITE:
            return []
    result = _within(search, level, slowest)
    while not result and at_most == _INFINITE and slowest < longest:
        slowest *= 2
        result = _within(search, level, slowest)
    return result[:most]


def _within(search: HybridSearch, level: float, slowest: float) -> list[Hybrid]:
    """Return plans of a long question of at most `slowest` seconds within a level."""
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
    result = dict[tuple[int, ...], Hybrid]()
    for degrees in dict.fromkeys([tuple(search.tables), *((degree,) for degree in search.tables)]):
        own = [one for one in options if one.choice.degree in degrees]
        best = LabelSearch(question.blocks, search.states.used, own, lines, most_used, search.barred)
        stages = best.best() if best.value <= slowest else ()
        if len(stages) in search.counts:
            hybrid = Hybrid(search.split(stages), best.value, sum(one.ranges for one in own), stages)
            result.setdefault(hybrid.split.edges, hybrid)
    return sorted(result.values(), key=lambda one: one.value)


def _options(
    search: HybridSearch, choice: StageRequest, way: Way, level: float, slowest: float
) -> Iterator[Option]:
    """Yield the option of this choice and way, if any range takes at most `slowest` seconds."""
    times = search.seconds(choice, way)
    starts, stops = np.nonzero(np.triu(times.step <= slowest, 1))
    if not len(starts):
        return
    width, step = int((stops - starts).max()), np.where(times.step <= slowest, times.step, _INFINITE)
    head, each, longer = (banded(one, width) for one in (step, times.each, times.longer))
    most_bytes = level * search.unit(choice)
    room = search.tables[choice.degree].room(counts_upto(search.counts[-1]), way, width, most_bytes)
    yield Option(choice, way, head, each, longer, room)
