"""The storages of a microbatch in a stage: which layer makes each, which layers save it, and which pass it on.

Each storage has one number in the stage, whichever layers use it: what one layer returns, the next one may save, and a
later one may pass on. Gradients have storages too: a layer may pass a gradient on, or slices of a larger one. All of
this follows from the costs of the layers, and holds for every microbatch and every program. Which of the storages are
in memory at some moment is a `pipefit.cost.residency.Residency`.

Costs: one walk over the layers and what they save, microseconds per saved tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

from pipefit.actions import Subject
from pipefit.errors import UsageError
from pipefit.layer_costs import GradientOrigin, LayerCost, Origin, SavedTensor, Value
from pipefit.plans import Plan
from pipefit.profiles import Measurement
from pipefit.sharing import SharedBuffer, SharedParameter, SharedTensor
from pipefit.texts import layers_text

Shared = TypeVar("Shared", bound=SharedTensor)


class LayerStorages(NamedTuple):
    """One layer of a stage: its cost, and the numbers of the storages that it reads, keeps and returns."""

    cost: LayerCost
    inputs: tuple[int, ...]  # one for every input value; values may share one
    saves: tuple[int, ...]  # what its backward needs, each once
    lasts: frozenset[int]  # those of them that its backward does not free, but the end of the whole piece's
    saved_inputs: tuple[int, ...]  # the numbers of the inputs whose storages are among these
    outputs: tuple[int, ...]  # one for every output value


class GradientValue(NamedTuple):
    """The gradient of a value: the storage it lives in, whether it is contiguous there, and its own bytes."""

    storage: int
    contiguous: bool
    nbytes: int


@dataclass(frozen=True, slots=True)
class Repetition(Generic[Shared]):
    """A tensor that two layers of a stage share: the positions of one user and of the next."""

    user: int
    later: int
    shared: Shared


class StageStorages:
    """Layers `start` to `stop - 1` on one device, and the loss, if they end the model.

    Positions number the layers of the stage from 0; the loss has the last position. Boundary n lies before position n:
    boundary 0 has the stage's inputs, and the last boundary its outputs. With `rooms`, a version of the weights has
    room for gradients and optimizer state too.
    """

    def __init__(self, measurement: Measurement, start: int, stop: int, *, rooms: bool = False) -> None:
        self.rooms = rooms
        costs = tuple(measurement.kinds[kind] for kind in measurement.layers[start:stop])
        self.measurement, self.start, self.stop = measurement, start, stop
        self.last = stop == len(measurement.layers)
        self.costs: tuple[LayerCost, ...] = (*costs, measurement.loss) if self.last else costs
        self.inputs: tuple[Value, ...] = costs[0].inputs
        self.outputs: tuple[Value, ...] = costs[-1].outputs
        self.targets: tuple[Value, ...] = measurement.loss.inputs[len(self.outputs) :] if self.last else ()
        self.sizes: list[int] = []  # bytes of every storage, by its number
        self.target_storages: tuple[int, ...] = ()
        self._saved_places: list[dict[Origin, int]] = []  # by position: the storage of each saved tensor
        self.layers: tuple[LayerStorages, ...] = self._walk()
        # Of every position whose layer works in place: what its input values take as copies, one each
        self.copies = tuple(self._new(v.nbytes for v in cost.inputs * cost.mutates_inputs) for cost in self.costs)

    @staticmethod
    def of(plan: Plan, stage: int) -> StageStorages:
        """The storages of a stage of `plan`."""
        place = plan.stages[stage]
        rooms = plan.training.versions == "everything"
        return StageStorages(plan.measured(stage), place.start, place.stop, rooms=rooms)

    # ---------------------------------------------------------------- values

    @cached_property
    def makers(self) -> dict[int, int]:
        """The position whose layer made a storage, for those that a layer of the stage saves, returns or copies."""
        given = {*self.target_storages, *self.input_storages}
        found: dict[int, int] = {}
        for position, layer in enumerate(self.layers):
            for storage in (*layer.saves, *layer.outputs, *self.copies[position]):
                if storage not in given:
                    found.setdefault(storage, position)
        return found

    @cached_property
    def saved_as(self) -> dict[int, SavedTensor]:
        """What is kept in a storage, for those that a layer of the stage saves: the first tensor in it that is kept."""
        found: dict[int, SavedTensor] = {}
        for cost, places in zip(self.costs, self._saved_places, strict=True):
            for tensor in cost.saved:
                if tensor.origin in places:
                    found.setdefault(places[tensor.origin], tensor)
        return found

    @property
    def samples(self) -> int:
        """How many samples of a microbatch go through the stage: all, or those of a replica's slice."""
        return self.measurement.microbatch_size

    @property
    def count(self) -> int:
        """Number of positions: the stage's layers, and the loss where it is here."""
        return len(self.layers)

    @property
    def input_storages(self) -> tuple[int, ...]:
        """The storages of the stage's inputs."""
        return self.layers[0].inputs

    def values(self, boundary: int) -> tuple[int, ...]:
        """The storages of the values at a boundary, without targets."""
        if boundary == 0:
            return self.input_storages
        return () if self.last and boundary == self.count else self.layers[boundary - 1].outputs

    def position(self, layer: int) -> int:
        """The boundary before a layer of the model, or, for `stop`, the stage's last boundary."""
        return self.count if layer == self.stop else layer - self.start

    def _new(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """Numbers of storages of these sizes."""
        first = len(self.sizes)
        self.sizes += sizes
        return tuple(range(first, len(self.sizes)))

    def _walk(self) -> tuple[LayerStorages, ...]:
        layers: list[LayerStorages] = []
        self.target_storages = self._new(value.nbytes for value in self.targets)
        values = self._new(value.nbytes for value in self.inputs)
        for position, cost in enumerate(self.costs):
            is_loss = self.start + position == self.stop
            inputs = values + self.target_storages if is_loss else values
            own = self._new(cost.storages)
            places = {origin: self._find(origin, own, inputs) for origin in cost.saved_storages}
            self._saved_places.append(places)
            saves = tuple(dict.fromkeys(places.values()))
            lasts = frozenset(places[origin] for origin in cost.lasting_storages)
            values = tuple(self._find(origin, own, inputs) for origin in cost.output_origins)
            saved_inputs = tuple(origin.index for origin in places if origin.kind == "input")
            layers.append(LayerStorages(cost, inputs, saves, lasts, saved_inputs, values))
        return tuple(layers)

    def _find(self, origin: Origin, own: Sequence[int], inputs: Sequence[int]) -> int:
        """The storage that a tensor lives in; one of no bytes for parameters and constants, which exist anyway."""
        match origin.kind:
            case "own":
                return own[origin.index]
            case "input":
                return inputs[origin.index]
            case _:
                return self._new([0])[0]

    # ---------------------------------------------------------------- saved tensors by name

    def storage(self, subject: Subject) -> int:
        """The storage of a saved tensor, named by its layer and its number there.

        Raises:
            UsageError: the layer keeps no such tensor, or it is a parameter or constant, or the loss's.
        """
        found = self._named.get(subject)
        if found is None:
            raise UsageError(
                f"saved tensor {subject} cannot be moved: in {layers_text(self.start, self.stop)} no such tensor is "
                "kept, or one that autograd's hooks do not see, or values decide whether it is kept"
            )
        return found

    def nbytes(self, subject: Subject) -> int:
        """What moves with a saved tensor, or with a version of a layer's weights.

        Raises:
            UsageError: as `storage`.
        """
        return self.version_bytes(subject.layer) if subject.what == "versions" else self.sizes[self.storage(subject)]

    def version_bytes(self, layer: int) -> int:
        """A version of the weights of a layer of the model; that of a shared one belongs to the stage's first user."""
        shared = sum(one.nbytes for one in self._shared_before(layer) if one.gradient_bytes)
        trained = self.costs[layer - self.start].trained_bytes - shared
        return trained + self.copy_bytes(layer) + self.room_bytes(layer)

    def copy_bytes(self, layer: int) -> int:
        """Half-precision copies of a layer's weights; that of a shared one belongs to the first layer that uses it."""
        shared = self.measurement.shared
        again = sum(one.copy_bytes for one in shared if layer in one.copies_again(self.start, self.stop))
        return self.costs[layer - self.start].copy_bytes - again

    def cast_only_bytes(self, layer: int) -> tuple[int, int]:
        """Bytes of the parameters of a layer that the whole stage reads through their half-precision copies alone, and
        of these copies; those of a shared one belong to the first layer that uses it.
        """
        own = [one for one in self.costs[layer - self.start].parameters if one.cast_only]
        whole, copies = sum(one.nbytes for one in own), sum(one.copy_bytes for one in own)
        for shared in self.measurement.shared:
            users = [user for user in shared.users if self.start <= user < self.stop]
            if layer in shared.cast_only and (layer > users[0] or not set(users) <= set(shared.cast_only)):
                whole, copies = whole - shared.nbytes, copies - shared.copy_bytes
        return whole, copies

    def room_bytes(self, layer: int) -> int:
        """What a version of a layer's weights takes beside them."""
        if not self.rooms:
            return 0
        cost, shared = self.costs[layer - self.start], list(self._shared_before(layer))
        repeated = sum(one.gradient_bytes + one.state_bytes for one in shared)
        return cost.gradient_bytes + cost.state_bytes - repeated

    def _shared_before(self, layer: int) -> Iterator[SharedParameter]:
        """The parameters of a layer that an earlier one of the stage has too."""
        return (again.shared for again in self.repetitions if again.later == layer - self.start)

    def savers(self, subject: Subject) -> tuple[int, ...]:
        """The layers of the model whose backward needs the storage of a saved tensor; the loss counts as the last."""
        number = self.storage(subject)
        return tuple(
            min(self.start + position, self.stop - 1)
            for position, layer in enumerate(self.layers)
            if number in layer.saves
        )

    @cached_property
    def _named(self) -> dict[Subject, int]:
        found: dict[Subject, int] = {}
        fixed = frozenset[int]().union(*(layer.lasts for layer in self.layers))  # autograd does not hold these
        for position, layer in enumerate(self.layers[: self.stop - self.start]):
            places = self._saved_places[position]
            for tensor in layer.cost.saved:
                if tensor.origin in places and places[tensor.origin] not in fixed and not tensor.hidden:
                    found[Subject(self.start + position, tensor.index)] = places[tensor.origin]
        return found

    # ---------------------------------------------------------------- gradients

    @property
    def output_gradient_bytes(self) -> int:
        """What receiving the gradients of the outputs allocates; nothing on the last stage."""
        return 0 if self.last else gradient_bytes(self.outputs)

    @cached_property
    def sent_gradient_bytes(self) -> int:
        """Gradients that a backward leaves to be sent to the stage before, each contiguous; none on the first stage."""
        if not self.start:
            return 0
        whole = {g.storage: self._gradient_sizes[g.storage] for g in self._present(0) if g.contiguous}
        return sum(whole.values()) + self.made_gradient_bytes

    @cached_property
    def made_gradient_bytes(self) -> int:
        """Gradients of the inputs that are allocated in order to be sent: copies of those that are not contiguous."""
        return sum(g.nbytes for g in self._present(0) if not g.contiguous) if self.start else 0

    def gradients(self, boundary: int) -> int:
        """Bytes of the gradients of the values at a boundary; the first stage's inputs have none."""
        return self._gradient_bytes[boundary]

    @cached_property
    def _gradient_bytes(self) -> list[int]:
        found = [
            sum({g.storage: self._gradient_sizes[g.storage] for g in self._present(boundary)}.values())
            for boundary in range(self.count + 1)
        ]
        return found if self.start else [0, *found[1:]]

    def arrived_gradients(self, boundary: int) -> int:
        """Bytes of the gradients at a boundary that exist before the backward of the position before it begins.

        At the model's end there are none: the gradient that the backward of the loss starts from is made in it.
        """
        return 0 if self.last and boundary == self.count else self.gradients(boundary)

    def unlike_gradients(self) -> list[tuple[int, int]]:
        """Boundaries at which a gradient has other bytes than a whole gradient for each value would have.

        There the gradient of a value is a slice of a larger one, or that of another value too. Each comes with the last
        boundary at which that is so, because only a stage that holds both boundaries meets the exception: one that ends
        between them, or at the second, receives whole gradients.
        """
        unlike = [self._unlike(boundary) for boundary in range(self.count + 1)]
        last = {storage: boundary for boundary, storages in enumerate(unlike) for storage in storages}
        return [(boundary, last[storage]) for boundary, storages in enumerate(unlike) for storage in sorted(storages)]

    def _unlike(self, boundary: int) -> set[int]:
        """The storages of gradients at a boundary that are no whole gradient of one value."""
        present = self._present(boundary)
        holders = Counter(g.storage for g in present)
        return {
            g.storage
            for g in present
            if not g.contiguous or self._gradient_sizes[g.storage] != g.nbytes or holders[g.storage] > 1
        }

    @property
    def _gradient_sizes(self) -> list[int]:
        return self._gradients_traced[1]

    @property
    def _gradient_values(self) -> list[list[GradientValue | None]]:
        return self._gradients_traced[0]

    @cached_property
    def _gradients_traced(self) -> tuple[list[list[GradientValue | None]], list[int]]:
        """The gradients of the values at every boundary, and the bytes of the storages that they live in.

        Followed from the last layer to the first: a layer may pass on the gradient of an output, or slices of it. The
        gradient that the backward of a loss starts from is counted like any other.
        """
        sizes: list[int] = []

        def new(nbytes: int) -> int:
            sizes.append(nbytes)
            return len(sizes) - 1

        leaving = self.costs[-1].outputs
        values = [GradientValue(new(v.nbytes), True, v.nbytes) if v.has_gradient else None for v in leaving]
        boundaries = [values]
        for cost in reversed(self.costs):
            own = [new(nbytes) for nbytes in cost.gradient_storages]
            values = [
                _gradient(origin, value.nbytes, own, boundaries[-1])
                for origin, value in zip(cost.input_gradients, cost.inputs, strict=True)
            ]
            boundaries.append(values)
        return boundaries[::-1], sizes

    def _present(self, boundary: int) -> list[GradientValue]:
        """The gradients that exist at a boundary."""
        return [value for value in self._gradient_values[boundary] if value is not None]

    # ---------------------------------------------------------------- shared parameters and buffers

    @cached_property
    def repetitions(self) -> tuple[Repetition[SharedParameter], ...]:
        """Parameters that several layers of the stage share: one entry for every two consecutive users."""
        return tuple(self._repeated(self.measurement.shared))

    @cached_property
    def repeated_buffers(self) -> tuple[Repetition[SharedBuffer], ...]:
        """The same of buffers, and of tensors that are plain attributes."""
        return tuple(self._repeated(self.measurement.shared_buffers))

    def _repeated(self, tensors: Iterable[Shared]) -> Iterator[Repetition[Shared]]:
        for shared in tensors:
            for user, later in shared.pairs:
                if self.start <= user and later < self.stop:
                    yield Repetition(user - self.start, later - self.start, shared)


def gradient_bytes(values: Sequence[Value]) -> int:
    """Bytes of the gradients of `values`, of those that have one; a gradient is as large as its value."""
    return sum(value.nbytes for value in values if value.has_gradient)


def _gradient(
    origin: GradientOrigin, nbytes: int, own: Sequence[int], behind: Sequence[GradientValue | None]
) -> GradientValue | None:
    """The gradient of an input of `nbytes`, given those of the layer's outputs (`behind`)."""
    if origin.kind == "own":
        return GradientValue(own[origin.index], origin.contiguous, nbytes)
    passed = behind[origin.index] if origin.kind == "output" else None
    return None if passed is None else GradientValue(passed.storage, passed.contiguous and origin.contiguous, nbytes)
