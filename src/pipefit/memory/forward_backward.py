"""Forward and backward through consecutive layers: the storages that are held, and the peak.

A layer's own peak is in its `LayerCost`, in bytes above the memory that exists when the layer begins: before
its forward, its inputs; before its backward, the results of the forward and the gradients of its outputs. The
spans of a `LayerCost` also say which inputs a backward has released before it peaks; their bytes are
subtracted if they have no other holder.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pipefit.memory.storages import (
    Effect,
    Holders,
    LayerStorages,
    Moments,
    MovedStorage,
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
    action; `workspace` is the part of the peak that a kernel holds. `gathers` are changes of gathered
    parameters by boundary, and `gathered` is their sum so far.
    """

    def __init__(self, storages: StageStorages, residency: Residency, gathers: Moments = ()) -> None:
        self.storages, self.holders = storages, Holders(storages)
        self._gathers, self.gathered = dict(gathers), 0
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
        """Record a moment within a layer: `above` more bytes are allocated, `workspace` of them by a
        kernel.
        """
        if self.level + above > self.peak:
            self.peak, self.workspace = self.level + above, workspace

    def gather(self, boundary: int, above: int = 0) -> None:
        """Gather and free parameters at a boundary, at which `above` more bytes are allocated."""
        for change in self._gathers.pop(boundary, ()):
            self.level += change
            self.gathered += change
            self.reach(above)

    def after(self, **fields: object) -> Residency:
        """Return the next residency, with these fields changed."""
        held = self._residency.held.after(self.held, self._touched)
        return self._residency.changed(held=held, away=self.away, categories=self._categories(), **fields)

    def _categories(self) -> tuple[int, int]:
        """Return the bytes of activations and boundary buffers on the device after the changes."""
        activations, boundary = self._residency.categories
        were, saved = self._residency.away, self.holders.activations
        moved = (
            [one for one in {*were, *self.away} if were.get(one) != self.away.get(one)]
            if were or self.away
            else ()
        )
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
        result = Counter[int]()
        for maker, _, nbytes in self.kept():
            result[maker] += nbytes
        return result

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
            parameters=self.gathered,
        )


def _is_here(away: Mapping[int, MovedStorage], instance: int) -> bool:
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
    """A forward: its positions, whether it is a recomputation, whether it saves, and what it moves.

    Storages in `moved` are at the host when their layer has ended.
    """

    first: int
    end: int
    again: bool
    saves: bool
    moved: frozenset[int] = frozenset()


def _given(storages: StageStorages, piece: Piece) -> Iterator[tuple[int, ...]]:
    """Yield the instances of the inputs of every layer of a piece."""
    shift, values = len(storages.sizes) if piece.again else 0, piece.copies or piece.inputs
    for position in range(piece.first, piece.end):
        layer = storages.layers[position]
        yield _with_targets(storages, position, values)
        values = () if _is_loss(storages, position) else outputs_of(layer, values, shift)


def _is_loss(storages: StageStorages, position: int) -> bool:
    return storages.start + position == storages.stop


def _with_targets(storages: StageStorages, position: int, values: tuple[int, ...]) -> tuple[int, ...]:
    """Return the instances that a layer receives; the loss also takes targets."""
    return values + storages.target_storages if _is_loss(storages, position) else values


def _instances(
    layer: LayerStorages, numbers: Iterable[int], given: tuple[int, ...], shift: int
) -> Iterator[int]:
    """Yield the instances of storages that a layer saves: an input's are those that the layer received."""
    inputs = defaultdict[int, list[int]](list)
    for k in layer.saved_inputs:
        inputs[layer.inputs[k]].append(given[k])
    for number in numbers:
        yield from inputs.get(number, (number + shift,))


