"""A band of layer ranges as arrays, and the peak of a stage that holds one at some position of a schedule.

Row w, column c is the range of w + 1 layers that starts at layer `first + c`. `closed_forms.ranges` makes bands.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipefit.planner.closed_forms.surroundings import Surroundings
from pipefit.program import FORWARDS, Kind

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Bytes of the ranges [i, j), i from `first`, j up to i + width; arrays of shape (width, starts)."""

    first: int
    valid: NDArray[np.bool_]  # the range ends within the model
    static: Ints
    gradients: Ints
    state: Ints
    retained: Ints
    inputs: Ints
    received: Ints
    output_gradients: Ints
    input_gradients: Ints
    sent: Ints
    forward_peak: Ints
    backward_first_peak: Ints
    backward_later_peak: Ints
    update_first_peak: Ints
    update_peak: Ints
    buffers: Ints
    checkpoint_sent: Ints
    checkpoint_peak: Ints
    _sums: dict[Any, Ints] = field(default_factory=dict)  # partial sums that many stages share

    def step_peak(self) -> Ints:
        """The highest of the optimizer step, the first one or a later one."""
        if "step" not in self._sums:
            above = np.maximum(self.update_first_peak, self.state + self.update_peak)
            self._sums["step"] = self.static + self.gradients + above
        return self._sums["step"]

    def around(self, situation: Surroundings) -> Ints:
        """Peak of one compute action in its surroundings, without the other microbatches in flight."""
        key = situation._replace(in_flight=0, checkpoints=0)
        if key not in self._sums:
            total = self.static + self.state + self._own(situation)
            if situation.receiving in FORWARDS:
                total += self.received
            elif situation.receiving is Kind.BACKWARD:
                total += self.output_gradients
            total += self._sending(situation.sending)
            self._sums[key] = total
        return self._sums[key]

    def _own(self, situation: Surroundings) -> Ints:
        """What the action itself and its microbatch take, and the gradients that exist before it."""
        match situation.kind:
            case Kind.FORWARD:
                own = self.inputs + self.forward_peak
            case Kind.FORWARD_ONLY:
                own = self.inputs + self.checkpoint_peak
            case Kind.RECOMPUTE:
                own = self.inputs + self.forward_peak + self.buffers
            case _:
                own = self.retained + self.output_gradients
                own += self.backward_later_peak if situation.gradients else self.backward_first_peak
                if situation.recomputed:
                    own += self.buffers
        return own + self.gradients if situation.gradients else own

    def _sending(self, before: Kind | None) -> Ints | int:
        """The send that the action before started."""
        sends = {Kind.FORWARD: self.sent, Kind.FORWARD_ONLY: self.checkpoint_sent, Kind.BACKWARD: self.input_gradients}
        return 0 if before is None else sends.get(before, 0)

    def highest(self, met: Sequence[Surroundings]) -> Ints:
        """The highest of `around` over surroundings with the same numbers in flight."""
        key = frozenset(s._replace(in_flight=0, checkpoints=0) for s in met)
        if key not in self._sums:
            self._sums[key] = np.maximum.reduce([self.around(part) for part in key])
        return self._sums[key]


Window = tuple[slice, slice]
EVERYWHERE: Window = (slice(None), slice(None))


def stage_peak(band: Band, met: Iterable[Surroundings], window: Window = EVERYWHERE) -> Ints:
    """Highest bytes of a stage at the position that meets these surroundings, for every range of a band or a window.

    Covers every compute action and the optimizer step, in the first step of training and in later ones. Cells where
    `band.valid` is false mean nothing.
    """
    peak: Ints = band.step_peak()[window]
    groups: dict[tuple[int, int], list[Surroundings]] = {}
    for situation in met:
        groups.setdefault((situation.in_flight, situation.checkpoints), []).append(situation)
    for (in_flight, checkpoints), members in groups.items():
        level = band.highest(members)[window]
        if in_flight:
            level = level + in_flight * band.retained[window]
        if checkpoints:
            level = level + checkpoints * band.inputs[window]
        peak = np.maximum(peak, level)
    return peak
