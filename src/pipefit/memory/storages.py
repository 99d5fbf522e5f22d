"""The storages of a microbatch in a stage: their makers, their users, and their time in memory.

Each storage has one number in the stage, whichever layers use it: the output of one layer may be saved by the
next and passed on by a later one. Gradients have storages too: a layer may pass on a gradient, or views of a
larger one. All of this follows from the costs of the layers, and holds for every microbatch and every
program. A `Residency` says which storages are in memory at a moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, cached_property
from importlib.metadata import version
from typing import Generic, Literal, NamedTuple, TypeVar

from pipefit.errors import UsageError
from pipefit.schema.actions import Kind, Message, Placement, Subject
from pipefit.schema.devices import Place
from pipefit.schema.grids import Rows
from pipefit.schema.layer_costs import (
    GradientOrigin,
    LayerCost,
    Origin,
    SavedTensor,
    SharedBuffer,
    SharedParameter,
    SharedTensor,
    Value,
)
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Measurement
from pipefit.texts import layers_text

# ---- Effect of an action on its device's memory, by category
#
# Between actions, every byte belongs to one category:
#
#     activations        storages that a forward saved and no backward has used up
#     weight versions    weights that are not the newest ones, for microbatches in flight and coming forwards
#     boundary buffers   inputs, targets, outputs and gradients that wait or travel and that no layer saved;
# the losses
#     gradients          of parameters, from the first backward of a step to its STEP
#     optimizer state    from the first STEP on
#     parameters         and buffers, which change if parameters are offloaded
#
# At the peak of an action, a growing category counts as large as after the action, and a shrinking one as
# large as before it; the bytes of the peak above this sum are temporary. If the sum exceeds the peak, because
# the action freed before it allocated, shrinking categories count as smaller. So the categories always add up
# to the exact total.


class Effect(NamedTuple):
    """Bytes relative to the start of an action: at its peak, and after it.

    `at_peak` is by category: gradients, optimizer state, activations, weight versions, boundary buffers,
    parameters, temporary, workspace. `after` lacks the last two, whose bytes never outlive an action.
    """

    peak_bytes: int
    after_bytes: int
    at_peak: tuple[int, int, int, int, int, int, int, int]
    after: tuple[int, int, int, int, int, int]


def effect(
    *,
    peak_bytes: int = 0,
    workspace: int = 0,
    gradients: int = 0,
    optimizer: int = 0,
    activations: int = 0,
    versions: int = 0,
    boundary: int = 0,
    parameters: int = 0,
) -> Effect:
    """Return the effect of an action from its changes by category and its peak above its start.

    `workspace` bytes of the peak are the workspace of a kernel.
    """
    after = (gradients, optimizer, activations, versions, boundary, parameters)
    peak_bytes = max(0, peak_bytes, sum(after))
    at_peak = [max(0, change) for change in after]
    temporary = peak_bytes - sum(at_peak)
    most_shrinking_first = sorted(enumerate(after), key=lambda item: item[1])
    for category, change in most_shrinking_first:
        if change < 0 and temporary < 0:
            given = min(-change, -temporary)
            at_peak[category] -= given
            temporary += given
    inside = min(workspace, temporary)
    gradients, optimizer, activations, versions, boundary, parameters = at_peak
    peak = gradients, optimizer, activations, versions, boundary, parameters, temporary - inside, inside
    return Effect(peak_bytes, sum(after), peak, after)


Moments = tuple[tuple[int, tuple[int, ...]], ...]  # changes in bytes during a pass, in order, by boundary


def freeing_versions(before: Effect, nbytes: int) -> Effect:
    """Return the effect of an action that finally also frees `nbytes` of weight versions."""
    gradients, optimizer, activations, versions, boundary, parameters = before.after
    after = gradients, optimizer, activations, versions - nbytes, boundary, parameters
    return before._replace(after_bytes=before.after_bytes - nbytes, after=after)


def after_freeing(before: Effect, nbytes: int) -> Effect:
    """Return the effect of an action that begins by freeing `nbytes` of boundary buffers."""
    gradients, optimizer, activations, versions, boundary, parameters = before.after
    return effect(
        peak_bytes=before.peak_bytes - nbytes,
        workspace=before.at_peak[-1],
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        versions=versions,
        boundary=boundary - nbytes,
        parameters=parameters,
    )


# ---- Storages of a stage

Shared = TypeVar("Shared", bound=SharedTensor)


class LayerStorages(NamedTuple):
    """One layer of a stage: its cost, and the numbers of the storages that it reads, saves and returns."""

    cost: LayerCost
    inputs: tuple[int, ...]  # one for every input value; values may share one
    saves: tuple[int, ...]  # storages that its backward needs, each once
    lasts: frozenset[int]  # storages among them that are freed only after the backward of the whole piece
    seen: frozenset[int]  # storages among them that autograd's hooks see
    unseen: frozenset[int]  # storages among them of tensors that they do not see
    saved_inputs: tuple[int, ...]  # numbers of the inputs whose storages are among them
    outputs: tuple[int, ...]  # one for every output value


class GradientValue(NamedTuple):
    """The gradient of a value: its storage, whether it is contiguous there, and its bytes."""

    storage: int
    contiguous: bool
    nbytes: int


@dataclass(frozen=True, slots=True)
class Repetition(Generic[Shared]):
    """A tensor that two layers of a stage share: the positions of two consecutive users."""

    user: int
    later: int
    shared: Shared


@cache
def receives_ahead() -> bool:
    """Return whether torch's engine allocates all receive buffers in its first step, as before torch 2.15.

    Later releases allocate a buffer for each message when they post its receive.
    """
    release = version("torch").split(".")
    return (int(release[0]), int(release[1])) < (2, 15)


def drops_early(plan: Plan) -> bool:
    """Return whether torch's engine drops messages during a step: it runs the plan by its own 1F1B."""
    alone = len(plan.ranks) == len(plan.stages)
    return alone and plan.training.schedule == "1f1b" and plan.training.microbatches >= len(plan.stages)