def run_forward(working: Working, way: Forward, inputs: tuple[int, ...]) -> tuple[int, ...]:
    """Run the layers forward; return the instances of the values after the last layer, held as values.

    The inputs must be held as values too, and are dropped as such; their other holders stay.
    """
    storages, holders = working.storages, working.holders
    shift = len(storages.sizes) if way.again else 0
    values, stop = inputs, storages.last_saver(way.first, way.end) if way.again else way.end
    for position in range(way.first, way.end):
        working.gather(position)
        layer, given = storages.layers[position], _with_targets(storages, position, values)
        stops, casts = position >= stop, layer.cost.copy_bytes * storages.casts
        if stops:
            working.reach((layer.cost.stopped_peak_bytes or 0) + casts if position == stop else 0)
        elif way.saves:
            working.reach(casts + layer.cost.forward_peak_bytes, layer.cost.forward_workspace_bytes)
        else:
            working.reach(casts + layer.cost.checkpoint_peak_bytes, layer.cost.checkpoint_workspace_bytes)
        is_loss = _is_loss(storages, position)
        for instance in values if is_loss and storages.buffered else ():
            working.hold(instance, holders.sending)  # until the backward
        outputs = () if is_loss or stops else outputs_of(layer, values, shift)
        for instance in _instances(layer, _kept(storages, layer, way), given, shift):
            working.hold(instance, holders.saved(position))
        for instance in outputs:
            working.hold(instance, holders.value)
        for instance in values:
            if instance not in outputs:
                working.drop(instance, holders.value)
        if is_loss:
            working.drop_all(holders.target)
        values = outputs
    working.gather(way.end)
    return values


def _kept(storages: StageStorages, layer: LayerStorages, way: Forward) -> Iterable[int]:
    """Return the storages that a layer saves in a forward."""
    if way.saves:
        return [number for number in layer.saves if number not in way.moved]
    return layer.unseen if storages.buffered else ()


def drop_unseen(working: Working, first: int, end: int) -> None:
    """Drop tensors that autograd's hooks do not see, which the graph of a recomputation has held."""
    storages = working.storages
    for position in range(first, end):
        layer = storages.layers[position]
        gone = [number + len(storages.sizes) for number in layer.unseen - layer.seen]
        working.drop_from(gone, working.holders.saved(position))


def outputs_of(layer: LayerStorages, values: tuple[int, ...], shift: int = 0) -> tuple[int, ...]:
    """Return the instances of a layer's outputs, given those of its inputs.

    Values in one storage have separate copies if they were copied.
    """
    made = zip(layer.cost.output_origins, layer.outputs, strict=True)
    return tuple(
        values[origin.index] if origin.kind == "input" else number + shift for origin, number in made
    )


def copy_inputs(
    working: Working, first: int, inputs: tuple[int, ...], *, again: bool = False
) -> tuple[int, ...]:
    """Return the instances that a forward with kept inputs reads: copies, if its first layer works in
    place.
    """
    storages = working.storages
    if not storages.layers[first].cost.mutates_inputs:
        return inputs
    copies = tuple(number + again * len(storages.sizes) for number in storages.copies[first])
    for copy, original in zip(copies, inputs, strict=True):
        working.hold(copy, working.holders.value)
        working.drop(original, working.holders.value)
    return copies


def run_backward(working: Working, piece: Piece, *, bears: Callable[[int], bool]) -> tuple[int, int]:
    """Run the layers of a piece backward.

    Args:
        bears: whether the backward of a position allocates its parameter gradients, as the step's first one
            does, instead of accumulating.

    Returns:
        The growth in bytes of parameter gradients, and of value gradients.
    """
    storages, holders = working.storages, working.holders
    shift = len(storages.sizes) if piece.again else 0
    given = dict(enumerate(_given(storages, piece), start=piece.first))
    passes = [(given, shift)]
    if piece.again and storages.buffered:  # the first forward keeps tensors that autograd's hooks do not see
        before = enumerate(_given(storages, piece._replace(again=False, copies=())), start=piece.first)
        passes.append((dict(before), 0))
    entry, waited, born = storages.arrived_gradients(piece.end), _waiting(storages, piece.end, bears), 0
    for position in reversed(range(piece.first, piece.end)):
        layer = storages.layers[position]
        cost, mine, added = layer.cost, holders.saved(position), _added(storages, position)
        returned = storages.buffered and _returned(working, position, shift)
        left, spans = _left_waiting(storages, position, bears, returned=returned)
        above = storages.gradients(position + 1) - entry + born
        above += _waiting(storages, position + 1, bears) - waited
        working.gather(position + 1, above)
        above += added + left + storages.copied_gradient_bytes
        inputs, back = _with_returned(storages, position, given[position], piece.moved)
        for instance in back:
            working.hold(instance, mine)
        for span in spans:
            gone = _released(layer, span, inputs)
            freed = sum(working.size(i) for i in gone if working.held.get(i) == mine)
            working.reach(above + span.peak_bytes - freed, span.workspace_bytes)
        own = [number for number in layer.saves if number not in layer.lasts and number not in piece.moved]
        for values, of_pass in passes:
            working.drop_from(_instances(layer, own, values[position], of_pass), mine)
        working.drop_from(back, mine)
        born += cost.gradient_bytes - added if bears(position) else 0
    for position in range(piece.first, piece.end):
        layer = storages.layers[position]
        for values, of_pass in passes:
            lasts = _instances(layer, layer.lasts, values[position], of_pass)
            working.drop_from(lasts, holders.saved(position))
    grown, travelling = (
        born + _waiting(storages, piece.first, bears) - waited,
        storages.gradients(piece.first),
    )
    if piece.first == 0:
        working.reach(travelling - entry + grown + storages.made_gradient_bytes)
        travelling = storages.sent_gradient_bytes
    return grown, travelling - entry


