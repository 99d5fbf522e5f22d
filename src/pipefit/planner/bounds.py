"""Lower bounds of the seconds of a step, over all splits, devices, and memory decisions.

`step_bound(question)` is the bound. Let f, b and r be the seconds of stage k for a forward, a backward and
recomputation, n its microbatches in flight before its first backward, S the sum of f and b over all stages,
and M the number of microbatches. A synchronous step takes at least, for every k,

    sum over s < k of (f_s + b_s)  +  M (f + b + r)      all microbatches, once the first one has arrived
    S + (M - 1) b + (M - n) (f + r)                      the work after the stage's first backward
    S + (M - 1) f + (M - n) (b + r)                      the work before the stage's last forward
    S + (M - 1) (f + b)                                  under GPipe, for which n = M

and the update of the first block, unless a host can do it. An asynchronous schedule takes M (f + b + r) and
the updates of the slowest stage, less the updates that a host can do in a step.

The bytes of a stage at its first backward, and after every n further ones, imply how much it must recompute:
the bytes that n microbatches keep, less the bytes that the host's link carries in a whole step. Under
PipeDream they include n - 1 versions of the weights. Devices hold the rest: the stage's own device, or others
that lend memory for the whole run, as far as the device's links carry the bytes to them. But tensors leave
after a forward, so at its end the stage's own device holds those of one microbatch that are not recomputed.
All stages together hold at most the memory of all devices, and a number of seconds is feasible if some split,
whose stages recompute for as long as their lines allow, holds no more than that. Offloaded gradients and
parameters must return for the backward, so they use the link as tensors do. Optimizer state elsewhere, or the
gradients for its update there, pass the link in every update while the stage waits. The device that runs the
largest layer holds at least its bytes (`LayerCost.least_bytes`), whatever is offloaded. Devices, hosts and
disks together hold all bytes of all stages.

A stage takes the seconds of its own kind of device, with its budget, and no kind has more stages than
devices. So the search for a split counts the used devices of each kind: of all ways to divide the first
blocks among the same numbers of devices, only the best matters to later stages. A first pass finds the fewest
seconds of the stages before each stage, and S, over all splits whose lines are not above the given seconds.
The first update counts with the fastest kind for each layer, and so does everything if kinds are too many for
a table.

Every term is on the side that lowers the bound: links are not shared, copies need no memory, time is used
both for recomputation and for updates elsewhere, and the layers with the fewest seconds for each byte are
recomputed, in fractions.
Techniques that the question does not allow free nothing. So the bound holds for any plan, and the gap to it
is the most that a better plan could gain. Alpa's sum plus (M - 1) times the maximum is not a bound of 1F1B.

Cost: some ten bisection steps over the ranges of blocks that may be a stage in the given seconds: at most P
L^2 numbers for L blocks in P stages, and a tenth of that if stages must be about even.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.errors import UsageError
from pipefit.lowering import schedule_named
from pipefit.planner.memory_choices import BlockPrices, Floats, Within, ranges
from pipefit.planner.problem import Question
from pipefit.schema.actions import Kind
from pipefit.schema.cluster import Cluster, Route
from pipefit.schema.devices import Host, Member, MemberKind
from pipefit.schema.training import Training
from pipefit.timing import host_update_seconds

# ---- Shared rates of the links between devices and their hosts


def host_rates(cluster: Cluster, devices: Sequence[int | None]) -> list[float]:
    """Return each device's bytes per second to its host, each way, if all these devices use their links.

    Devices on one wire share it equally. The rate is 0 for None, and for a device without a link to its host.
    """
    routes = [None if device is None else host_route(cluster, device) for device in devices]
    users = [wire for route in routes if route is not None for wire in route.wires]
    return [
        0.0 if route is None else route.both_ways_per_second / max(1, *map(users.count, route.wires))
        for route in routes
    ]


def host_route(cluster: Cluster, device: int) -> Route | None:
    """Return the route of a device to its host; None if no link joins them."""
    try:
        return cluster.route(Member.device(device), Member.host(cluster.devices[device].host))
    except UsageError:
        return None


# ---- Bound

_CLOSE = 1e-4  # relative precision of the bisection
_ROUNDING = 1 + 1e-9  # margin of windows, outside of which nothing is possible
_CELLS = (
    20_000_000  # ranges of blocks, times changes of the used devices, up to which kinds are distinguished
)
_FEW_CELLS = 300_000  # the same, up to which budgets are distinguished too
_INFINITE = float("inf")
_NOTHING = 1e30  # bytes of a transfer for each byte of state, if there is none


class StageWork(NamedTuple):
    """The work of a stage that follows from its place in the schedule."""

    microbatches: int
    in_flight: int  # forwards before its first backward
    before_last: int  # backwards before its last forward
    apart: bool  # all stages compute all forwards before their first backward, as under GPipe

    @property
    def windows(self) -> int:
        """Number of disjoint sets of microbatches that are in flight together in a step."""
        return self.microbatches // self.in_flight

    @property
    def late_windows(self) -> int:
        """Number of those sets whose forwards come after the first backward."""
        return self.windows - 1


class MicrobatchSeconds(NamedTuple):
    """Seconds for one microbatch: a stage's forward and backward, all stages before it, and all stages."""

    forward: Floats
    backward: Floats
    before: Floats
    whole: Floats | float


