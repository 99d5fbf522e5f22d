"""Lower bounds of the seconds of a step, over all splits, devices, and decisions about saved tensors and state.

    step_bound(question)

No plan that fits takes less. With f, b, r and n of stage k (seconds forward, backward and recomputing; microbatches
in flight before its first backward), S the sum of all f and b, and M microbatches, a synchronous step takes at least,
for every k,

    sum over s < k of (f_s + b_s)  +  M (f + b + r)      the stage works on all microbatches once the first is there
    S + (M - 1) b + (M - n) (f + r)                      what it has to do after its first backward
    S + (M - 1) f + (M - n) (b + r)                      what it has to do before its last forward
    S + (M - 1) (f + b)                                  under GPipe, where n = M

and the update of the first block, unless a host can do it. An endless schedule takes M (f + b + r) and the updates of
the slowest stage, less what a host may do of them in a step.

How much a stage must recompute follows from its bytes when its first backward begins, and after every n more: what n
microbatches keep there, less what the host's link carries in a whole step. Under PipeDream that includes n - 1 versions
of the weights. Devices hold the rest, the stage's own or others that lend to it. What is lent is set aside for a whole
run, so that all stages together hold at most what all devices have. Hence seconds are enough if the stages of some
split, each of which recomputes as long as its lines allow, together hold no more. Gradients and parameters that are
away must be back for the backward, so that they take of the link what tensors do.

The device that runs the largest layer has its bytes at least (`LayerCost.least_bytes`), whatever is away.

Every term is on the side that lowers the bound: layers take as long as on the fastest kind of device, links are not
shared, copies need no memory, optimizer state at a host takes no time, and the layers whose bytes cost the fewest
seconds are recomputed, in fractions. Techniques that the question does not allow free nothing. So the bound holds for
any plan, and the gap to it is the most that a better plan could gain. Alpa's sum + (M - 1) x maximum is no bound of
1F1B.

Costs: for some ten tries at the step's seconds, numbers for the ranges of blocks that may be a stage in so many
seconds: at most P L^2 for L blocks in P stages, and a tenth of that where stages can only be about even.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.errors import UsageError
from pipefit.lowering import schedule_named
from pipefit.planner.choices import Floats, Prices, Within, ranges
from pipefit.planner.problem import Question
from pipefit.schema.actions import Kind
from pipefit.schema.cluster import Cluster, Route
from pipefit.schema.devices import Host, Member, MemberKind
from pipefit.schema.training import Training
from pipefit.timing import host_update_seconds

# ----------------------------------------------------------------------------------------------------
# What the links between devices and their hosts carry when several devices use them at once.


def host_rates(cluster: Cluster, devices: Sequence[int | None]) -> list[float]:
    """Bytes per second, each way, that each of these devices has to its host if all of them use it; 0 for None.

    Devices behind one wire have equal parts of it. Zero too where no link joins a device with its host.
    """
    routes = [None if device is None else host_route(cluster, device) for device in devices]
    users = [wire for route in routes if route is not None for wire in route.wires]
    return [
        0.0 if route is None else route.both_ways_per_second / max(1, *map(users.count, route.wires))
        for route in routes
    ]


def host_route(cluster: Cluster, device: int) -> Route | None:
    """The way of a device to its host; None where nothing joins them."""
    try:
        return cluster.route(Member.device(device), Member.host(cluster.devices[device].host))
    except UsageError:
        return None


# ----------------------------------------------------------------------------------------------------

_CLOSE = 1e-4  # the part of the bound to which the bisection comes close
_ROUNDING = 1 + 1e-9  # for windows outside of which nothing is possible
_INFINITE = float("inf")


class Position(NamedTuple):
    """What a stage's place in the schedule says about its work."""

    microbatches: int
    in_flight: int  # forwards before its first backward
    before_last: int  # backwards before its last forward
    apart: bool  # all stages compute all forwards before their first backward, as under GPipe

    @property
    def windows(self) -> int:
        """How many sets of microbatches, none of them in two sets, are in flight together in a step."""
        return self.microbatches // self.in_flight

    @property
    def late_windows(self) -> int:
        """The same of those that go forward after the first backward."""
        return self.windows - 1


class Work(NamedTuple):
    """Seconds for one microbatch: of a stage, forward and backward; of all stages before it; and of all together."""

    forward: Floats
    backward: Floats
    before: Floats
    whole: float


