"""Splits that may become fast plans once tensors are moved and recomputed: what one plan's stages take is balanced.

The time split balances forward and backward, the exact planner's split balances peaks. Between them lie splits whose
early stages, which hold the most microbatches, get fewer blocks because what they recompute takes time too. For every
range of blocks at every place the seconds of a microbatch are estimated: forward, backward, and what must be recomputed
after the host has taken the part of its link that is allowed. Dynamic programming then finds the split whose seconds
are the most even, by the sum of their high powers, which the largest dominate.

Costs: as the bound's; a few hundredths of a second for 128 blocks in 8 stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from pipefit.planner.bounds import in_flight
from pipefit.planner.closed_forms.bands import Band, stage_peak
from pipefit.planner.host_links import host_rates
from pipefit.planner.prices import Floats, Prices, ranges
from pipefit.planner.question import Question, Split

_POWER = 12.0
_MISSING = 1e3  # times the seconds of all blocks, for each share of the budget that a range is too large by
_AWAY = 2.0
DOUBLE = 2  # blocks whose optimizer state is on the device while one of them is updated


class Balance:
    """The estimates for all ranges of blocks, where stage s is on `devices[s]`."""

    def __init__(self, question: Question, devices: Sequence[int]) -> None:
        self.question, self.prices, self._devices = question, Prices(question), tuple(devices)
        self.passes = ranges(self.prices.forward + self.prices.backward)
        self._known: dict[int, Floats] = {}
        self.valid = np.arange(question.blocks)[:, None] < np.arange(question.blocks + 1)

    def split(self, host: float, *, states: bool = False) -> Split:
        """The most even split where moves to the host may use the part `host` of its link.

        With `states` the host has all optimizer state, but for that of the blocks that are being updated.
        """
        count, stages = self.question.blocks, self.question.stages
        even = float(self.passes[0, -1]) / stages or 1.0
        reached, came = np.full(count + 1, np.inf), list[np.ndarray[tuple[int], np.dtype[np.intp]]]()
        reached[0] = 0.0
        for stage in range(stages):
            cost = np.where(self.valid, (self._seconds(stage, host, states) / even) ** _POWER, np.inf)
            total = reached[:-1, None] + cost
            came.append(total.argmin(axis=0))
            reached = total.min(axis=0)
        edges = [count]
        for before in reversed(came):
            edges.append(int(before[edges[-1]]))
        return Split(tuple(reversed(edges)), self._devices)

    def _seconds(self, stage: int, host: float, states: bool) -> Floats:
        """Seconds of a microbatch, for every range as this stage; far more where nothing makes the range fit."""
        held = self._in_flight[stage]
        budget = self.question.cluster.budgets[self._devices[stage]]
        need = self._peaks(stage) - budget - (self._away if states else 0.0)
        need = np.where(need > 0, need + self._largest, 0.0)
        moved = self._rates[stage] * host * self.passes * max(0.0, held - _AWAY)
        left = np.maximum(need - moved, 0.0)
        missing = np.maximum(left - held * self._kept, 0.0) / budget
        recomputed = self.prices.seconds(left, held) / held
        return self.passes + recomputed + missing * _MISSING * float(self.passes[0, -1])

    def _peaks(self, stage: int) -> Floats:
        """The peak of every range that keeps everything."""
        if stage not in self._known:
            blocks = self.question.blocks
            peaks = stage_peak(self._band, self.question.surroundings(stage))
            found = self._known[stage] = np.zeros_like(self.passes)
            for start in range(blocks):
                found[start, start + 1 :] = peaks[: blocks - start, start]
        return self._known[stage]

    @cached_property
    def _band(self) -> Band:
        return self.question.ranges.band(self.question.blocks, estimated=True)

    @cached_property
    def _kept(self) -> Floats:
        return self.prices.kept()

    @cached_property
    def _largest(self) -> float:
        """What the block that keeps the most keeps: it is there once more while it is recomputed."""
        return max(float(self._kept[n, n + 1]) for n in range(self.question.blocks))

    @cached_property
    def _away(self) -> Floats:
        """The optimizer state that is away, of every range: all but that of two of the largest blocks."""
        state = ranges(self.question.ranges.state[np.array(self.question.edges)].astype(float))
        each = max(float(state[n, n + 1]) for n in range(self.question.blocks))
        return np.maximum(state - DOUBLE * each, 0.0)

    @cached_property
    def _in_flight(self) -> list[int]:
        stages = self.question.stages
        return [in_flight(self.question.training, stage, stages) for stage in range(stages)]

    @cached_property
    def _rates(self) -> list[float]:
        return host_rates(self.question.cluster, self._devices)