@cache
def position_of(schedule: str, stage: int, stages: int, microbatches: int) -> StageWork:
    """Return the position of `stage` under a synchronous schedule.

    Raises:
        UsageError: the schedule is unknown.
    """
    own, end = (
        [compute.kind for compute in schedule_named(schedule)(number, stages, 1, microbatches)]
        for number in (stage, stages - 1)
    )
    last = len(own) - 1 - own[::-1].index(Kind.FORWARD)
    held, at_end = own.index(Kind.BACKWARD), end.index(Kind.BACKWARD)
    return StageWork(microbatches, held, own[:last].count(Kind.BACKWARD), at_end == microbatches)


def in_flight(training: Training, stage: int, stages: int) -> int:
    """Return the number of microbatches that a stage holds at once."""
    return (
        stages - stage
        if training.endless
        else _held(training.schedule, stages - stage, training.microbatches)
    )


@cache
def _held(schedule: str, left: int, microbatches: int) -> int:
    """Return the forwards before the first backward of a stage; `left` counts the stages from this one on."""
    order = schedule_named(schedule)(0, left, 1, microbatches)
    return next(number for number, compute in enumerate(order) if compute.kind is Kind.BACKWARD)


def lines(at: StageWork, work: MicrobatchSeconds) -> tuple[Floats, Floats]:
    """Return a stage's two lower bounds of a synchronous step, in seconds, without recomputation.

    To the first one, the recomputation of all microbatches is added; to the second one (the maximum of
    several lines), the recomputation of the microbatches whose forwards come after the stage's first
    backward.
    """
    m, f, b = at.microbatches, work.forward, work.backward
    every = work.before + m * (f + b)
    late: Floats = np.maximum(
        work.whole + (m - 1) * b + (m - at.in_flight) * f, work.whole + (m - 1) * f + at.before_last * b
    )
    return every, np.maximum(late, work.whole + (m - 1) * (f + b)) if at.apart else late


def step_bound(question: Question) -> float:
    """Return a lower bound of the seconds of a step of any plan; infinity if no plan fits."""
    return _Bound(question).seconds()