@cache
def position_of(schedule: str, stage: int, stages: int, microbatches: int) -> Position:
    """The position of `stage` under a synchronous schedule.

    Raises:
        UsageError: no such schedule.
    """
    own, end = (
        [compute.kind for compute in schedule_named(schedule)(number, stages, 1, microbatches)]
        for number in (stage, stages - 1)
    )
    last = len(own) - 1 - own[::-1].index(Kind.FORWARD)
    held, at_end = own.index(Kind.BACKWARD), end.index(Kind.BACKWARD)
    return Position(microbatches, held, own[:last].count(Kind.BACKWARD), at_end == microbatches)


def in_flight(training: Training, stage: int, stages: int) -> int:
    """The microbatches that a stage holds at once."""
    return stages - stage if training.endless else _held(training.schedule, stages - stage, training.microbatches)


@cache
def _held(schedule: str, left: int, microbatches: int) -> int:
    """The forwards before the first backward of a stage with so many stages from itself on."""
    order = schedule_named(schedule)(0, left, 1, microbatches)
    return next(number for number, compute in enumerate(order) if compute.kind is Kind.BACKWARD)


def lines(at: Position, work: Work) -> tuple[Floats, Floats]:
    """A stage's lines under a synchronous schedule, without recomputation: the one to which that of all microbatches is
    added, and the highest of those to which that of the microbatches is added that go forward after its first backward.
    """
    m, f, b = at.microbatches, work.forward, work.backward
    every = work.before + m * (f + b)
    late: Floats = np.maximum(
        work.whole + (m - 1) * b + (m - at.in_flight) * f, work.whole + (m - 1) * f + at.before_last * b
    )
    return every, np.maximum(late, work.whole + (m - 1) * (f + b)) if at.apart else late


def highest_line(at: Position, work: Work) -> Floats:
    """The highest of a stage's lines under a synchronous schedule, without recomputation."""
    highest: Floats = np.maximum(*lines(at, work))
    return highest


def step_bound(question: Question) -> float:
    """Seconds that a step of any plan takes at least; infinity if no plan fits, whatever is moved or recomputed."""
    return _Bound(question).seconds()


def simple_bound(question: Question) -> float:
    """A lower bound that knows of no memory and no layers: the work of all blocks, divided as well as it could be.

    Of P stages with c seconds for one microbatch, stage k takes at least sum over s < k of c_s, and M c. The division
    in which all take as long has the fewest seconds, S / (1 - (1 - 1 / M)^P); an endless schedule takes M S / P.
    """
    prices, how = Prices(question), question.training
    whole = float(prices.forward[-1] + prices.backward[-1])
    if how.endless:
        return how.microbatches * whole / question.stages
    return whole / float(1 - (1 - 1 / how.microbatches) ** question.stages)


