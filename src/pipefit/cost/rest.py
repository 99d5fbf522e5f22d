"""What a stage holds whatever microbatches are in flight: parameters, gradients, optimizer state; and its update.

What belongs to a microbatch is in `pipefit.cost.residency`. A parameter or a buffer that several layers of the stage
share exists once. Of what replicas divide (`pipefit.cost.shares`), only the part that this one keeps is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Literal

from pipefit.actions import Subject
from pipefit.cost.effects import Effect, effect
from pipefit.cost.shares import Share
from pipefit.cost.storages import StageStorages
from pipefit.errors import UsageError

LayerState = Literal["parameters", "gradients", "optimizer", "early optimizer"]

_FIELDS = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "state_bytes",
    "early optimizer": "early_state_bytes",
}


class StageRest:
    """The bytes of a stage that do not belong to a microbatch, in a step of `microbatches`.

    `share` is what the device keeps of what replicas divide.
    """

    def __init__(self, storages: StageStorages, microbatches: int, *, share: Share | None = None) -> None:
        self.storages, self.microbatches, self.share = storages, microbatches, share
        self._updates: dict[tuple[int, int, bool], Effect] = {}
        self._sums: dict[LayerState, list[int]] = {}

    @cached_property
    def parameter_bytes(self) -> int:
        """Parameters, their half-precision copies, buffers and constants."""
        return sum(map(self.static_bytes, range(self.storages.count)))

    def static_bytes(self, position: int) -> int:
        """Parameters, their half-precision copies, buffers and constants of one position, without those that an earlier
        one has too, and of parameters that replicas divide without those that are gathered, and all copies.
        """
        storages, layer = self.storages, self.storages.start + position
        away = 0
        if self.divides_parameters and layer < storages.stop:
            away = self.whole_bytes_of("parameters", layer, layer + 1) - self.bytes_of("parameters", layer, layer + 1)
            away += storages.copy_bytes(layer)
        repeated = sum(again.shared.nbytes for again in storages.repetitions if again.later == position)
        repeated += sum(again.shared.nbytes for again in storages.repeated_buffers if again.later == position)
        if layer < storages.stop:
            repeated += storages.costs[position].copy_bytes - storages.copy_bytes(layer)
        return storages.costs[position].static_bytes - repeated - away

    def copies_here(self, layer: int) -> int:
        """The half-precision copies of a layer's weights, as far as they are on the device between steps."""
        return 0 if self.divides_parameters else self.storages.copy_bytes(layer)

    @property
    def divides_parameters(self) -> bool:
        """Whether the device keeps the parameters of the layers that it owns alone."""
        return self.share is not None and self.share.divides_parameters

    def unsharded_bytes(self, layer: int) -> int:
        """What gathering a layer's parameters takes: half-precision copies, and where another replica owns the layer
        the parameters themselves that are read otherwise too.
        """
        return self._unsharded_bytes[layer - self.storages.start]

    @cached_property
    def _unsharded_bytes(self) -> list[int]:
        """The same of every layer of the stage."""
        found = list(map(self.storages.copy_bytes, range(self.storages.start, self.storages.stop)))
        for position, layer in enumerate(range(self.storages.start, self.storages.stop)):
            if self.share is not None and not self.share.keeps("parameters", layer):
                cast_only, _ = self.storages.cast_only_bytes(layer)
                found[position] += self.whole_bytes_of("parameters", layer, layer + 1) - cast_only
        return found

    @property
    def loss_bytes(self) -> int:
        """On the last stage, the losses of all microbatches."""
        return self.storages.measurement.loss_bytes * self.microbatches if self.storages.last else 0

    @cached_property
    def gradient_bytes(self) -> int:
        """Parameter gradients, from the first backward of a step to its STEP."""
        return self.bytes_of("gradients", self.storages.start, self.storages.stop)

    @cached_property
    def weight_bytes(self) -> int:
        """A version of the weights without its rooms: the parameters that updates change, and their copies."""
        storages = self.storages
        return sum(storages.version_bytes(n) - storages.room_bytes(n) for n in range(storages.start, storages.stop))

    def weight_bytes_of(self, start: int, stop: int) -> int:
        """The parameters of layers `start` to `stop - 1` that are trained."""
        return sum(self._trained_bytes[start - self.storages.start : stop - self.storages.start])

    @cached_property
    def versions_bytes(self) -> tuple[int, ...]:
        """What a version of the weights takes, of every layer."""
        return tuple(map(self.storages.version_bytes, range(self.storages.start, self.storages.stop)))

    @cached_property
    def early_state_bytes(self) -> int:
        """Optimizer state that exists before the first step."""
        return self.bytes_of("early optimizer", self.storages.start, self.storages.stop)

    @cached_property
    def state_bytes(self) -> int:
        """Optimizer state, from the first STEP on."""
        return self.bytes_of("optimizer", self.storages.start, self.storages.stop)

    def bytes_of(self, kind: LayerState, start: int, stop: int) -> int:
        """A state of layers `start` to `stop - 1`, as far as the device keeps it between steps."""
        if self.share is None:
            return self.whole_bytes_of(kind, start, stop)
        kept = (layer for layer in range(start, stop) if self.share.keeps(kind, layer))
        return sum(self.whole_bytes_of(kind, layer, layer + 1) for layer in kept)

    def whole_bytes_of(self, kind: LayerState, start: int, stop: int) -> int:
        """All of it; the state of a shared parameter belongs to the stage's first user."""
        before, first = self._before(kind), self.storages.start
        return before[stop - first] - before[start - first]

    def _before(self, kind: LayerState) -> list[int]:
        """All of it, of the layers before every position."""
        if kind not in self._sums:
            field = _FIELDS[kind]
            sizes: list[int] = [getattr(cost, field) for cost in self.storages.costs]
            for again in self.storages.repetitions:
                sizes[again.later] -= again.shared.nbytes if kind == "parameters" else getattr(again.shared, field)
            self._sums[kind] = [0, *accumulate(sizes)]
        return self._sums[kind]

    def gathered_bytes(self, layer: int) -> int:
        """Parameters of a layer that its owner brings to the other replicas: the trained ones, after an update; or all
        of them, where the others do not keep any: in half precision those that are read so alone.
        """
        if self.divides_parameters:
            cast_only, copies = self.storages.cast_only_bytes(layer)
            return self.whole_bytes_of("parameters", layer, layer + 1) - cast_only + copies
        return self._trained_bytes[layer - self.storages.start]

    def exchanged_tensors(self, layer: int, *, gathered: bool) -> int:
        """How many gradients of a layer replicas add up, or how many parameters are `gathered`."""
        every = gathered and self.divides_parameters
        return sum(every or one.trainable for one in self.storages.costs[layer - self.storages.start].parameters)

    @cached_property
    def _trained_bytes(self) -> list[int]:
        """The parameters of every position that are trained; a shared one belongs to its first user."""
        found = [cost.trained_bytes for cost in self.storages.costs]
        for again in self.storages.repetitions:
            found[again.later] -= again.shared.nbytes if again.shared.gradient_bytes else 0
        return found

    def state_bytes_of(self, subject: Subject) -> int:
        """A state of one layer, as actions name it; of the optimizer, from the first step on. Nothing moves of a layer
        that another replica owns.

        Raises:
            UsageError: it is no state that moves.
        """
        for kind in ("parameters", "gradients", "optimizer"):
            if subject.what == kind:
                is_owned = self.share is None or self.share.owns(subject.layer)
                return self.bytes_of(kind, subject.layer, subject.layer + 1) if is_owned else 0
        raise UsageError(f"{subject} cannot be moved as a state: that is a layer's parameters, gradients or optimizer")

    def update_room_bytes(self, start: int, stop: int) -> int:
        """The most that the optimizer of layers `start` to `stop - 1` takes in an update, its state included."""
        early, state = (self.bytes_of(kind, start, stop) for kind in ("early optimizer", "optimizer"))
        first, later = (self.update(start, stop, first=first).peak_bytes for first in (True, False))
        return max(early + first, state + later)

    @property
    def first_update(self) -> Effect:
        """The first STEP of the whole stage."""
        return self.update(self.storages.start, self.storages.stop, first=True)

    def update(self, start: int, stop: int, *, first: bool) -> Effect:
        """A STEP of layers `start` to `stop - 1`, the first one of them or a later one."""
        found = self._updates.get((start, stop, first))
        if found is None:
            make = self._first_update if first else self._later_update
            found = self._updates[start, stop, first] = make(start, stop)
        return found

    def _first_update(self, start: int, stop: int) -> Effect:
        """The first STEP, which creates the optimizer state, one layer after the other."""
        first, end = start - self.storages.start, stop - self.storages.start
        repeated = Counter[int]()  # by position, bytes of state that an earlier layer's update has created already
        for again in self.storages.repetitions:
            repeated[again.later] += again.shared.state_bytes - again.shared.early_state_bytes
        grown = 0
        peaks = []
        for position in self._updated(first, end):
            cost = self.storages.costs[position]
            level = grown + cost.update_first_peak_bytes - repeated[position]
            peaks.append((level, cost.update_first_workspace_bytes))
            grown += cost.state_bytes - cost.early_state_bytes - repeated[position]
        peak, workspace = _first_highest(peaks)
        gradients = self.bytes_of("gradients", start, stop)
        return effect(peak_bytes=peak, workspace=workspace, gradients=-gradients, optimizer=grown)

    def _later_update(self, start: int, stop: int) -> Effect:
        """Every later STEP."""
        positions = self._updated(start - self.storages.start, stop - self.storages.start)
        costs = [self.storages.costs[position] for position in positions]
        peak, workspace = _first_highest([(cost.update_peak_bytes, cost.update_workspace_bytes) for cost in costs])
        return effect(peak_bytes=peak, workspace=workspace, gradients=-self.bytes_of("gradients", start, stop))

    def _updated(self, first: int, end: int) -> list[int]:
        """Those of these positions whose layers the device updates."""
        start = self.storages.start
        return [place for place in range(first, end) if self.share is None or self.share.owns(start + place)]


def _first_highest(moments: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The first of the highest moments, as a meter keeps it: its level, and the part that is a kernel's workspace."""
    return max(moments, key=lambda moment: moment[0], default=(0, 0))