def simple_bound(question: Question) -> float:
    """Return a lower bound that ignores memory and layers: the work of all blocks, divided in the best way.

    Of P stages with c seconds for one microbatch, stage k takes at least sum over s < k of c_s, and M
    c_k. Let a device do in a second the work of v seconds on the fastest kind for each block, at most.
    In T seconds all stages together do at most T / M times the sum of v_k (1 - 1 / M)^k, all of their
    lines being T, if the fastest P devices come in falling order of v. For this is a linear programme
    with the dual variables y_k = (v_k - sum over j > k of y_j) / M, which are not negative in falling
    order; and swapping two neighbours into falling order never lowers the sum of y. An asynchronous
    schedule does T / M times the sum of v.
    """
    how, fastest = question.training, BlockPrices(question)
    kinds = {device.kind.key: device.kind for device in question.cluster.devices}
    work = np.diff(fastest.forward + fastest.backward)
    speeds = dict[object, float]()
    for key, kind in kinds.items():
        own = BlockPrices(question, (kind,)) if len(kinds) > 1 else fastest
        times = np.diff(own.forward + own.backward)
        speeds[key] = float(np.max(work[times > 0] / times[times > 0], initial=0.0)) or 1.0
    falling = sorted((speeds[device.kind.key] for device in question.cluster.devices), reverse=True)
    later = 1.0 if how.endless else 1 - 1 / how.microbatches
    done = sum(speed * later**stage for stage, speed in enumerate(falling[: question.stages]))
    return how.microbatches * _whole(fastest) / done


class _Sums(NamedTuple):
    """Fewest seconds of a microbatch in all stages before each stage, at every edge, and in all stages."""

    before: Sequence[Floats]
    whole: float


class _Kind(NamedTuple):
    """Prices on a kind of device, the number of such devices, and the largest budget of one."""

    prices: BlockPrices
    devices: int
    budget: int