def _with_returned(
    storages: StageStorages, position: int, given: tuple[int, ...], moved: frozenset[int]
) -> tuple[tuple[int, ...], list[int]]:
    """Return a layer's inputs, with the instances that return from the host, and all that return."""
    layer, shift = storages.layers[position], 2 * len(storages.sizes)
    inputs = tuple(
        shift + number if number in moved else instance
        for number, instance in zip(layer.inputs, given, strict=True)
    )
    return inputs, [shift + number for number in layer.saves if number in moved]


def _released(layer: LayerStorages, span: Span, given: tuple[int, ...]) -> set[int]:
    """Return the instances of saved inputs that the layer has released before `span`; two values may share
    one.
    """
    kept = {given[k] for k in layer.saved_inputs if k not in span.released}
    return {given[k] for k in span.released} - kept


def _added(storages: StageStorages, position: int) -> int:
    """Return the bytes of gradients that a layer adds to those of later users of its parameters.

    Those wait, and autograd adds the two into newly allocated memory.
    """
    return sum(again.shared.gradient_bytes for again in storages.repetitions if again.user == position)


def _waiting(storages: StageStorages, boundary: int, bears: Callable[[int], bool]) -> int:
    """Return the gradient bytes of shared parameters that wait at a boundary for users before it.

    The gradients of all users are added up before the sum is added to `.grad`. If a backward allocates
    gradients, nothing waits: the sum becomes `.grad`, and counts among the allocated parameter gradients.
    """
    return sum(
        again.shared.gradient_bytes
        for again in storages.repetitions
        if again.user < boundary <= again.later and not (bears(again.user) or bears(again.later))
    )


def _returned(working: Working, position: int, shift: int) -> bool:
    """Return whether outputs that a layer made and saved are held for others during its backward."""
    layer, mine = working.storages.layers[position], working.holders.saved(position)
    made = {
        number + shift
        for origin, number in zip(layer.cost.output_origins, layer.outputs, strict=True)
        if origin.kind == "own" and number in layer.saves
    }
    return any(working.held.get(instance, mine) != mine for instance in made)


def _left_waiting(
    storages: StageStorages, position: int, bears: Callable[[int], bool], *, returned: bool
) -> tuple[int, Sequence[Span]]:
    """Return the gradient bytes that a layer leaves waiting, and the spans of its backward without these.

    The profile adds and frees the gradient of the last user of a shared parameter at once, or allocates it. A
    layer whose gradients all wait behaves like one whose gradients are allocated.
    """
    cost, inner = storages.costs[position], position + 1 < storages.count
    buffered = storages.buffered_values(position + 1)
    if bears(position):
        return 0, cost.spans(is_first=True, inner=inner, buffered=buffered, returned=returned)
    adding = {again.shared.name for again in storages.repetitions if again.user == position}
    left = sum(
        again.shared.gradient_bytes
        for again in storages.repetitions
        if again.later == position and again.shared.name not in adding
    )
    if left and left == cost.gradient_bytes:
        return 0, cost.spans(is_first=True, inner=inner, buffered=buffered, returned=returned)
    return left, cost.spans(is_first=False, inner=inner, buffered=buffered, returned=returned)