class StageStorages:
    """Layers `start` to `stop - 1` on one device, and the loss, if they end the model.

    Positions number the layers of the stage from 0; the loss has the last position. Boundary n lies before
    position n: boundary 0 has the stage's inputs, and the last boundary its outputs. With `rooms`, a weight
    version has room for gradients and optimizer state too. If the stage is `buffered`, as on torch's engine,
    its inputs, targets and gradients of outputs are in buffers, and a microbatch's storages have no bytes for
    them. The buffers of messages are there for all microbatches (`StageRest.buffer_bytes`), or from a message
    until the backward has ended (`receives_ahead`). If it `casts`, autocast makes half-precision copies of
    weights in every forward, and the layer saves them; otherwise all microbatches share the copies.
    """

    def __init__(
        self,
        measurement: Measurement,
        start: int,
        stop: int,
        *,
        rooms: bool = False,
        buffered: bool = False,
        casts: bool = False,
    ) -> None:
        self.rooms, self.buffered, self.casts = rooms, buffered, casts
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
        # By position, storages for copies of the inputs, if the layer works in place
        self.copies = tuple(
            self._new(v.nbytes for v in cost.inputs * cost.mutates_inputs) for cost in self.costs
        )

    @staticmethod
    def of(plan: Plan, stage: int) -> StageStorages:
        """Return the storages of a stage of `plan`."""
        place = plan.stages[stage]
        rooms = plan.training.versions == "everything"
        return StageStorages(plan.measured(stage), place.start, place.stop, rooms=rooms)

    # ---------------------------------------------------------------- values

    @cached_property
    def makers(self) -> dict[int, int]:
        """The position whose layer made each storage that the stage saves, returns or copies."""
        given = {*self.target_storages, *self.input_storages}
        result: dict[int, int] = {}
        for position, layer in enumerate(self.layers):
            for storage in (*layer.saves, *layer.outputs, *self.copies[position]):
                if storage not in given:
                    result.setdefault(storage, position)
        return result

    @cached_property
    def saved_as(self) -> dict[int, SavedTensor]:
        """The first saved tensor in each storage that a layer of the stage saves."""
        result: dict[int, SavedTensor] = {}
        for cost, places in zip(self.costs, self._saved_places, strict=True):
            for tensor in cost.saved:
                if tensor.origin in places:
                    result.setdefault(places[tensor.origin], tensor)
        return result

    @property
    def samples(self) -> int:
        """The samples of a microbatch in the stage: all of them, or those of a replica's local batch."""
        return self.measurement.microbatch_size

    @property
    def count(self) -> int:
        """The number of positions: the stage's layers, and the loss on the last stage."""
        return len(self.layers)

    @property
    def loaded_bytes(self) -> int:
        """The bytes of inputs and targets that a microbatch of a buffered stage has in its step's batch."""
        inputs = () if self.start else self.inputs
        return sum(value.nbytes for value in (*inputs, *self.targets)) if self.buffered else 0

    @property
    def kept_bytes(self) -> int:
        """The bytes that a microbatch of a buffered stage keeps until the end of the step.

        These are its data and the loss, whose graph keeps inputs that arrived for it.
        """
        if not (self.buffered and self.last):
            return self.loaded_bytes
        return self.loaded_bytes + self.measurement.loss_bytes + self.arriving_bytes("inputs")

    @property
    def received_bytes(self) -> int:
        """Bytes of a buffered stage's receive buffers for a microbatch that exist from the first step on."""
        return sum(self._messages.values()) if receives_ahead() else 0

    def arriving_bytes(self, what: Literal["inputs", "gradients"]) -> int:
        """Return bytes that a microbatch's message, of inputs or gradients, allocates in a buffered stage."""
        return 0 if receives_ahead() else self._messages[what]

    @property
    def _messages(self) -> dict[str, int]:
        """The bytes of a microbatch's messages to a buffered stage."""
        received = self.inputs if self.start and self.buffered else ()
        gradients = 0 if self.last or not self.buffered else gradient_bytes(self.outputs)
        return {"inputs": sum(value.nbytes for value in received), "gradients": gradients}

    @property
    def input_storages(self) -> tuple[int, ...]:
        """The storages of the stage's inputs."""
        return self.layers[0].inputs

    def values(self, boundary: int) -> tuple[int, ...]:
        """Return the storages of the values at a boundary, without targets."""
        if boundary == 0:
            return self.input_storages
        return () if self.last and boundary == self.count else self.layers[boundary - 1].outputs

    def position(self, layer: int) -> int:
        """Return the boundary before a layer of the model, or, for `stop`, the stage's last boundary."""
        return self.count if layer == self.stop else layer - self.start

    def _new(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """Add storages of these sizes; return their numbers."""
        first = len(self.sizes)
        self.sizes += sizes
        return tuple(range(first, len(self.sizes)))

    def _walk(self) -> tuple[LayerStorages, ...]:
        layers: list[LayerStorages] = []
        kinds = {id(cost): cost for cost in self.costs}
        saved = {kind: (cost.saved_storages, cost.lasting_storages) for kind, cost in kinds.items()}
        own = not self.buffered
        self.target_storages = self._new(value.nbytes * own for value in self.targets)
        values = self._new(value.nbytes * own for value in self.inputs)
        for position, cost in enumerate(self.costs):
            is_loss = self.start + position == self.stop
            inputs = values + self.target_storages if is_loss else values
            made = self._new(cost.storages)
            saved_storages, lasting_storages = saved[id(cost)]
            places = {origin: self._find(origin, made, inputs) for origin in saved_storages}
            self._saved_places.append(places)
            saves = tuple(dict.fromkeys((*places.values(), *self._new(self._casts(cost)))))
            lasts = frozenset(places[origin] for origin in lasting_storages)
            held = [tensor for tensor in cost.saved if tensor.origin in places]
            unseen = frozenset(places[tensor.origin] for tensor in held if not cost.sees(tensor))
            seen = frozenset(places[tensor.origin] for tensor in held if cost.sees(tensor))
            values = tuple(self._find(origin, made, inputs) for origin in cost.output_origins)
            saved_inputs = tuple(origin.index for origin in places if origin.kind == "input")
            layers.append(LayerStorages(cost, inputs, saves, lasts, seen, unseen, saved_inputs, values))
        return tuple(layers)

    def _casts(self, cost: LayerCost) -> list[int]:
        """Return the bytes of the copies of weights that a layer saves, together."""
        halves = {parameter.dtype for parameter in cost.parameters}
        saved = sum(t.nbytes for t in cost.saved if t.origin.kind == "parameter" and t.dtype not in halves)
        return [min(saved, cost.copy_bytes)] if self.casts and saved else []

    def _find(self, origin: Origin, own: Sequence[int], inputs: Sequence[int]) -> int:
        """Return the storage of a tensor.

        Parameters and constants, which exist anyway, get a new storage of 0 bytes.
        """
        match origin.kind:
            case "own":
                return own[origin.index]
            case "input":
                return inputs[origin.index]
            case _:
                return self._new([0])[0]

    # ---------------------------------------------------------------- saved tensors by name

    def storage(self, subject: Subject) -> int:
        """Return the storage of a saved tensor, named by its layer and its number in the layer.

        Raises:
            UsageError: the layer does not keep the tensor, or it cannot be moved: a parameter or constant,
                one that hooks do not
            see, or a tensor of the loss.
        """
        result = self._named.get(subject)
        if result is None:
            raise UsageError(
                f"saved tensor {subject} cannot be offloaded: {layers_text(self.start, self.stop)} do not "
                "save it, autograd's hooks do not see it, or saving it depends on values"
            )
        return result

    def nbytes(self, subject: Subject) -> int:
        """Return the bytes that move with a saved tensor, or with a version of a layer's weights.

        Raises:
            UsageError: as `storage`.
        """
        return (
            self.version_bytes(subject.layer)
            if subject.what == "versions"
            else self.sizes[self.storage(subject)]
        )

    def version_bytes(self, layer: int) -> int:
        """Return the bytes of a weight version of a layer.

        Those of a shared parameter belong to the stage's first user.
        """
        shared = sum(one.nbytes for one in self._shared_before(layer) if one.gradient_bytes)
        trained = self.costs[layer - self.start].trained_bytes - shared
        return trained + self.copy_bytes(layer) + self.room_bytes(layer)

    def copy_bytes(self, layer: int) -> int:
        """Return the bytes of half-precision weight copies of a layer.

        A shared copy belongs to the first layer that uses it.
        """
        if self.casts:
            return 0
        shared = self.measurement.shared
        again = sum(one.copy_bytes for one in shared if layer in one.copies_again(self.start, self.stop))
        return self.costs[layer - self.start].copy_bytes - again

    def cast_only_bytes(self, layer: int) -> tuple[int, int]:
        """Return the bytes of a layer's `cast_only` parameters, and of their half-precision copies.

        Only parameters that the whole stage reads through copies count. A shared one belongs to the first
        layer that uses it.
        """
        own = [parameter for parameter in self.costs[layer - self.start].parameters if parameter.cast_only]
        whole, copies = sum(one.nbytes for one in own), sum(one.copy_bytes for one in own)
        for shared in self.measurement.shared:
            users = [user for user in shared.users if self.start <= user < self.stop]
            if layer in shared.cast_only and (layer > users[0] or not set(users) <= set(shared.cast_only)):
                whole, copies = whole - shared.nbytes, copies - shared.copy_bytes
        return whole, copies

    def room_bytes(self, layer: int) -> int:
        """Return the bytes of gradients and optimizer state in a version of a layer's weights."""
        if not self.rooms:
            return 0
        cost, shared = self.costs[layer - self.start], list(self._shared_before(layer))
        repeated = sum(one.gradient_bytes + one.state_bytes for one in shared)
        return cost.gradient_bytes + cost.state_bytes - repeated

    def _shared_before(self, layer: int) -> Iterator[SharedParameter]:
        """Yield the parameters that a layer shares with an earlier one of the stage."""
        return (again.shared for again in self.repetitions if again.later == layer - self.start)

    def savers(self, subject: Subject) -> tuple[int, ...]:
        """Return the layers of the model whose backward needs a saved tensor's storage.

        The loss counts as the last.
        """
        number = self.storage(subject)
        return tuple(
            min(self.start + position, self.stop - 1)
            for position, layer in enumerate(self.layers)
            if number in layer.saves
        )

    @cached_property
    def named_in(self) -> dict[int, dict[int, list[Subject]]]:
        """The saved tensors that can be offloaded, by layer and storage."""
        result: dict[int, dict[int, list[Subject]]] = {n: {} for n in range(self.start, self.stop)}
        for subject, number in self._named.items():
            result[subject.layer].setdefault(number, []).append(subject)
        return result

    @cached_property
    def _named(self) -> dict[Subject, int]:
        result: dict[Subject, int] = {}
        fixed = frozenset[int]().union(
            *(layer.lasts for layer in self.layers)
        )  # autograd does not hold these
        for position, layer in enumerate(self.layers[: self.stop - self.start]):
            places = self._saved_places[position]
            for tensor in layer.cost.saved:
                if tensor.origin in places and places[tensor.origin] not in fixed and not tensor.hidden:
                    result[Subject(self.start + position, tensor.index)] = places[tensor.origin]
        return result

    # ---------------------------------------------------------------- gradients

    @property
    def output_gradient_bytes(self) -> int:
        """The bytes that receiving the output gradients allocates; 0 on the last stage, and into buffers."""
        return 0 if self.last or self.buffered else gradient_bytes(self.outputs)

    def last_saver(self, first: int, end: int) -> int:
        """Return the position of `first` to `end - 1` at which a recomputation has saved all tensors.

        `torch.utils.checkpoint` stops there. pipefit's own runtime completes recomputations: `end`.
        """
        if not self.buffered:
            return end
        for position in reversed(range(first, end)):
            cost = self.costs[position]
            if cost.by_value:
                return end
            if any(map(cost.sees, cost.saved)):
                return position
        return first - 1

    def runs_again(self, first: int, end: int) -> bool:
        """Return whether a recomputation of positions `first` to `end - 1` runs them.

        `torch.utils.checkpoint` keeps nothing for layers that save nothing.
        """
        return not self.buffered or any(cost.saved for cost in self.costs[first:end])

    @cached_property
    def sent_gradient_bytes(self) -> int:
        """The bytes of the contiguous gradients that a backward leaves for the previous stage.

        0 on the first stage.
        """
        if not self.start:
            return 0
        whole = {g.storage: self._gradient_sizes[g.storage] for g in self._present(0) if g.contiguous}
        return sum(whole.values()) + self.made_gradient_bytes + self.copied_gradient_bytes

    @cached_property
    def copied_gradient_bytes(self) -> int:
        """The bytes of gradients that the stage passes on unchanged from buffers, and copies to send them."""
        if not self.start or not self._buffers:
            return 0
        shapes = [value.shape for value in self.outputs if value.has_gradient]
        return sum(
            value.nbytes
            for value, gradient in zip(self.inputs, self._gradient_values[0], strict=True)
            if gradient is not None
            and gradient.storage < len(shapes)  # a view of a buffer is sent without a copy
            and shapes[gradient.storage] == value.shape
        )

    @property
    def _buffers(self) -> int:
        """The number of gradient storages that are buffers, which have the lowest numbers."""
        return 0 if self.last or not self.buffered else sum(value.has_gradient for value in self.outputs)

    def buffered_values(self, boundary: int) -> frozenset[int]:
        """Return the values at a boundary with gradients in buffers: layers may pass on those of outputs."""
        gradients = enumerate(self._gradient_values[boundary])
        return frozenset(n for n, one in gradients if one is not None and one.storage < self._buffers)

    @cached_property
    def made_gradient_bytes(self) -> int:
        """The bytes of input gradients that are copied to be sent.

        These are not contiguous, or torch's engine accumulates one gradient in several inputs.
        """
        if not self.start:
            return 0
        present, sizes = self._present(0), self._gradient_sizes
        users = Counter(g.storage for g in present if g.contiguous and g.nbytes == sizes[g.storage])
        again = sum((count - 1) * sizes[storage] for storage, count in users.items())
        return sum(g.nbytes for g in present if not g.contiguous) + again * self.buffered

    def gradients(self, boundary: int) -> int:
        """Return the bytes of the value gradients at a boundary; the first stage's inputs have none."""
        return self._gradient_bytes[boundary]

    @cached_property
    def _gradient_bytes(self) -> list[int]:
        result = [
            sum({g.storage: self._gradient_sizes[g.storage] for g in self._present(boundary)}.values())
            for boundary in range(self.count + 1)
        ]
        return result if self.start else [0, *result[1:]]

    def arrived_gradients(self, boundary: int) -> int:
        """Return the bytes of gradients at a boundary before the backward of the previous position.

        At the model's end there are none, because the backward of the loss makes the gradient that it starts
        from.
        """
        return 0 if self.last and boundary == self.count else self.gradients(boundary)

    def unlike_gradients(self) -> list[tuple[int, int]]:
        """Return boundaries at which the gradient bytes differ from a whole gradient for each value.

        At such a boundary, the gradient of a value is a view of a larger one, or shared with another value.
        Each comes with the last boundary at which that holds, because only a stage with both boundaries meets
        the exception: a stage that ends between them, or at the second, receives whole gradients.
        """
        unlike = [self._unlike(boundary) for boundary in range(self.count + 1)]
        last = {storage: boundary for boundary, storages in enumerate(unlike) for storage in storages}
        return [
            (boundary, last[storage])
            for boundary, storages in enumerate(unlike)
            for storage in sorted(storages)
        ]

    def _unlike(self, boundary: int) -> set[int]:
        """Return the gradient storages at a boundary that do not hold exactly one whole gradient."""
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
        """The gradients of the values at every boundary, and the bytes of their storages.

        Traced from the last layer to the first: a layer may pass on the gradient of an output, or views of
        it. The gradient that the backward of a loss starts from is counted like any other.
        """
        sizes: list[int] = []

        def new(nbytes: int) -> int:
            sizes.append(nbytes)
            return len(sizes) - 1

        leaving, own = self.costs[-1].outputs, self.last or not self.buffered
        values = [
            GradientValue(new(v.nbytes * own), True, v.nbytes) if v.has_gradient else None for v in leaving
        ]
        boundaries = [values]
        for cost in reversed(self.costs):
            made = [new(nbytes) for nbytes in cost.gradient_storages]
            values = [
                _gradient(origin, value.nbytes, made, boundaries[-1])
                for origin, value in zip(cost.input_gradients, cost.inputs, strict=True)
            ]
            boundaries.append(values)
        return boundaries[::-1], sizes

    def _present(self, boundary: int) -> list[GradientValue]:
        """Return the gradients that exist at a boundary."""
        return [value for value in self._gradient_values[boundary] if value is not None]

    # ---------------------------------------------------------------- shared parameters and buffers

    @cached_property
    def repetitions(self) -> tuple[Repetition[SharedParameter], ...]:
        """Parameters that several layers of the stage share: one entry for every two consecutive users."""
        return tuple(self._repeated(self.measurement.shared))

    @cached_property
    def repeated_buffers(self) -> tuple[Repetition[SharedBuffer], ...]:
        """Buffers and plain attributes that several layers share: one entry for every two users."""
        return tuple(self._repeated(self.measurement.shared_buffers))

    def _repeated(self, tensors: Iterable[Shared]) -> Iterator[Repetition[Shared]]:
        for shared in tensors:
            for user, later in shared.pairs:
                if self.start <= user and later < self.stop:
                    yield Repetition(user - self.start, later - self.start, shared)


def gradient_bytes(values: Sequence[Value]) -> int:
    """Return the bytes of the gradients of `values`; a gradient is as large as its value."""
    return sum(value.nbytes for value in values if value.has_gradient)


def _gradient(
    origin: GradientOrigin, nbytes: int, own: Sequence[int], behind: Sequence[GradientValue | None]
) -> GradientValue | None:
    """Return the gradient of an input of `nbytes`, given those of the layer's outputs (`behind`)."""
    if origin.kind == "own":
        return GradientValue(own[origin.index], origin.contiguous, nbytes)
    passed = behind[origin.index] if origin.kind == "output" else None
    return (
        None
        if passed is None
        else GradientValue(passed.storage, passed.contiguous and origin.contiguous, nbytes)
    )


# ---- Residency: the storages of one microbatch in memory, and their holders
#
#     residency, effect = flights.apply(residency, action)
#
# A storage exists as long as it has a holder: a layer that saved it for its backward; the forward that will
# read it next; a message that sends it; a run of layers that keeps its inputs for recomputation. Actions add
# and remove holders: a storage is allocated with its first holder and freed with its last. This depends on
# the microbatch's history, not on its number, so all microbatches of a stage pass through the same few
# residencies, which cache the answer for each action.
#
# A recomputation makes new storages, and those of the first forward may still exist: the output of a
# recomputed run may wait for the next layer meanwhile. Therefore *instances* of storages are held. In a stage
# of n storages, instance s is storage s of the first forward, and n + s that of the recomputation. Instance
# 2n + s is what the backward of a layer gets back of a storage that moved within its forward.
#
# Holders that each action adds and removes:
#
#     LOAD, RECV_F          holds the inputs (and targets) for the first forward; the first of several
# receives does
#     F[a:b]                every layer holds its saved tensors, and drops the values that it read
#     N[a:b]                holds the inputs and copies of buffers that feed back, for recomputation, and
# saves nothing; on torch's engine, layers hold tensors that autograd's hooks do not see
#     R[a:b]                runs forward from those, and from copies of the other buffers; saves, and drops
# its outputs
#     B[a:b]                every layer, from the last to the first, drops its saved tensors; then copies are
# dropped
#     WAIT_SEND_F, _B       drops the outputs or gradients that were sent; the last of several does
#     WAIT_OFFLOAD, RELOAD  frees or allocates bytes; the holders stay

# An action's kind, whether it is a WAIT, its rows (None: all), and the device that it names
Done = tuple[Kind, bool, Rows | None, Place | None]

_PART = 8  # a full copy is kept once at least one of this many instances has changed


class Piece(NamedTuple):
    """Positions `first` to `end - 1`, whose forward was one action, and the instances of its inputs."""

    first: int
    end: int
    keeps_inputs: bool  # its forward was an N: it must be recomputed before its backward
    inputs: tuple[int, ...]
    again: bool = False  # it has been recomputed
    copies: tuple[int, ...] = ()  # of the inputs, on which the recomputation worked
    moved: frozenset[int] = frozenset()  # storages that its layers move to the host within the pass


class Whereabouts(StrEnum):
    """The location of a storage between its forward and its backward, as errors name it."""

    HERE = "on the device"
    LEAVING = "on its way out"
    AWAY = "away"
    RETURNING = "on its way back"


class MovedStorage(NamedTuple):
    """A storage that is moved: its state, and the other place."""

    state: Whereabouts
    place: Place | None


class Instances:
    """The existing instances, on the device or away, with their holders (`Holders`).

    Usually only the changes of an action and the previous `Instances` are kept, so that a stage with a
    thousand actions per microbatch needs memory for the changes, not for full copies.
    """

    __slots__ = ("_before", "_changes", "_count", "_since", "_whole")

    def __init__(self) -> None:
        self._before: Instances | None = None
        self._changes: dict[int, int] = {}  # 0 if nothing holds an instance any more
        self._since = 0  # changes since the last full copy
        self._whole: dict[int, int] | None = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def after(self, now: dict[int, int], touched: Iterable[int]) -> Instances:
        """Return the instances held `now`, which differ at most in the `touched` ones."""
        result, changes = Instances(), {instance: now.get(instance, 0) for instance in touched}
        result._count, result._since, result._whole = len(now), self._since + len(changes), None
        if result._since * _PART >= result._count:
            result._since, result._whole = 0, now
        else:
            result._before, result._changes = self, changes
        return result

    def mapping(self) -> dict[int, int]:
        """Return all instances with their holders, as a new dictionary."""
        later, instances = list[dict[int, int]](), self
        while instances._whole is None:
            assert instances._before is not None
            later.append(instances._changes)
            instances = instances._before
        result = dict(instances._whole)
        for changes in reversed(later):
            for instance, holders in changes.items():
                if holders:
                    result[instance] = holders
                else:
                    result.pop(instance, None)
        return result


class Residency:
    """One microbatch in one stage at one moment.

    Residencies are compared by identity: `Flights` makes each only once for a stage.

    `held` has the instances that exist. `at` is the boundary that the forward has reached, and `values` the
    instances there; `back` is the boundary that the backward has reached, None before it begins. `done` has
    the loads, sends, receives and their joins so far. `away` has the instances that are moved, until they are
    back.
    """

    __slots__ = ("at", "away", "back", "categories", "done", "held", "known", "pieces", "values")

    def __init__(
        self,
        *,
        held: Instances,
        at: int,
        values: tuple[int, ...],
        pieces: tuple[Piece, ...],
        back: int | None,
        done: frozenset[Done],
        away: dict[int, MovedStorage],
        categories: tuple[int, int],
    ) -> None:
        self.held, self.at, self.values, self.pieces = held, at, values, pieces
        self.back, self.done, self.away = back, done, away
        self.categories = categories  # bytes of the activations and of the boundary buffers on the device
        self.known: dict[object, tuple[Residency, Effect | None]] = {}  # cached answers for actions

    def key(self) -> object:
        """Return a key that is equal for residencies with equal fields. `held` follows from the other
        fields.
        """
        return self.at, self.values, self.pieces, self.back, self.done, frozenset(self.away.items())

    def rows(self, kind: Kind, *, wait: bool, samples: int) -> int:
        """Return the rows that actions of this kind, or their WAITs, have carried so far.

        An action without rows carries all `samples`.
        """
        parts = [part for done, waited, part, _ in self.done if done is kind and waited is wait]
        return sum(samples if part is None else part[1] - part[0] for part in parts)

    def changed(self, **fields: object) -> Residency:
        """Return another residency, with some fields changed."""
        names = ("held", "at", "values", "pieces", "back", "done", "away", "categories")
        return Residency(
            **{name: fields.get(name, getattr(self, name)) for name in names}  # type: ignore[arg-type]
        )


def begin() -> Residency:
    """Return the residency of a microbatch that has not reached the stage yet."""
    return Residency(
        held=Instances(), at=0, values=(), pieces=(), back=None, done=frozenset(), away={}, categories=(0, 0)
    )


class Holders:
    """The possible holders of an instance, each as one bit of an integer."""

    def __init__(self, storages: StageStorages) -> None:
        self._count = storages.count
        self.value = 1 << self._count  # the forward that reads it next
        self.sending = 1 << self._count + 1
        self.target = 1 << self._count + 2
        self.activations = ~(self.value | self.sending | self.target)  # saved, or kept for recomputation

    def saved(self, position: int) -> int:
        """Return the bit of the layer at a position that saved the instance."""
        return 1 << position

    def kept(self, position: int) -> int:
        """Return the bit of the run that begins at a position and keeps its inputs."""
        return 1 << self._count + 3 + position


# ---- Messages between stages


class Sent(NamedTuple):
    """The number of times that a device sends every row forward, and its gradients backward.

    Each of several tensor-parallel ranks serves some ranks at the other end: none if the other end has fewer,
    and then its outputs are freed at once; or several if it has more. With `late`, the last stage's outputs
    stay until the next microbatch's layers have gone forward, as under 1F1B on torch's engine.
    """

    forward: int = 1
    backward: int = 1
    late: bool = False

    @staticmethod
    def of(plan: Plan, stage: int, shard: int, *, buffered: bool = False) -> Sent:
        """Return the counts of the devices of a stage that hold this shard; `buffered` on torch's engine."""
        own, last = plan.stages[stage].grid.tensor, len(plan.stages) - 1
        ahead, behind = (
            plan.stages[other].grid.tensor for other in (max(stage - 1, 0), min(stage + 1, last))
        )
        late = buffered and stage == last and drops_early(plan)
        return Sent(len(range(shard, behind, own)), len(range(shard, ahead, own)), late)


def message_sizes(
    plan: Plan, placement: Placement, storages: Sequence[StageStorages]
) -> Callable[[Message], int]:
    """Return a function from a message to its bytes.

    They are those of all that a stage sends, or of the rows that one replica gets.

    Args:
        plan: the plan.
        placement: the devices of every stage.
        storages: the storages of every stage.
    """
    division = cache(plan.division)

    def nbytes(message: Message) -> int:
        receiver, part = storages[message.receiver], message.part
        values = receiver.inputs if message.forward else receiver.outputs
        behind = message.receiver + (not message.forward)
        ends = (message.source, message.target) if message.forward else (message.target, message.source)
        stages, grids = plan.stages[behind - 1 : behind + 1], placement[behind - 1 : behind + 1]
        front, back = (
            devices.index(device) // stage.grid.tensor
            for stage, devices, device in zip(stages, grids, ends, strict=True)
        )
        rows = receiver.samples if part is None else part[1] - part[0]
        return sum(
            values[number].nbytes * (receiver.samples if dimension is None else rows) // receiver.samples
            for number, dimension in division(behind).carried(front, back)
            if message.forward or values[number].has_gradient
        )

    return nbytes
