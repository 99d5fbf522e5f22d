"""Forward and backward through consecutive layers: the storages that are held, and the peak.

A layer's own peak is in its `LayerCost`, in bytes above the memory that exists when the layer begins: before
its forward, its inputs; before its backward, the results of the forward and the gradients of its outputs. The
spans of a `LayerCost` also say which inputs a backward has released before it peaks; their bytes are
subtracted if they have no other holder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from pipefit.memory.storages import (
    Away,
    Effect,
    Holders,
    LayerStorages,
    Piece,
    Residency,
    StageStorages,
    Whereabouts,
    effect,
)
from pipefit.schema.layer_costs import Span


class Working:
    """A copy of a residency that an action changes.

    `level` and `peak` are the bytes now and at the highest moment so far, relative to the start of the
    action; `workspace` is the part of the peak that a kernel holds.
    """

    def __init__(self, storages: StageStorages, residency: Residency) -> None:
        self.storages, self.holders = storages, Holders(storages)
        self.held, self.away = residency.held.mapping(), dict(residency.away)
        self._residency = residency
        self._touched = dict[int, int]()  # instances with their holders before the action
        self.level = self.peak = self.workspace = 0

    def size(self, instance: int) -> int:
        """Return the bytes of an instance; a negative instance stands for buffer copies of some layers."""
        if instance < 0:
            return _copied_bytes(self.storages, instance)
        sizes = self.storages.sizes
        return sizes[instance % len(sizes)]

    def hold(self, instance: int, holder: int) -> None:
        """Add a holder to an instance, which is allocated with its first holder."""
        before = self.held.get(instance, 0)
        if not before:
            self.level += self.size(instance)
            self.reach(0)
        self._touched.setdefault(instance, before)
        self.held[instance] = before | holder

    def drop(self, instance: int, holder: int) -> None:
        """Remove a holder from an instance, which is freed with its last holder."""
        before = self.held.get(instance, 0)
        self._touched.setdefault(instance, before)
        left = before & ~holder
        if left:
            self.held[instance] = left
        elif self.held.pop(instance, 0):
            self.level -= self.size(instance)

    def drop_all(self, holder: int) -> None:
        """Remove a holder from all instances."""
        self.drop_from([instance for instance, holders in self.held.items() if holders & holder], holder)

    def drop_from(self, instances: Iterable[int], holder: int) -> None:
        """Remove a holder from those of the instances that it holds."""
        for instance in dict.fromkeys(instances):
            if self.held.get(instance, 0) & holder:
                self.drop(instance, holder)

    def reach(self, above: int, workspace: int = 0) -> None:
        """Record a moment within a layer: `above` more bytes are allocated, `workspace` of them by a kernel."""
        if self.level + above > self.peak:
            self.peak, self.workspace = self.level + above, workspace

    def after(self, **fields: object) -> Residency:
        """Return the next residency, with these fields changed."""
        held = self._residency.held.after(self.held, self._touched)
        return self._residency.changed(held=held, away=self.away, categories=self._categories(), **fields)

    def _categories(self) -> tuple[int, int]:
        """Return the bytes of activations and boundary buffers on the device after the changes."""
        activations, boundary = self._residency.categories
        were, saved = self._residency.away, self.holders.activations
        moved = [one for one in {*were, *self.away} if were.get(one) != self.away.get(one)] if were or self.away else ()
        for instance in {*self._touched, *moved}:
            now = self.held.get(instance, 0)
            before = self._touched.get(instance, now)
            now, before = now * _is_here(self.away, instance), before * _is_here(were, instance)
            nbytes = self.size(instance)
            activations += nbytes * (bool(now & saved) - bool(before & saved))
            boundary += nbytes * (bool(now and not now & saved) - bool(before and not before & saved))
        return activations, boundary

    def activations(self) -> Counter[int]:
        """Return the bytes of activations on the device by the position that computed them.

        Data from outside the stage has position -1.

        Copies of buffers count for the first position of their run.
        """
        found = Counter[int]()
        for maker, _, nbytes in self.kept():
            found[maker] += nbytes
        return found

    def kept(self) -> Iterator[tuple[int, int, int]]:
        """Yield the activations on the device: position, storage and bytes.

        The position is the one that computed it; storage -1 means buffer copies.
        """
        for instance, holders in self.held.items():
            if holders & self.holders.activations and _is_here(self.away, instance):
                storage = -1 if instance < 0 else instance % len(self.storages.sizes)
                yield self._maker(instance), storage, self.size(instance)

    def _maker(self, instance: int) -> int:
        if instance < 0:
            return (-1 - instance) // 2 // (self.storages.count + 1)
        return self.storages.makers.get(instance % len(self.storages.sizes), -1)

    def effect(self, after: Residency, *, gradients: int = 0, boundary: int = 0) -> Effect:
        """Return the action's effect, given the changes in parameter and value gradients (`boundary`)."""
        before = self._residency.categories
        return effect(
            peak_bytes=self.peak,
            workspace=self.workspace,
            gradients=gradients,
            activations=after.categories[0] - before[0],
            boundary=after.categories[1] - before[1] + boundary,
        )