class _Bound:
    """Tables over ranges of blocks, as `Prices` has them, of which only windows are made: where stages may begin and
    end in a step of so many seconds.
    """

    def __init__(self, question: Question) -> None:
        self.question, self.count = question, question.blocks
        self.microbatches, self.endless = question.training.microbatches, question.training.endless
        self.prices = Prices(question)
        self.forward, self.backward, self.update = self.prices.forward, self.prices.backward, self.prices.update
        owned, gradients = question.ranges.owned()
        edges = np.array(question.edges)
        owned = owned - question.ranges.state[edges] if self._hosts_have_state else owned
        self.owned, self.gradients = owned.astype(float), gradients.astype(float)

    # ---------------------------------------------------------------- bisection

    def seconds(self) -> float:
        """The bound: the fewest seconds T such that a split has no line above T, and memory for all that it keeps."""
        least = max(cost.least_bytes for cost in self.question.measurement.costs)
        if least > max(self.question.cluster.budgets) or not self._has_memory(_INFINITE):
            return _INFINITE
        low = high = self._lowest
        while not self._has_memory(high):
            low, high = high, 2 * high
        while high - low > _CLOSE * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._has_memory(middle) else (middle, high)
        return low + self._first_update

    @cached_property
    def _lowest(self) -> float:
        """The lowest possible highest line of a split, if nothing is recomputed: no range of it has a higher one than
        any split has.
        """
        known = max(float(self._highest(stage, _of(*edges)).item()) for stage, edges in enumerate(pairwise(self._even)))
        windows = self._windows(lambda stage, within: self._highest(stage, within) <= known * _ROUNDING)
        assert windows is not None, "there is such a split"
        reached = np.zeros(1)
        for stage, within in enumerate(windows):
            reached = np.maximum(reached[:, None], self._highest(stage, within)).min(axis=0)
        return float(reached[-1])

    @property
    def _even(self) -> list[int]:
        """A split whose stages take about as long."""
        before, stages, edges = self.forward + self.backward, self.question.stages, [0]
        for stage in range(1, stages):
            at = int(np.searchsorted(before, before[-1] * stage / stages))
            edges.append(min(max(at, edges[-1] + 1), self.count - (stages - stage)))
        return [*edges, self.count]

    def _highest(self, stage: int, within: Within) -> Floats:
        """The higher line of ranges as this stage, in any number of seconds; infinity where there is no block."""
        return np.where(self._valid(within), np.maximum(*self._lines(stage, _INFINITE, within)), _INFINITE)

    def _has_memory(self, step: float) -> bool:
        """Whether in so many seconds some split recomputes and moves so much that devices have memory for the rest."""
        windows = self._windows(lambda stage, within: np.isfinite(self._held(stage, step, within, _ROUNDING)))
        if windows is None:
            return False
        held = np.zeros(1)
        for stage, within in enumerate(windows):
            held = (held[:, None] + self._held(stage, step, within)).min(axis=0)
        return bool(held[-1] <= sum(self.question.cluster.budgets))

    def _windows(self, possible: Callable[[int, Within], NDArray[np.bool_]]) -> list[Within] | None:
        """Where every stage may begin and end; None if nowhere. What is possible is so with fewer blocks, too.

        A stage that begins later may end later. Where a block is too much for a stage, it ends before, wherever it
        begins, and begins behind, wherever it ends.
        """
        count, stages = self.count, self.question.stages
        latest, earliest = [0], [count]
        for stage in range(stages):
            ends = np.flatnonzero(possible(stage, Within(_at(latest[-1]), slice(None))))
            latest.append(min(int(ends[-1]) if len(ends) else latest[-1], count - (stages - 1 - stage)))
        for stage in reversed(range(stages)):
            starts = np.flatnonzero(possible(stage, Within(slice(0, -1), _at(earliest[-1]))))
            earliest.append(max(stage, int(starts[0]) if len(starts) else earliest[-1]))
        edges = [*zip(reversed(earliest), latest, strict=True)]
        if latest[-1] < count or any(first > last for first, last in edges):
            return None
        bounds = [slice(first, last + 1) for first, last in edges]
        return [Within(*one) for one in pairwise(bounds)]

    @property
    def _first_update(self) -> float:
        """Seconds after the last backward of a step in which the first block is updated, if no host may do that."""
        return 0.0 if self.endless or self._updating else float(self.update[1])

    # ---------------------------------------------------------------- time

    def _lines(self, stage: int, step: float, within: Within) -> tuple[Floats, Floats]:
        """The lines of ranges of blocks as this stage; of an endless schedule, its work in a step of `step` seconds:
        passes and updates.
        """
        if self.endless:
            updates = self.microbatches if self.question.training.schedule == "pipedream" else 1
            passes = self.microbatches * ranges(self.forward + self.backward, within)
            found = passes + updates * ranges(self.update, within) * (1 - self._elsewhere(updates, step, within))
            return found, found
        before, whole = self.forward + self.backward, float(self.forward[-1] + self.backward[-1])
        work = Work(ranges(self.forward, within), ranges(self.backward, within), before[within.starts, None], whole)
        return lines(self._position(stage), work)

    def _position(self, stage: int) -> Position:
        return position_of(self.question.training.schedule, stage, self.question.stages, self.microbatches)

    def _elsewhere(self, updates: int, step: float, within: Within) -> Floats:
        """The part of the updates of ranges that the fastest host may do in a step, if it did nothing else."""
        if not self._updating:
            return np.zeros_like(ranges(self.update, within))
        fastest = max(self._updating, key=lambda host: host.memory_bandwidth or 0.0)
        times = [host_update_seconds(cost, fastest) for cost in self.question.measurement.costs]
        sums = np.concatenate([[0.0], np.cumsum(times)])[np.array(self.question.edges)]
        with np.errstate(divide="ignore", invalid="ignore"):
            share = step / (updates * np.maximum(ranges(sums, within), 0.0))
            return np.minimum(1.0, np.nan_to_num(share, nan=1.0, posinf=1.0))

    @cached_property
    def _updating(self) -> list[Host]:
        """The hosts that may update layers."""
        hosts = self.question.cluster.hosts if self._hosts_have_state else ()
        return [host for host in hosts if host.memory_bandwidth is not None]

    # ---------------------------------------------------------------- memory

    def _held(self, stage: int, step: float, within: Within, rounding: float = 1.0) -> Floats:
        """Bytes that devices hold for ranges as this stage: its own, and others that lend to it, for all of a run.

        Infinity where a line is above `step`, or what cannot be lent is more than the largest device has.
        """
        every, late = self._lines(stage, step, within)
        if self.endless:
            number = in_flight(self.question.training, stage, self.question.stages)
            windows = self.microbatches / number
            found = self._in_windows(number, windows, windows, step, step - every, within)
        else:
            at = self._position(stage)
            found = self._in_windows(at.in_flight, at.windows, 1, step, step - every, within)
            if at.late_windows:
                later = self._in_windows(at.in_flight, at.late_windows, 0, step, step - late, within)
                found = np.maximum(found, later)
        in_time = (every <= step * rounding) & (late <= step * rounding)
        possible = self._valid(within) & in_time & (found <= self._most * rounding)
        if not self._spills:  # parameters are there all the time
            possible &= ranges(self.owned, within) <= max(self.question.cluster.budgets) * rounding
        return np.where(possible, found, _INFINITE)

    def _in_windows(
        self, number: int, windows: float, without_gradients: float, step: float, spare: Floats, within: Within
    ) -> Floats:
        """Bytes that devices hold on an average of so many windows, in each of which `number` microbatches are in
        flight.

        In `without_gradients` of the windows the stage has no gradients yet. It may recompute for `spare` seconds in
        all windows together.
        """
        tensors, own = number * self.prices.kept(within), ranges(self.owned, within)
        own = own + ranges(self.gradients, within) * (1 - without_gradients / windows)
        if self.question.training.schedule == "pipedream":
            tensors = tensors + (number - 1) * np.maximum(ranges(self._weights, within), 0.0)
        if self.question.means.recompute != "never":
            tensors = tensors - self.prices.freed(np.maximum(spare, 0.0) / windows, number, within)
        away = self._host_rate * step / windows if self._host_rate else 0.0
        return np.maximum(tensors + own - away, 0.0 if self._spills else own)

    def _valid(self, within: Within) -> NDArray[np.bool_]:
        """Ranges of a block or more."""
        edges = np.arange(self.count + 1)
        return edges[within.starts, None] < edges[within.stops]

    @property
    def _most(self) -> float:
        """Bytes that devices may hold for one stage."""
        return _INFINITE if self.question.means.peers else max(self.question.cluster.budgets)

    @cached_property
    def _weights(self) -> Floats:
        """Sums of a version of the weights; one that layers share counts with the first of them alone."""
        sums = self.question.ranges.weights.copy()
        for shared in self.question.measurement.shared:
            for user in shared.users[1:] if shared.gradient_bytes else ():
                sums[user + 1 :] -= shared.nbytes + shared.copy_bytes
        weights: Floats = sums[np.array(self.question.edges)].astype(float)
        return weights

    # ---------------------------------------------------------------- hosts

    @cached_property
    def _spills(self) -> bool:
        """Whether a host may have parameters between passes."""
        return self.question.means.spill and self._host_rate > 0

    @cached_property
    def _hosts_have_state(self) -> bool:
        """Whether a host may have optimizer state."""
        return self.question.means.state and self._host_rate > 0

    @cached_property
    def _host_rate(self) -> float:
        """Bytes per second that the fastest links of a device carry to all that are no devices, if any may be used."""
        cluster = self.question.cluster
        if not self.question.means.host:
            return 0.0
        there = [Member.host(n) for n in range(len(cluster.hosts))]
        there += [Member(MemberKind.DISK, n) for n, host in enumerate(cluster.hosts) if host.disk_bytes]
        devices = map(Member.device, range(len(cluster.devices)))
        return max(sum(_rate(cluster, device, member) for member in there) for device in devices)


def _rate(cluster: Cluster, one: Member, other: Member) -> float:
    """Bytes per second between two members; zero where nothing joins them."""
    try:
        return cluster.route(one, other).bytes_per_second
    except UsageError:
        return 0.0


def _at(edge: int) -> slice:
    """An edge alone."""
    return slice(edge, edge + 1)


def _of(start: int, stop: int) -> Within:
    """A range alone."""
    return Within(_at(start), _at(stop))
