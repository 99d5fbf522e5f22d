"""What stages of every degree cost, for all ranges of blocks: peaks of a device to the byte, and seconds.

A device of a stage with d replicas holds what the stage would hold of microbatches of the slice's size, so its peak is
the closed form's (`planner.closed_forms`) of the measurement at that size. Tables have row i and column j for the
blocks from i to j - 1; infinity where a stage of this degree cannot hold them.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipefit.cost.collectives import Ring
from pipefit.cost.time import layer_seconds
from pipefit.devices import DeviceKind
from pipefit.errors import UsageError
from pipefit.layer_costs import Value
from pipefit.planner.closed_forms.bands import Band, stage_peak
from pipefit.planner.closed_forms.ranges import Ranges
from pipefit.planner.closed_forms.surroundings import Surroundings, surroundings
from pipefit.planner.degrees import Degree
from pipefit.planner.hybrid.programme import Allowed, Floats
from pipefit.planner.prices import ranges
from pipefit.planner.question import Question
from pipefit.profiles import Measurement
from pipefit.rows import dimensions
from pipefit.work import Collective


class Passes(NamedTuple):
    """Seconds of a stage's passes: forward and backward of a microbatch, and the update of a step."""

    forward: Floats
    backward: Floats
    update: Floats


class DegreeTables:
    """The tables of one degree."""

    def __init__(self, question: Question, degree: Degree) -> None:
        self.question, self.degree = question, degree
        self.measurement = question.measured(degree)
        self._peaks: dict[tuple[Surroundings, ...], Floats] = {}

    def peaks(self, stages_left: int) -> Floats:
        """The peak of a device, as a stage with so many stages from itself to the last one."""
        how, again = self.question.training, self.question.options.recompute
        met = surroundings(how.schedule, 0, stages_left, how.microbatches, again, versions=how.versions)
        if met not in self._peaks:
            self._peaks[met] = self.barred + self._square(stage_peak(self._band, met).astype(float))
        return self._peaks[met]

    def seconds(self, kind: DeviceKind, ring: Ring | None = None) -> Passes:
        """Forward, backward and update of a microbatch on a device of this kind, each a table; with what shards do
        together around a ring.
        """
        of_layers = layer_seconds(self.measurement, kind, self.question.training.dtype, ring)
        edges = np.array(self.question.edges)
        edges[-1] += 1
        forward, backward, update = (
            ranges(np.concatenate(([0.0], np.cumsum(times)))[edges]) for times in zip(*of_layers, strict=True)
        )
        again = self.question.options.recompute != "never"
        return Passes(forward, backward + forward * again, update)

    @cached_property
    def gradients(self) -> Floats:
        """Bytes of gradients that replicas add up."""
        return ranges(self._ranges.gradients[np.array(self.question.edges)].astype(float))

    @cached_property
    def _ranges(self) -> Ranges:
        question = self.question
        return Ranges(self.measurement, question.edges, microbatches=question.training.microbatches)

    @cached_property
    def _band(self) -> Band:
        return self._ranges.band(self.question.blocks)

    def _square(self, rows: Floats) -> Floats:
        """A table out of rows by width."""
        count = self.question.blocks
        found = np.full((count, count + 1), np.inf)
        for row, values in enumerate(rows):
            starts = np.arange(count - row)
            found[starts, starts + row + 1] = values[: count - row]
        return found

    @cached_property
    def barred(self) -> Floats:
        """Infinity for ranges with a layer that replicas cannot hold: it computes with a buffer and changes it."""
        edges, costs = self.question.edges, self.measurement.costs
        fed_back = [float(any(cost.fed_back for cost in costs[a:b])) for a, b in pairwise(edges)]
        held = ranges(np.concatenate(([0.0], np.cumsum(fed_back))))
        found: Floats = np.where((held > 0) & (self.degree.data > 1), np.inf, 0.0)
        return found


def sum_seconds(ring: Ring, nbytes: Floats) -> Floats:
    """Seconds of a sum of so many bytes around a ring, where no other transfer is under way."""
    fixed, slope = (ring.seconds([Collective("all_reduce", number)]) for number in (0, 1 << 30))
    found: Floats = np.where(nbytes > 0, fixed + (slope - fixed) / (1 << 30) * nbytes, 0.0)
    return found


def barred_cuts(question: Question, tables: dict[Degree, DegreeTables]) -> dict[int, Allowed]:
    """The cuts at which some degrees may not meet, and which may: where values cannot be divided by their samples."""
    judges = _Judges({degree.data: one.measurement for degree, one in tables.items()})
    pairs = [(a.data, b.data) for a in tables for b in tables if a.data != b.data]
    found: dict[int, Allowed] = {}
    for cut in range(1, question.blocks):
        layer = question.edges[cut]
        if not all(judges.meet(layer, *pair) for pair in pairs):
            found[cut] = lambda cut, front, behind: judges.meet(question.edges[cut], front.data, behind.data)
    return found


class _Judges:
    """Which degrees may meet before a layer."""

    def __init__(self, measured: dict[int, Measurement]) -> None:
        self._sizes = {data: one.microbatch_size for data, one in measured.items()}
        self._inputs = {data: [cost.inputs for cost in one.costs] for data, one in measured.items()}
        self._known: dict[tuple[tuple[Value, ...], tuple[Value, ...], bool], bool] = {}

    def meet(self, layer: int, front: int, behind: int) -> bool:
        """Whether so many replicas can send what this layer takes to so many others."""
        if front == behind:
            return True
        key = self._inputs[front][layer], self._inputs[behind][layer], front < behind
        if key not in self._known:
            self._known[key] = self._divisible(*key[:2], (self._sizes[front], self._sizes[behind]), key[2])
        return self._known[key]

    @staticmethod
    def _divisible(sent: tuple[Value, ...], received: tuple[Value, ...], sizes: tuple[int, int], gathers: bool) -> bool:
        try:
            dimensions(sent, received, sizes, gathers=gathers)
        except UsageError:
            return False
        return True
