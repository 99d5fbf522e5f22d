"""Bands: the bytes of all ranges of blocks up to some width, as arrays, and the peaks of stages.

Row w, column c is the range of w + 1 blocks that starts at block `first + c`. `closed_forms.ranges` makes
bands and describes the arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.planner.closed_forms.surroundings import Surroundings
from pipefit.schema.actions import FORWARDS, Kind

Ints = NDArray[np.int64]


class Recomputed(NamedTuple):
    """Highest bytes of second forwards and of backwards, for stages recomputed block by block.

    In a step's first backward and in later ones; with the saved tensors of their microbatch, without existing
    gradients.
    """

    forward_first: Ints
    forward_later: Ints
    backward_first: Ints
    backward_later: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Bytes of ranges of blocks i to j - 1, with i from `first` on and j up to i + width.

    Arrays of shape (width, starts), described in `closed_forms.ranges`.
    """

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
    kept: Ints
    checkpoint_sent: Ints
    checkpoint_peak: Ints
    weights: Ints
    early: Ints
    recomputed: Recomputed | None = None  # of stages that are recomputed block by block
    _sums: dict[Any, Ints] = field(default_factory=dict)  # partial sums that many stages share

    def with_losses(self, nbytes: int, blocks: int) -> Band:
        """Return the band with `nbytes` of losses in the ranges that end a model of `blocks` blocks."""
        width, starts = self.valid.shape
        ends = self.first + np.arange(starts) + np.arange(1, width + 1)[:, None] == blocks
        return replace(self, static=self.static + nbytes * ends, _sums={})

    def step_peak(self) -> Ints:
        """Return the peak of the optimizer step, the first one or a later one."""
        if "step" not in self._sums:
            above = np.maximum(self.update_first_peak, self.state + self.update_peak)
            self._sums["step"] = self.static + self.gradients + above
        return self._sums["step"]

    def around(self, surroundings: Surroundings) -> Ints:
        """Return the peak of one action in its surroundings, without other microbatches and versions."""
        total = self.static + self._own(surroundings)
        if surroundings.kind is not Kind.STEP or not surroundings.early:  # the first update counts its own
            total += self.early if surroundings.early else self.state
        if surroundings.kind is Kind.RECOMPUTE:  # in the buffer that the backward's receive has started with
            total += self.output_gradients
        return total + self._messages(surroundings)

    def _messages(self, surroundings: Surroundings) -> Ints | int:
        """Return the bytes of messages; brief ones block by block only in ranges of one block."""
        messages = self._sending(surroundings.sending)
        if surroundings.receiving in FORWARDS:
            messages = messages + self.received
        elif surroundings.receiving is Kind.BACKWARD:
            messages = messages + self.output_gradients
        if self.recomputed is None or not surroundings.brief or isinstance(messages, int):
            return messages
        return np.where(np.arange(len(messages))[:, None] == 0, messages, 0)

    def _own(self, surroundings: Surroundings) -> Ints:
        """Return the bytes of the action and its microbatch, and of gradients that exist before it."""
        if self.recomputed is not None and (surroundings.kind is Kind.RECOMPUTE or surroundings.recomputed):
            return self._in_parts(surroundings, self.recomputed)
        match surroundings.kind:
            case Kind.FORWARD:
                own = self.inputs + self.forward_peak
            case Kind.FORWARD_ONLY:
                own = self.inputs + self.checkpoint_peak
            case Kind.RECOMPUTE:
                own = self.inputs + self.forward_peak + self.buffers
            case Kind.STEP:
                own = self.update_first_peak if surroundings.early else self.update_peak
            case _:
                own = self.retained + self.output_gradients
                own += self.backward_later_peak if surroundings.gradients else self.backward_first_peak
                if surroundings.recomputed:
                    own += self.buffers
        return own + self.gradients if surroundings.gradients else own

    def _in_parts(self, surroundings: Surroundings, parts: Recomputed) -> Ints:
        """Return the bytes of a recomputation or backward of a stage that is recomputed block by block."""
        if surroundings.kind is Kind.RECOMPUTE:
            return parts.forward_later + self.gradients if surroundings.gradients else parts.forward_first
        return parts.backward_later + self.gradients if surroundings.gradients else parts.backward_first

    def _sending(self, before: Kind | None) -> Ints | int:
        """Return the bytes in transit since the action before."""
        sends = {
            Kind.FORWARD: self.sent,
            Kind.FORWARD_ONLY: self.checkpoint_sent,
            Kind.BACKWARD: self.input_gradients,
        }
        return 0 if before is None else sends.get(before, 0)

    def highest(self, met: Sequence[Surroundings]) -> Ints:
        """Return the highest peak in these surroundings; all have the same microbatches in flight."""
        key = frozenset(s.alone for s in met)
        if key not in self._sums:
            first, *others = key
            result = self.around(first)
            for part in others:
                np.maximum(result, self.around(part), out=result)
            self._sums[key] = result
        return self._sums[key]


Slices = tuple[slice, slice]  # of rows and columns
EVERYWHERE: Slices = (slice(None), slice(None))


def stage_peak(band: Band, met: Iterable[Surroundings], within: Slices = EVERYWHERE) -> Ints:
    """Return the peaks of a stage that meets these surroundings, for every range of a band or a part of it.

    They cover every compute action and the optimizer step, in the first step of training and in later ones.
    The numbers are undefined for ranges with a false `band.valid`.
    """
    peak: Ints = band.step_peak()[within]
    groups: dict[tuple[int, int, int, int], list[Surroundings]] = {}
    for surroundings in met:
        groups.setdefault(
            (surroundings.in_flight, surroundings.checkpoints, surroundings.versions, surroundings.rooms), []
        ).append(surroundings)
    for (in_flight, checkpoints, versions, rooms), members in groups.items():
        level = band.highest(members)[within]
        if in_flight:
            level = level + in_flight * band.retained[within]
        if checkpoints:
            level = level + checkpoints * band.kept[within]
        if versions:
            level = level + versions * band.weights[within]
        if rooms:
            level = level + rooms * (band.gradients + band.state)[within]
        peak = np.maximum(peak, level)
    return peak