def _is_here(away: Mapping[int, Away], instance: int) -> bool:
    """Return whether an instance's bytes are on the device."""
    return instance not in away or away[instance].state is not Whereabouts.AWAY


def buffer_copies(storages: StageStorages, first: int, end: int, *, fed_back: bool) -> int:
    """Return the negative instance that stands for buffer copies of positions `first` to `end - 1`.

    They are copies of buffers that feed back, or of all others.
    """
    return -1 - (2 * (first * (storages.count + 1) + end) + fed_back)


def _copied_bytes(storages: StageStorages, instance: int) -> int:
    """Return the bytes of the copies that a negative instance stands for, each once.

    Shared buffers never feed back.
    """
    run, fed_back = divmod(-1 - instance, 2)
    first, end = divmod(run, storages.count + 1)
    costs = storages.costs[first:end]
    if fed_back:
        return sum(cost.fed_back_bytes for cost in costs)
    repeated = sum(
        again.shared.nbytes * again.shared.copied
        for again in storages.repeated_buffers
        if first <= again.user and again.later < end
    )
    return sum(cost.buffer_bytes - cost.fed_back_bytes for cost in costs) - repeated


class Forward(NamedTuple):
    """A forward: its positions, whether it is a recomputation, and whether it saves."""

    first: int
    end: int
    again: bool
    saves: bool


def _given(storages: StageStorages, first: int, inputs: tuple[int, ...]) -> dict[int, int]:
    """Return the instances of a piece's inputs and of the targets, by their storages."""
    numbers = storages.values(first)
    found = dict(zip(numbers, inputs, strict=True))
    return found | {s: s for s in storages.target_storages}


def run_forward(working: Working, way: Forward, inputs: tuple[int, ...]) -> tuple[int, ...]:
    """Run the layers forward; return the instances of the values after the last layer, held as values.

    The inputs must be held as values too, and are dropped as such; their other holders stay.
    """
    storages, holders = working.storages, working.holders
    shift = len(storages.sizes) if way.again else 0
    known = _given(storages, way.first, inputs)
    values = inputs
    for position in range(way.first, way.end):
        layer = storages.layers[position]
        if way.saves:
            working.reach(layer.cost.forward_peak_bytes, layer.cost.forward_workspace_bytes)
        else:
            working.reach(layer.cost.checkpoint_peak_bytes, layer.cost.checkpoint_workspace_bytes)
        is_loss = storages.start + position == storages.stop
        outputs = () if is_loss else _outputs(layer, values, shift)
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


def _outputs(layer: LayerStorages, values: tuple[int, ...], shift: int) -> tuple[int, ...]:
    """Return the instances of a layer's outputs.

    Values in one storage have separate copies if they were copied.
    """
    made = zip(layer.cost.output_origins, layer.outputs, strict=True)
    return tuple(values[origin.index] if origin.kind == "input" else number + shift for origin, number in made)


