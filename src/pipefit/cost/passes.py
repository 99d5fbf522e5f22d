"""Forward and backward of layers in a row, storage by storage: what is held, and the highest level on the way.

At the entry of a layer's forward its inputs exist; at the entry of its backward what the forwards left and the
gradients of its outputs. `LayerCost` has the highest level above that. Its spans tell which inputs a backward has
released before its peak: an input counts as released where nobody else holds it.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from pipefit.cost.effects import Effect, effect
from pipefit.cost.residency import AGAIN, COPY, Away, Holders, Piece, Residency
from pipefit.cost.storages import StageStorages


class Working:
    """The instances that are held, while an action changes them: bytes above its entry, and the highest so far."""

    def __init__(self, storages: StageStorages, residency: Residency) -> None:
        self.storages, self.holders = storages, Holders(storages)
        self.held, self.away = dict(residency.held), dict(residency.away)
        self.before = self.categories()
        self.level = self.peak = 0

    def size(self, instance: int) -> int:
        """Bytes of an instance; negative ones are the copies of a run's buffers."""
        if instance < 0:
            return buffer_bytes(self.storages, *_run_of(self.storages, instance))
        return self.storages.sizes[instance % len(self.storages.sizes)]

    def hold(self, instance: int, holder: int) -> None:
        """Somebody holds an instance; it comes with its first holder."""
        if instance not in self.held:
            self.level += self.size(instance)
            self.peak = max(self.peak, self.level)
        self.held[instance] = self.held.get(instance, 0) | holder

    def drop(self, instance: int, holder: int) -> None:
        """Somebody holds an instance no more; it goes with its last holder."""
        left = self.held.get(instance, 0) & ~holder
        if left:
            self.held[instance] = left
        elif self.held.pop(instance, 0):
            self.level -= self.size(instance)

    def drop_all(self, holder: int) -> None:
        """A holder holds nothing any more."""
        for instance in [i for i, holders in self.held.items() if holders & holder]:
            self.drop(instance, holder)

    def reach(self, above: int) -> None:
        """Within a layer the level is higher than between layers."""
        self.peak = max(self.peak, self.level + above)

    def categories(self) -> tuple[int, int]:
        """Bytes of activations and of boundary buffers that are on the device."""
        activations = boundary = 0
        for instance, holders in self.held.items():
            if self.away.get(instance, _HERE).state != "away":
                if holders & self.holders.activations:
                    activations += self.size(instance)
                else:
                    boundary += self.size(instance)
        return activations, boundary

    def effect(self, *, gradients: int = 0, boundary: int = 0) -> Effect:
        """What the action did, with gradients of parameters and of values besides."""
        after = self.categories()
        return effect(
            peak_bytes=self.peak,
            gradients=gradients,
            activations=after[0] - self.before[0],
            boundary=after[1] - self.before[1] + boundary,
        )


_HERE = Away("here", None)


def _run_of(storages: StageStorages, instance: int) -> tuple[int, int]:
    """The positions of the run whose buffer copies an instance stands for."""
    return divmod(-1 - instance, storages.count + 1)


def buffer_copies(storages: StageStorages, first: int, end: int) -> int:
    """The instance that stands for the copies of the buffers of positions `first` to `end - 1`."""
    return -1 - (first * (storages.count + 1) + end)


def buffer_bytes(storages: StageStorages, first: int, end: int) -> int:
    """Bytes of the buffers of positions `first` to `end - 1`."""
    return sum(layer.cost.buffer_bytes for layer in storages.layers[first:end])


class Forward(NamedTuple):
    """How a forward goes: over which positions, what of every storage its instances are, and what it keeps."""

    first: int
    end: int
    offset: int  # 0, or `AGAIN`
    saves: bool


def instance_of(storages: StageStorages, first: int, inputs: tuple[int, ...], offset: int) -> dict[int, int]:
    """Storage numbers of a piece's inputs with their instances; all others are `offset` times the storages further."""
    numbers = storages.values(first)
    found = dict(zip(numbers, inputs, strict=True))
    return found | {s: s for s in storages.target_storages}