class _Bound:
    """Bisection over the seconds of a step, on tables over ranges of blocks (`BlockPrices`).

    Only windows of the tables are computed: edges at which stages may start and stop within the given
    seconds.
    """

    def __init__(self, question: Question) -> None:
        self.question, self.count = question, question.blocks
        self.microbatches, self.endless = question.training.microbatches, question.training.endless
        fastest = BlockPrices(question)
        self.forward, self.backward, self.update = fastest.forward, fastest.backward, fastest.update
        self.any = _Kind(fastest, len(question.cluster.devices), max(question.cluster.budgets))
        self.kinds = self._few_kinds()
        owned, gradients = question.ranges.owned()
        edges = np.array(question.edges)
        self.with_state = owned.astype(float)
        owned = owned - question.ranges.state[edges] if self._hosts_have_state else owned
        self.owned, self.gradients = owned.astype(float), gradients.astype(float)

    # ---- Kinds of devices

    def _few_kinds(self) -> list[_Kind]:
        """Return the kinds of devices; a single one, as fast as all, if the search would take too long.

        Devices of one speed with different budgets are different kinds if these are few.
        """
        devices, cells = self.question.cluster.devices, self.count**2
        by_budget = Counter((device.kind.key, device.memory_bytes) for device in devices)
        rising = sorted(devices, key=lambda device: device.memory_bytes)
        largest = {device.kind.key: device.memory_bytes for device in rising}
        by_speed = Counter((device.kind.key, largest[device.kind.key]) for device in devices)
        for most, own in ((_FEW_CELLS, by_budget), (_CELLS, by_speed)):
            changes = prod(count + 1 for count in own.values()) * len(own)
            if len(own) > 1 and changes * cells <= most:
                kinds = {one.kind.key: one.kind for one in devices}
                prices = {key: BlockPrices(self.question, (kind,)) for key, kind in kinds.items()}
                return [_Kind(prices[key], count, budget) for (key, budget), count in own.items()]
        return [self.any]

    def _least(
        self,
        windows: Sequence[Within],
        value: Callable[[int, Within, _Kind], Floats],
        together: Callable[[Floats, Floats], Floats],
    ) -> float:
        """Return the least value of a split: those of its stages, `together` from the first to the last."""
        return min(float(values[-1]) for values in [*self._reached(windows, value, together)][-1].values())

    def _reached(
        self,
        windows: Sequence[Within],
        value: Callable[[int, Within, _Kind], Floats],
        together: Callable[[Floats, Floats], Floats],
    ) -> Iterator[dict[tuple[int, ...], Floats]]:
        """Yield after every stage the least values by used devices of each kind, at edges of the window."""
        reached = {(0,) * len(self.kinds): np.zeros(1)}
        for stage, within in enumerate(windows):
            values = [value(stage, within, kind) for kind in self.kinds]
            after = dict[tuple[int, ...], Floats]()
            for used, before in reached.items():
                for number, kind in enumerate(self.kinds):
                    if used[number] < kind.devices:
                        there = (*used[:number], used[number] + 1, *used[number + 1 :])
                        total = together(before[:, None], values[number]).min(axis=0)
                        after[there] = np.minimum(total, after.get(there, _INFINITE))
            reached = after
            yield reached

    # ---- Bisection

    def seconds(self) -> float:
        """Return the fewest seconds T for which a split has no line above T and fits all devices' memory."""
        least = max(cost.least_bytes for cost in self.question.measurement.costs)
        if least > max(self.question.cluster.budgets) or not self._has_memory(_INFINITE):
            return _INFINITE
        if not self._has_memory_anywhere:
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
        """The lowest possible highest line of a split without recomputation.

        Ranges with a higher line than the even split cannot be part of the best split.
        """
        known = max(
            float(self._highest(stage, _of(*edges), kind).item())
            for stage, (edges, kind) in enumerate(zip(pairwise(self._even), self._quickest, strict=True))
        )
        windows = self._windows(lambda stage, within: self._highest(stage, within) <= known * _ROUNDING)
        assert windows is not None, "such a split exists"
        return self._least(windows, self._highest, np.maximum)

    @property
    def _quickest(self) -> list[_Kind]:
        """A kind of device for every stage: the fastest devices."""
        rising = sorted(self.kinds, key=lambda kind: _whole(kind.prices))
        return [kind for kind in rising for _ in range(kind.devices)][: self.question.stages]

    @property
    def _even(self) -> list[int]:
        """A split whose stages take about equally long on the fastest devices."""
        before, stages, edges = self.forward + self.backward, self.question.stages, [0]
        speeds = np.cumsum([1 / (_whole(kind.prices) or 1.0) for kind in self._quickest])
        for stage in range(1, stages):
            at = int(np.searchsorted(before, before[-1] * speeds[stage - 1] / speeds[-1]))
            edges.append(min(max(at, edges[-1] + 1), self.count - (stages - stage)))
        return [*edges, self.count]

    def _highest(self, stage: int, within: Within, kind: _Kind | None = None) -> Floats:
        """Return the higher line of ranges as this stage, without a time limit; infinity for empty ranges."""
        every, late = self._lines(stage, _INFINITE, within, kind or self.any, self._fastest)
        return np.where(self._valid(within), np.maximum(every, late), _INFINITE)

    def _has_memory(self, step: float) -> bool:
        """Return whether, in `step` seconds, some split recomputes and moves enough to fit all devices."""
        windows = self._windows(
            lambda stage, within: np.isfinite(
                self._held(stage, step, within, self.any, self._fastest, _ROUNDING)
            )
        )
        if windows is None:
            return False
        sums = self._fastest if len(self.kinds) == 1 or self.endless else self._sums(windows, step)

        def held(stage: int, within: Within, kind: _Kind) -> Floats:
            return self._held(stage, step, within, kind, sums)

        return self._least(windows, held, np.add) <= sum(self.question.cluster.budgets)

    @property
    def _fastest(self) -> _Sums:
        """Seconds of a microbatch if every layer ran on the fastest kind of device for it."""
        before = self.forward + self.backward
        return _Sums([before] * self.question.stages, float(before[-1]))

    def _sums(self, windows: Sequence[Within], step: float) -> _Sums:
        """Return the fewest seconds in all stages before each stage, and in all, of splits within `step`
        seconds.

        Infinity if there is none.
        """

        def passes(stage: int, within: Within, kind: _Kind) -> Floats:
            every, late = self._lines(stage, step, within, kind, self._fastest)
            own = ranges(kind.prices.forward + kind.prices.backward, within)
            possible = self._valid(within) & (np.maximum(every, late) <= step * _ROUNDING)
            return np.where(possible, own, _INFINITE)

        before, whole = [self._fastest.before[0]], _INFINITE
        for stage, reached in enumerate(self._reached(windows, passes, np.add)):
            fewest = np.minimum.reduce([*reached.values()])
            before.append(np.full(self.count + 1, _INFINITE))
            before[-1][windows[stage].stops] = fewest
            whole = float(fewest[-1])
        return _Sums(before, whole)

    @property
    def _has_memory_anywhere(self) -> bool:
        """Return whether devices, hosts and disks together have memory for some split.

        Memory at hosts and disks is reserved for the whole run, like memory that devices lend. Recomputation
        may free all saved tensors.
        """
        question, cluster = self.question, self.question.cluster
        hosts = cluster.hosts if question.means.host else ()
        room = sum(cluster.budgets) + sum(host.memory_bytes + (host.disk_bytes or 0) for host in hosts)
        if self._recomputes:
            return bool(self.with_state[-1] <= room)
        every = Within(slice(None), slice(None))
        possible = self._valid(every)
        if not self._spills:  # parameters and sums of gradients of several microbatches stay on the device
            summed = 0 if self.endless or self.microbatches < 2 else ranges(self.gradients, every)
            possible &= ranges(self.owned, every) + summed <= max(cluster.budgets)
        own = np.where(possible, ranges(self.with_state, every), _INFINITE)
        kept, held = self.any.prices.kept(every), np.array([0.0, *[_INFINITE] * self.count])
        for stage in range(question.stages):
            number = in_flight(question.training, stage, question.stages)
            held = (held[:, None] + own + number * kept).min(axis=0)
        return bool(held[-1] <= room)

    def _windows(self, possible: Callable[[int, Within], NDArray[np.bool_]]) -> list[Within] | None:
        """Return the edges at which each stage may start and stop; None if no split is possible.

        `possible` is monotone: a possible range stays possible with fewer blocks. So a stage that starts
        later may stop later. If a block is too large for a stage, a stage that starts at or before it stops
        before it, and a stage that stops after it starts after it.
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
        """Seconds of the first block's update after a step's last backward; 0 if a host can do it."""
        return 0.0 if self.endless or self._updating else float(self.update[1])

    # ---- Time

    def _lines(
        self, stage: int, step: float, within: Within, kind: _Kind, sums: _Sums
    ) -> tuple[Floats, Floats]:
        """Return the two lines of ranges of blocks as this stage on a kind of device.

        Under an asynchronous schedule both are its work, passes and updates, in a step of `step` seconds.
        """
        if self.endless:
            updates = self.microbatches if self.question.training.schedule == "pipedream" else 1
            passes = self.microbatches * ranges(kind.prices.forward + kind.prices.backward, within)
            result = passes + updates * ranges(kind.prices.update, within) * (
                1 - self._elsewhere(updates, step, within)
            )
            return result, result
        forward, backward = ranges(kind.prices.forward, within), ranges(kind.prices.backward, within)
        fastest = self.forward + self.backward
        slower = forward + backward - ranges(fastest, within)  # than on the fastest kind
        whole = np.maximum(fastest[-1] + slower, sums.whole)
        work = MicrobatchSeconds(forward, backward, sums.before[stage][within.starts, None], whole)
        return lines(self._position(stage), work)

    def _position(self, stage: int) -> StageWork:
        return position_of(self.question.training.schedule, stage, self.question.stages, self.microbatches)

    def _elsewhere(self, updates: int, step: float, within: Within) -> Floats:
        """Return the part of the updates of ranges that the fastest host could do alone in a step."""
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
        """Hosts that may update layers."""
        hosts = self.question.cluster.hosts if self._hosts_have_state else ()
        return [host for host in hosts if host.memory_bandwidth is not None]

    # ---- Memory

    def _held(
        self,
        stage: int,
        step: float,
        within: Within,
        kind: _Kind,
        sums: _Sums,
        rounding: float = 1.0,
    ) -> Floats:
        """Return the bytes that devices hold for ranges as this stage, on its device and on lenders.

        Memory is lent for the whole run. Infinity if a line is above `step`, or if the bytes that cannot be
        lent exceed the largest device.
        """
        every, late = self._lines(stage, step, within, kind, sums)
        updating = step - self.microbatches * ranges(kind.prices.forward + kind.prices.backward, within)
        staying = self._staying(np.maximum(updating, 0.0), within)
        result, possible = np.zeros_like(every), self._valid(within)
        for number, windows, without, line in self._windows_of(stage, every, late):
            held = staying + self._in_windows(number, windows, without, step, step - line, within, kind)
            possible &= held <= (kind.budget + self._lent(step / windows, updating)) * rounding
            result = np.maximum(result, held)
        possible &= (every <= step * rounding) & (late <= step * rounding)
        at_once = self._at_once(step, (step - every) / self.microbatches, within, kind)
        possible &= at_once <= kind.budget * rounding
        if not self._spills:  # parameters stay on the device all the time
            possible &= ranges(self.owned, within) <= kind.budget * rounding
        return np.where(possible, result, _INFINITE)

    def _at_once(self, step: float, spare: Floats, within: Within, kind: _Kind) -> Floats:
        """Return the bytes on the device of ranges at the end of each forward.

        All tensors of the microbatch are there that it does not recompute, in `spare` seconds, since they
        leave after the forward. Parameters that are elsewhere must come back for the next one.
        """
        tensors = kind.prices.kept(within)
        if self._recomputes:
            tensors = tensors - kind.prices.freed(np.maximum(spare, 0.0), 1, within)
        if not self._spills:
            return tensors + ranges(self.owned, within)
        away = (self._host_rate + self._peer_rate) * step / self.microbatches
        return tensors + np.maximum(ranges(self._weights, within) - away, 0.0)

    @property
    def _recomputes(self) -> bool:
        """True if the question allows or requests recomputation."""
        return self.question.means.recompute != "never" or self.question.options.recompute != "never"

    def _windows_of(
        self, stage: int, every: Floats, late: Floats
    ) -> Iterator[tuple[int, float, float, Floats]]:
        """Yield microbatches in flight, windows, those without gradients, and the line of each term."""
        if self.endless:
            number = in_flight(self.question.training, stage, self.question.stages)
            windows = self.microbatches / number
            yield number, windows, windows, every
            return
        at = self._position(stage)
        yield at.in_flight, at.windows, 1, every
        if at.late_windows:
            yield at.in_flight, at.late_windows, 0, late

    def _lent(self, seconds: float, updating: Floats) -> Floats | float:
        """Return bytes that peers can hold for a stage: tensors once in `seconds`, and optimizer state."""
        if not self._peer_rate:
            return 0.0
        return (
            self._peer_rate * (seconds + updating / self._update_bytes) if self._update_bytes else _INFINITE
        )

    def _staying(self, updating: Floats, within: Within) -> Floats:
        """Return bytes of optimizer state that cannot leave ranges whose updates take `updating` seconds."""
        if not self._hosts_have_state:  # it is owned
            return np.zeros_like(updating)
        state = np.maximum(ranges(self._state, within), 0.0)
        if not self._update_bytes:
            return np.zeros_like(updating)
        return np.maximum(state - updating * self._host_rate / self._update_bytes, 0.0)

    def _in_windows(
        self,
        number: int,
        windows: float,
        without_gradients: float,
        step: float,
        spare: Floats,
        within: Within,
        kind: _Kind,
    ) -> Floats:
        """Return the bytes held on average over `windows` windows, each with `number` microbatches in flight.

        In `without_gradients` of the windows the stage has no gradients yet. It may recompute for `spare`
        seconds in all windows together.
        """
        tensors, own = number * kind.prices.kept(within), ranges(self.owned, within)
        own = own + ranges(self.gradients, within) * (1 - without_gradients / windows)
        if self.question.training.schedule == "pipedream":
            tensors = tensors + (number - 1) * np.maximum(ranges(self._weights, within), 0.0)
        if self._recomputes:
            tensors = tensors - kind.prices.freed(np.maximum(spare, 0.0) / windows, number, within)
        away = self._host_rate * step / windows if self._host_rate else 0.0
        return np.maximum(tensors + own - away, 0.0 if self._spills else own)

    def _valid(self, within: Within) -> NDArray[np.bool_]:
        """Return a mask of ranges of at least one block."""
        edges = np.arange(self.count + 1)
        return edges[within.starts, None] < edges[within.stops]

    @cached_property
    def _weights(self) -> Floats:
        """Prefix sums of the bytes of a version of the weights; shared ones count with their first layer."""
        sums = self.question.ranges.weights.copy()
        for shared in self.question.measurement.shared:
            for user in shared.users[1:] if shared.gradient_bytes else ():
                sums[user + 1 :] -= shared.nbytes + shared.copy_bytes
        weights: Floats = sums[np.array(self.question.edges)].astype(float)
        return weights

    # ---- Hosts and peers

    @cached_property
    def _state(self) -> Floats:
        """Prefix sums of the bytes of optimizer state."""
        state: Floats = self.question.ranges.state[np.array(self.question.edges)].astype(float)
        return state

    @cached_property
    def _update_bytes(self) -> float:
        """Bytes that leave a device in a step for each byte of optimizer state that is elsewhere, at least.

        Either the state itself or, if a host updates it, its gradients; in each update, between the last
        backward before it and the device's next action. Shared parameters may need less.
        """
        measured = self.question.measurement
        if measured.shared:
            return 0.0
        shares = [min(1.0, c.gradient_bytes / c.state_bytes) for c in measured.costs if c.state_bytes]
        pipedream = self.question.training.schedule == "pipedream"
        return min(shares, default=_NOTHING) * (self.microbatches if pipedream else 1)

    @cached_property
    def _peer_rate(self) -> float:
        """Bytes per second of the fastest links from a device to all others, if they may lend memory."""
        cluster = self.question.cluster
        if not self.question.means.peers:
            return 0.0
        devices = [Member.device(n) for n in range(len(cluster.devices))]
        return max(sum(_rate(cluster, member, two) for two in devices if two != member) for member in devices)

    @cached_property
    def _spills(self) -> bool:
        """True if a host may hold parameters between passes."""
        return self.question.means.spill and self._host_rate > 0

    @cached_property
    def _hosts_have_state(self) -> bool:
        """True if a host may hold optimizer state."""
        return self.question.means.state and self._host_rate > 0

    @cached_property
    def _host_rate(self) -> float:
        """Bytes per second of the fastest links from a device to all hosts and disks, if any may be used."""
        cluster = self.question.cluster
        if not self.question.means.host:
            return 0.0
        there = [Member.host(n) for n in range(len(cluster.hosts))]
        there += [Member(MemberKind.DISK, n) for n, host in enumerate(cluster.hosts) if host.disk_bytes]
        devices = map(Member.device, range(len(cluster.devices)))
        return max(sum(_rate(cluster, device, member) for member in there) for device in devices)


def _rate(cluster: Cluster, member: Member, other: Member) -> float:
    """Return the bytes per second between two members; zero if no link joins them."""
    try:
        return cluster.route(member, other).bytes_per_second
    except UsageError:
        return 0.0


def _whole(prices: BlockPrices) -> float:
    """Return the seconds of a microbatch through all blocks."""
    return float(prices.forward[-1] + prices.backward[-1])


def _at(edge: int) -> slice:
    """Return the slice of one edge."""
    return slice(edge, edge + 1)


def _of(start: int, stop: int) -> Within:
    """Return one range."""
    return Within(_at(start), _at(stop))