def copy_inputs(working: Working, first: int, inputs: tuple[int, ...]) -> tuple[int, ...]:
    """Return the instances that a forward with kept inputs reads: copies, if its first layer works in place."""
    storages = working.storages
    if not storages.layers[first].cost.mutates_inputs:
        return inputs
    copies = storages.copies[first]
    for copy, original in zip(copies, inputs, strict=True):
        working.hold(copy, working.holders.value)
        working.drop(original, working.holders.value)
    return copies


def run_backward(working: Working, piece: Piece, *, bears: Callable[[int], bool]) -> tuple[int, int]:
    """Run the layers of a piece backward.

    Args:
        bears: whether the backward of a position allocates its parameter gradients, as the step's first one
            does, instead
        of accumulating.

    Returns:
        The bytes of parameter gradients that it allocates, and the growth in bytes of value gradients.
    """
    storages, holders = working.storages, working.holders
    shift = len(storages.sizes) if piece.again else 0
    known = _given(storages, piece.first, piece.inputs)
    entry, born = storages.arrived_gradients(piece.end), 0
    added = _added(storages, piece)
    for position in reversed(range(piece.first, piece.end)):
        layer = storages.layers[position]
        cost, mine = layer.cost, holders.saved(position)
        above = storages.gradients(position + 1) - entry + born + added[position]
        above += _waiting(storages, piece, position, bears)
        for span in cost.spans(is_first=bears(position), inner=position + 1 < storages.count):
            gone = {known.get(number, number + shift) for number in _released(layer, span)}
            freed = sum(working.size(i) for i in gone if working.held.get(i) == mine)
            working.reach(above + span.peak_bytes - freed, span.workspace_bytes)
        for number in layer.saves:
            if number not in layer.lasts:
                working.drop(known.get(number, number + shift), mine)
        born += cost.gradient_bytes - added[position] if bears(position) else 0
    for position in range(piece.first, piece.end):
        for number in storages.layers[position].lasts:
            working.drop(known.get(number, number + shift), holders.saved(position))
    left = storages.gradients(piece.first)
    if piece.first == 0:
        working.reach(left - entry + born + storages.made_gradient_bytes)
        left = storages.sent_gradient_bytes
    return born, left - entry


def _released(layer: LayerStorages, span: Span) -> set[int]:
    """Return the storages of saved inputs that the layer has released before `span`.

    Two values may share one.
    """
    kept = {layer.inputs[k] for k in layer.saved_inputs if k not in span.released}
    return {layer.inputs[k] for k in span.released} - kept


def _added(storages: StageStorages, piece: Piece) -> Counter[int]:
    """Return, by position, the gradient bytes of parameters shared with a later layer of the piece.

    The later layer's gradient waits, and autograd adds the two into newly allocated memory.
    """
    added = Counter[int]()
    for again in storages.repetitions:
        if piece.first <= again.user and again.later < piece.end:
            added[again.user] += again.shared.gradient_bytes
    return added


def _waiting(storages: StageStorages, piece: Piece, position: int, bears: Callable[[int], bool]) -> int:
    """Return the gradient bytes of shared parameters that wait during the backward at `position`.

    They wait for the gradient of an earlier layer.

    Autograd adds up the gradients of all users before it adds the sum to `.grad`. The last user's own
    gradient also waits, although the layer's profile has it added and freed at once. If a backward allocates
    gradients, nothing waits: the sum becomes `.grad`, and counts among the allocated parameter gradients.
    """
    inside = [
        again
        for again in storages.repetitions
        if piece.first <= again.user and again.later < piece.end and not bears(again.user)
    ]
    adding = {again.shared.name for again in inside if again.user == position}
    return sum(
        again.shared.gradient_bytes
        for again in inside
        if again.user <= position < again.later or (again.later == position and again.shared.name not in adding)
    )
