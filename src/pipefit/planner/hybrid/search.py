"""The best plans whose stages may be on grids of devices: the leanest one, and the fastest that fits.

Every cut between blocks, every number of stages and every degree of every stage is considered, on every choice of
devices (`hybrid.takes`). The peak is the closed form's, which is the simulator's to the byte. Seconds are estimates,
which leave out what messages take; whoever needs true ones simulates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipefit.cost.collectives import Ring
from pipefit.devices import DeviceKind
from pipefit.errors import UsageError
from pipefit.planner.degrees import SINGLE, Degree
from pipefit.planner.hybrid.placing import grids_of
from pipefit.planner.hybrid.programme import Choice, Cost, Costs, Floats, Placed, Programme
from pipefit.planner.hybrid.tables import DegreeTables, barred_cuts, sum_seconds
from pipefit.planner.hybrid.takes import States
from pipefit.planner.question import DeviceClass, Question, Split
from pipefit.texts import counted

_FEW = 4  # stages of plans that are looked for first, because they rule out most others
_INFINITE = float("inf")
_ROUNDING = 1 + 1e-9


class Hybrid(NamedTuple):
    """A plan of the search: its split, what was minimised, how many candidate stages were compared, and its stages."""

    split: Split
    value: float
    evaluated: int
    stages: tuple[Placed, ...]


def searches(question: Question) -> list[Search]:
    """The searches over a question: one, or one for all degrees in which devices have the same parts of parameters that
    stages may share, since these have to hold the same part.
    """
    alike: dict[object, list[Degree]] = {}
    for degree in question.degrees:
        forms = tuple(one.form for one in question.measured(degree).shared)
        alike.setdefault((degree.tensor, forms) if forms else None, []).append(degree)
    return [Search(question)] if len(alike) == 1 else [Search(question, degrees) for degrees in alike.values()]


def leanest(question: Question) -> Hybrid:
    """The plan with the lowest peak; among those, the one of the fewest estimated seconds.

    The value is in bytes, or a share of budgets that differ.
    """
    level, search = min(((min(one.lowest()), one) for one in searches(question)), key=lambda found: found[0])
    return search.fastest(level)[0]._replace(value=level)


def fastest(question: Question, most: int) -> list[Hybrid]:
    """Plans that fit: for up to `most` numbers of stages the one of the fewest estimated seconds, the fastest first."""
    found = [one for search in searches(question) for one in search.fastest(budget_level(question))]
    return sorted(found, key=lambda one: one.value)[:most]


def budget_level(question: Question) -> float:
    """The level within which plans fit: bytes, or all of budgets that differ."""
    return float(question.cluster.budgets[0]) if question.equal_budgets else 1.0


def least_seconds(question: Question) -> float:
    """What no step takes less than, of any plan on any grids: all work as if it could be divided over all devices.

    Of a stage on k devices that takes c seconds for each of M microbatches, these spend M k c; and every block is
    counted at the degree, and on the kind of device, at which that is the least.
    """
    kinds = {device.kind.key: device.kind for device in question.cluster.devices}
    costs = []
    for degree in question.degrees:
        for kind in kinds.values():
            times = DegreeTables(question, degree).seconds(kind)
            costs.append(degree.devices * np.diagonal(times.forward + times.backward, offset=1))
    least = np.minimum.reduce(costs).sum()
    return float(question.training.microbatches * least / len(question.cluster.devices))


class Search:
    """The choices of a question, of all degrees or of some, and the programmes over them."""

    def __init__(self, question: Question, degrees: Sequence[Degree] | None = None) -> None:
        self.question, degrees = question, degrees or question.degrees
        self.classes = sorted(question.classes, key=lambda one: one.memory_bytes)
        self.states = States([len(one.devices) for one in self.classes])
        self.tables = {degree: DegreeTables(question, degree) for degree in degrees}
        self.choices = [Choice(degree, take) for degree in degrees for take in self.states.takes(degree.devices)]
        self.barred = barred_cuts(question, self.tables)
        self._times: dict[tuple[Degree, int], tuple[Floats, Floats]] = {}

    @property
    def counts(self) -> range:
        """The numbers of stages. Where each has one device, there are stages on all of them."""
        pinned, most = self.question.options.stages, min(self.question.blocks, len(self.question.cluster.devices))
        pinned = self.question.stages if self.question.degrees == (SINGLE,) else pinned
        return range(1, most + 1) if pinned is None else range(pinned, pinned + 1)

    def lowest(self) -> list[float]:
        """The lowest highest cost of plans, for every number of stages."""
        programme = self.programme(lambda left, choice: Cost(self.shares(left, choice)))
        return [programme.values[count - 1] for count in self.counts]

    def best(self, cost: Costs) -> Hybrid:
        """The plan with the lowest value by these costs, of any number of stages."""
        programme = self.programme(cost)
        value, count = min((programme.values[count - 1], count) for count in self.counts)
        if value == _INFINITE:
            raise UsageError(
                f"{self.question.profile.parts} have no plan in {counted(self.counts[-1], 'stage')} or fewer on the "
                f"devices of {self.question.cluster.name} by these costs: use other degrees, or none"
            )
        return self._made(programme.best(count), value)

    def fastest(self, level: float) -> list[Hybrid]:
        """The fastest plans whose stages stay within a level, for each number of stages the best one that is no slower
        than the best of few stages.
        """
        few = self.programme(lambda left, choice: self._within(left, choice, level), most=_FEW)
        most = min((few.values[count - 1] for count in self.counts if count <= _FEW), default=_INFINITE)
        programme = self.programme(lambda left, choice: self._within(left, choice, level, most * _ROUNDING))
        values = {count: programme.values[count - 1] for count in self.counts}
        found = sorted((value, count) for count, value in values.items() if value < _INFINITE)
        return [self._made(programme.best(count), value) for value, count in found]

    def _made(self, stages: tuple[Placed, ...], value: float) -> Hybrid:
        return Hybrid(self.split(stages), value, self.evaluated, stages)

    @property
    def evaluated(self) -> int:
        """The candidate stages: ranges of blocks at every place, of every degree, on all choices of devices."""
        blocks = self.question.blocks
        return blocks * (blocks + 1) // 2 * self.counts[-1] * len(self.choices)

    def programme(self, cost: Costs, most: int | None = None) -> Programme:
        """The tables for all numbers of stages, or for up to `most`, by these costs."""
        question = self.question
        return Programme(
            question.blocks,
            self.states.count,
            self.choices,
            cost,
            min(self.counts[-1], most or self.counts[-1]),
            self.barred,
        )

    # ---------------------------------------------------------------- costs

    def _unit(self, choice: Choice) -> int:
        """What peaks are divided by: the smallest budget of a stage's devices, if budgets differ."""
        return 1 if self.question.equal_budgets else self.classes[choice.take.lowest].memory_bytes

    def shares(self, left: int, choice: Choice) -> Floats:
        """The peak of a stage, as a share of its devices' budgets where they differ."""
        return self.tables[choice.degree].peaks(left) / self._unit(choice)

    def _within(self, left: int, choice: Choice, level: float, most: float = _INFINITE) -> Cost:
        """The seconds of a stage, if its peak is within the level, and if they are no more than `most`."""
        head, add = self.seconds(choice)
        return Cost(np.where((self.shares(left, choice) <= level) & (head <= most), head, _INFINITE), add)

    def seconds(self, choice: Choice) -> tuple[Floats, Floats]:
        """The seconds of all microbatches and the end of a step, and those of a microbatch."""
        key = choice.degree, choice.take.lowest
        if key not in self._times:
            classes = [self.classes[number] for number in self.states.classes(choice.take)]
            tables, kinds = self.tables[choice.degree], [self._kind(one) for one in classes]
            devices = [device for one in classes for device in one.devices]
            (shards, replicas), cluster = choice.degree.rings(devices), self.question.cluster
            passes = (tables.seconds(kind, Ring.of(cluster, shards)) for kind in kinds)
            times = [np.maximum.reduce(parts) for parts in zip(*passes, strict=True)]
            each, update = times[0] + times[1], times[2]
            end = update + sum_seconds(Ring.of(cluster, replicas), tables.gradients)
            self._times[key] = self.question.training.microbatches * each + end, each
        return self._times[key]

    def each(self, choice: Choice) -> Floats:
        """The seconds of a microbatch, with its part of the sum of gradients and of the update."""
        return self.seconds(choice)[0] / self.question.training.microbatches

    def barred_ranges(self, choice: Choice) -> Floats:
        """Zero, or infinity for ranges that stages of this degree cannot hold."""
        return self.tables[choice.degree].barred

    def _kind(self, one: DeviceClass) -> DeviceKind:
        return self.question.cluster.devices[one.devices[0]].kind

    def split(self, stages: tuple[Placed, ...]) -> Split:
        """The split of a plan, on the devices that it takes."""
        edges = (0, *(one.stop for one in stages))
        hosts = [device.host for device in self.question.cluster.devices]
        free = [list(one.devices) for one in self.classes]
        grids = grids_of([(one.choice.degree, one.choice.take.lowest) for one in stages], free, hosts)
        return Split(edges, tuple(grid.devices[0] for grid in grids), grids)
