"""Balanced splits: cuts and an order of the devices whose stages take about equally long.

The time split balances forward and backward, the exact planner's split balances peaks. Between them are
splits whose early stages, which hold the most microbatches, get fewer blocks because their recomputation
takes time too. On unequal devices the seconds are those of a stage's own device, and memory that a device
lacks costs recomputation, so one estimate decides about speed, memory and links to hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.errors import UsageError
from pipefit.planner.bounds import host_rates, host_route, in_flight
from pipefit.planner.closed_forms.bands import Band, stage_peak
from pipefit.planner.memory_choices import BlockPrices, DevicePrices, Floats, ranges
from pipefit.planner.problem import Question, Split
from pipefit.schema.devices import Member
from pipefit.timing import layer_seconds

_POWER = 12.0
_MISSING = (
    1e3  # multiple of the seconds of all blocks, for each share of the budget by which a range is too large
)
_AWAY = 2.0
_CELLS = (
    20_000_000  # ranges of blocks, times changes of the used devices, up to which all orders are compared
)
_UNLINKED = 1e100  # value of stages on devices that no link joins
_SLIGHT = 0.01  # part of an even stage's seconds by which messages may differ between equal devices
_LINKED = 16  # number of devices up to which their links are compared
DOUBLE = 2  # number of blocks whose optimizer state is on the device during an update

Indices = NDArray[np.intp]
Groups = tuple[tuple[int, ...], ...]  # interchangeable devices


class _Used(NamedTuple):
    """Number of devices of each group that have a stage, and the group of the last stage."""

    counts: tuple[int, ...]
    last: int

    def then(self, group: int) -> _Used:
        """Return the state after a stage on a device of a group."""
        counts = (*self.counts[:group], self.counts[group] + 1, *self.counts[group + 1 :])
        return _Used(counts, group)


class _Way(NamedTuple):
    """The best ways to a state: for every edge, the value, the state before and the edge before."""

    values: Floats
    states: list[_Used]
    state: Indices
    edge: Indices


class Balance:
    """Estimates of the seconds of all ranges of blocks as stages, on every device.

    For every range: seconds of forward, backward, and the recomputation that remains after the host has taken
    the allowed part of its link. Dynamic programming finds the split with the most even seconds, by the sum
    of high powers, in which the largest dominate. `devices` have the stages, by default all of the cluster,
    in any order; those that share a wire to the host share it equally.

    Cost: that of the lower bound; a few hundredths of a second for 128 blocks in 8 stages.
    """

    def __init__(self, question: Question, devices: Sequence[int] = ()) -> None:
        self.question, self.prices = question, DevicePrices(question)
        self._devices = tuple(devices) or tuple(range(len(question.cluster.devices)))
        self._rates = dict(zip(self._devices, host_rates(question.cluster, self._devices), strict=True))
        self._known: dict[int, Floats] = {}
        self.valid = np.arange(question.blocks)[:, None] < np.arange(question.blocks + 1)
        fastest = BlockPrices(question)
        self._whole = float(fastest.forward[-1] + fastest.backward[-1])

    def split(self, host: float, *, states: bool = False) -> Split:
        """Return the most even split with stage s on `devices[s]`, if offloading may use the part `host` of
        the host's link.

        With `states` the host has all optimizer state except that of the blocks being updated.
        """
        reached, came = self._start, list[Indices]()
        for stage, device in enumerate(self._devices):
            total = reached[:-1, None] + self._cost(stage, device, host, states)
            came.append(total.argmin(axis=0))
            reached = total.min(axis=0)
        edges = [self.question.blocks]
        for before in reversed(came):
            edges.append(int(before[edges[-1]]))
        return Split(tuple(reversed(edges)), self._devices)

    def arranged(self, host: float, *, states: bool = False) -> Split:
        """Return the most even split over all orders of the devices, if these are few (`differ`).

        Between two stages, the seconds of their messages count too.
        """
        groups = interchangeable(self.question)
        ways = [{_Used((0,) * len(groups), -1): _Way(self._start, [], *[np.zeros(0, np.intp)] * 2)}]
        for stage in range(self.question.stages):
            costs = [self._cost(stage, group[0], host, states) for group in groups]
            ways.append(self._after(ways[-1], costs, groups))
        state = min(ways[-1], key=lambda used: float(ways[-1][used].values[-1]))
        edges, order = [self.question.blocks], list[int]()
        for every in reversed(ways[1:]):
            way, at = every[state], edges[-1]
            order.append(groups[state.last][state.counts[state.last] - 1])
            edges.append(int(way.edge[at]))
            state = way.states[way.state[at]]
        return Split(tuple(reversed(edges)), tuple(reversed(order)))

    def _after(self, before: dict[_Used, _Way], costs: Sequence[Floats], groups: Groups) -> dict[_Used, _Way]:
        """Return the best ways to all states after one more stage, whose cost depends on its group."""
        found = dict[_Used, list[tuple[_Used, Floats, Indices]]]()
        for used, way in before.items():
            for number, group in enumerate(groups):
                if used.counts[number] < len(group):
                    sent = self._sent(groups, used.last, number) if used.last >= 0 else 0.0
                    total = (way.values + sent)[:-1, None] + costs[number]
                    edge = total.argmin(axis=0)
                    best = np.take_along_axis(total, edge[None], 0)[0]
                    found.setdefault(used.then(number), []).append((used, best, edge))
        result = dict[_Used, _Way]()
        for used, every in found.items():
            states, values, edges = zip(*every, strict=True)
            state = np.argmin(values, axis=0)
            columns = np.arange(len(state))
            result[used] = _Way(
                np.array(values)[state, columns], [*states], state, np.array(edges)[state, columns]
            )
        return result

    @property
    def _start(self) -> Floats:
        """Values of no stage: zero at the first edge."""
        result: Floats = np.full(self.question.blocks + 1, np.inf)
        result[0] = 0.0
        return result

    @property
    def _even(self) -> float:
        """Seconds of a stage if all took equally long on the fastest devices."""
        return self._whole / self.question.stages or 1.0

    def _cost(self, stage: int, device: int, host: float, states: bool) -> Floats:
        """Return the value of every range as this stage on a device."""
        seconds = self._seconds(stage, device, host, states)
        return np.where(self.valid, (seconds / self._even) ** _POWER, np.inf)

    def _seconds(self, stage: int, device: int, host: float, states: bool) -> Floats:
        """Return the seconds for each microbatch, for every range as this stage on a device."""
        prices = self.prices.on(device)
        return ranges(prices.forward + prices.backward) + self._again(stage, device, host, states)

    def _again(self, stage: int, device: int, host: float, states: bool) -> Floats:
        """Return the seconds in which a microbatch is recomputed; missing memory adds a penalty."""
        held, prices = self._in_flight[stage], self.prices.on(device)
        budget = self.question.cluster.budgets[device]
        need = self._peaks(stage) - budget - (self._away if states else 0.0)
        need = np.where(need > 0, need + self._largest, 0.0)
        moved = self._rates[device] * host * ranges(prices.forward + prices.backward) * max(0.0, held - _AWAY)
        left = np.maximum(need - moved, 0.0)
        missing = np.maximum(left - held * self._kept, 0.0) / budget
        return prices.seconds(left, held) / held + missing * _MISSING * self._whole

    def _sent(self, groups: Groups, one: int, other: int) -> Floats | float:
        """Return the value of the messages of a microbatch between two stages, at every edge.

        A link takes its time as a stage does. Under 1F1B a microbatch passes P links on its way there and
        back, during which a first stage starts P others, so each delay lasts a P-th of itself per
        microbatch; schedules with more microbatches in flight are delayed once in a step.
        """
        near, far = groups[one][0], groups[other][1 if one == other and len(groups[other]) > 1 else 0]
        try:
            route = self.question.cluster.route(Member.device(near), Member.device(far))
        except UsageError:
            return _UNLINKED
        seconds = 2 * route.latency_seconds + self._messages / route.bytes_per_second
        how, stages = self.question.training, self.question.stages
        hidden = how.schedule in ("gpipe", "torchgpipe", "eager-1f1b")
        times = _POWER * (stages / how.microbatches if hidden else 1.0)
        value: Floats = times * seconds / self._even + (seconds / self._even) ** _POWER
        return value

    @cached_property
    def _messages(self) -> Floats:
        """Bytes that pass every edge for a microbatch, there and back."""
        inputs = [cost.inputs for cost in self.question.measurement.costs]
        nbytes = [sum(v.nbytes * (1 + v.has_gradient) for v in own) for own in inputs]
        result: Floats = np.array([*nbytes, 0], float)[np.array(self.question.edges)]
        return result

    def _peaks(self, stage: int) -> Floats:
        """Return the peak of every range that keeps everything."""
        if stage not in self._known:
            blocks = self.question.blocks
            peaks = stage_peak(self._band, self.question.surroundings(stage))
            result = self._known[stage] = np.zeros(self.valid.shape)
            for start in range(blocks):
                result[start, start + 1 :] = peaks[: blocks - start, start]
        return self._known[stage]

    @cached_property
    def _band(self) -> Band:
        return self.question.ranges.band(self.question.blocks, estimated=True)

    @cached_property
    def _kept(self) -> Floats:
        return self.prices.on(0).kept()

    @cached_property
    def _largest(self) -> float:
        """Bytes of the block that keeps the most; they exist once more while the block is recomputed."""
        return max(float(self._kept[n, n + 1]) for n in range(self.question.blocks))

    @cached_property
    def _away(self) -> Floats:
        """Offloaded optimizer state of every range: all but twice that of the largest block."""
        state = ranges(self.question.ranges.state[np.array(self.question.edges)].astype(float))
        each = max(float(state[n, n + 1]) for n in range(self.question.blocks))
        return np.maximum(state - DOUBLE * each, 0.0)

    @cached_property
    def _in_flight(self) -> list[int]:
        stages = self.question.stages
        return [in_flight(self.question.training, stage, stages) for stage in range(stages)]


# ---- Interchangeable devices


def interchangeable(question: Question) -> Groups:
    """Return the devices in groups of the same kind, budget and links.

    Links of at most `_LINKED` devices are compared: to hosts by their rates, to other devices by the seconds
    of the largest message, of which less than a hundredth of an even stage's seconds does not matter.
    """
    result = list[list[int]]()
    compared = _Links(question) if len(question.cluster.devices) <= _LINKED else None
    for kind in question.classes:
        of_class = list[list[int]]()
        for device in kind.devices:
            equal = (group for group in of_class if compared is None or compared.equal(group[0], device))
            group = next(equal, None)
            if group is None:
                of_class.append([device])
            else:
                group.append(device)
        result += of_class
    return tuple(map(tuple, result))


def differ(question: Question) -> bool:
    """Return whether devices differ, but in so few ways that all of their orders can be compared."""
    groups = interchangeable(question)
    changes = prod(len(group) + 1 for group in groups) * len(groups) ** 2
    return len(groups) > 1 and changes * question.blocks**2 <= _CELLS


class _Links:
    """Comparison of the links of a question's devices."""

    def __init__(self, question: Question) -> None:
        self._cluster, costs = question.cluster, question.measurement.costs
        self._largest = max(sum(value.nbytes for value in cost.inputs) for cost in costs)
        times = layer_seconds(question.measurement, question.cluster.devices[0].kind, question.training)
        even = sum(pass_seconds.forward + pass_seconds.backward for pass_seconds in times) / question.stages
        self._slight = _SLIGHT * even

    def equal(self, one: int, other: int) -> bool:
        """Return whether two devices reach their hosts and all other devices equally fast."""
        hosts = [host_route(self._cluster, device) for device in (one, other)]
        if len({host and host.bytes_per_second for host in hosts}) > 1:
            return False
        others = set(range(len(self._cluster.devices))) - {one, other}
        return all(
            self._seconds(one, device) == self._seconds(other, device)
            or abs(self._seconds(one, device) - self._seconds(other, device)) < self._slight
            for device in others
        )

    def _seconds(self, one: int, other: int) -> float:
        """Return the seconds of the largest message between two devices; infinity without a link."""
        try:
            return self._cluster.route(Member.device(one), Member.device(other)).seconds(self._largest)
        except UsageError:
            return float("inf")