def run_forward(working: Working, way: Forward, inputs: tuple[int, ...]) -> tuple[int, ...]:
    """The layers in order; the instances of the values behind the last of them, which nobody holds yet but the walk.

    The inputs are held as values when it begins; what holds them besides stays as it is.
    """
    storages, holders = working.storages, working.holders
    shift = way.offset * len(storages.sizes)
    known = instance_of(storages, way.first, inputs, way.offset)
    values = inputs
    for position in range(way.first, way.end):
        layer = storages.layers[position]
        working.reach(layer.cost.forward_peak_bytes if way.saves else layer.cost.checkpoint_peak_bytes)
        is_loss = storages.start + position == storages.stop
        outputs = () if is_loss else tuple(known.get(s, s + shift) for s in layer.outputs)
        for number in layer.saves if way.saves else ():
            working.hold(known.get(number, number + shift), holders.saved(position))
        for instance in outputs:
            working.hold(instance, holders.value)
        for instance in values:
            if instance not in outputs:
                working.drop(instance, holders.value)
        if is_loss:
            working.drop_all(holders.target)
        values = outputs
    return values


def copy_inputs(working: Working, first: int, inputs: tuple[int, ...]) -> tuple[int, ...]:
    """Copies of a run's inputs, where its first layer works on them in place and they are needed again."""
    storages = working.storages
    if not storages.layers[first].cost.mutates_inputs:
        return inputs
    numbers = storages.values(first)
    copies = tuple(number + COPY * len(storages.sizes) for number in numbers)
    for copy, original in zip(copies, inputs, strict=True):
        working.hold(copy, working.holders.value)
        working.drop(original, working.holders.value)
    return copies


def run_backward(working: Working, piece: Piece, *, is_first: bool) -> tuple[int, int]:
    """The layers of a piece from the last to the first: bytes of parameter gradients that are born, and those of the
    values' gradients that came minus went. `is_first`: the step's first backward of these layers.
    """
    storages, holders = working.storages, working.holders
    shift = AGAIN * len(storages.sizes) if piece.again else 0
    known = instance_of(storages, piece.first, piece.inputs, 0)
    entry, born = storages.arrived_gradients(piece.end), 0
    added = _added(storages, piece)
    for position in reversed(range(piece.first, piece.end)):
        layer = storages.layers[position]
        cost, mine = layer.cost, holders.saved(position)
        above = storages.gradients(position + 1) - entry + born + added[position]
        above += 0 if is_first else _waiting(storages, piece, position)
        for span in cost.backward_first if is_first else cost.backward_later:
            kept = {layer.inputs[k] for k in cost.saved_inputs if k not in span.released}
            released = {layer.inputs[k] for k in span.released} - kept  # values may share a storage
            gone = {known.get(number, number + shift) for number in released}
            freed = sum(working.size(i) for i in gone if working.held.get(i) == mine)
            working.reach(above + span.peak_bytes - freed)
        for number in layer.saves:
            working.drop(known.get(number, number + shift), mine)
        born += cost.gradient_bytes - added[position] if is_first else 0
    left = storages.gradients(piece.first)
    if piece.first == 0:
        working.reach(left - entry + born + storages.made_gradient_bytes)
        left = storages.sent_gradient_bytes
    return born, left - entry


def _added(storages: StageStorages, piece: Piece) -> Counter[int]:
    """Bytes of gradient that a layer of the piece adds to one that waits: into a third."""
    added = Counter[int]()
    for again in storages.repetitions:
        if piece.first <= again.user and again.later < piece.end:
            added[again.user] += again.shared.gradient_bytes
    return added


def _waiting(storages: StageStorages, piece: Piece, position: int) -> int:
    """Gradients of shared parameters that wait for those of an earlier layer, while the backward is at `position`.

    In the first microbatch they are counted as born; autograd adds them up before it touches what exists.
    """
    return sum(
        again.shared.gradient_bytes
        for again in storages.repetitions
        if piece.first <= again.user <= position < again.later < piece.end
    )
