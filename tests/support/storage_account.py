"""Account of memory, storage by storage: slow, obvious, without code shared with `pipefit.memory`.

It walks a program action by action and every compute action layer by layer, as the runtime does, and tracks
the live storages and their holders. A storage lives while it has a holder and is not offloaded. The level of
a device is the bytes of the storages that live on it, so there are no sums to get wrong.

Holders:

    inputs       received or loaded values, until the forward takes them            boundary buffers
    values       outputs of the previous layer, until the next layer has returned   boundary buffers
    send         outputs of a stage, until WAIT_SEND                                boundary buffers
    gradients    gradients of the values at the next layer of the backward          boundary buffers
    graph        tensors that a layer saved, until its backward                     activations
    kept         the inputs of a forward, until its recomputation                   activations
    newest       the weights that updates change                                    parameters
    gathered     a replica's sharded weights from UNSHARD to RESHARD                parameters
    current      the weights that forwards use, if they are not the newest          weight versions
    uses         older weights, until the backward of a microbatch that needs them  weight versions
    copies       copies of the buffers of a recomputed forward, until its backward;
                 copies of buffers that feed back exist from the first forward on   activations

It covers the simulator and planned features: pieces of a stage in F, N, R and B, offloaded tensors, several
stages on a device, replicas that shard the state of a stage. It assumes that a program is valid, and only
asserts that offloaded storages are not used.

Assumptions on effects between layers that a profile leaves open:

- A released input of a layer frees its storage when it has no other holder, and when the layer has released
  everything that it saved in that storage.
- A gradient of a parameter that several layers of a stage use waits for that of its first user, from the
  beginning of the last user's backward on. Each earlier user adds its gradient to the waiting one, into a
  third.
- A shared parameter is updated with the first layer of a stage that has it; later layers grow by that much
  less. A layer that trains no other parameters is not updated.
- A layer whose gradients all wait for those of earlier layers goes backward as in the step's first backward.
- If a device is equally full at several moments, the first one gives the kernel's workspace.
- Replicas that shard state assign layers with a common parameter together to the replica with the least
  state, the largest first. An update of all layers changes those that a replica owns.
- A weight that all layers of a stage read only through half-precision copies is gathered as the copy. Copies
  of sharded weights exist only while they are gathered, on the owner too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from pipefit.lowering import lower
from pipefit.schema.actions import Action, Kind, Subject
from pipefit.schema.grids import Grid
from pipefit.schema.layer_costs import LayerCost, Origin, Parameter, SharedParameter, Span, Value
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Measurement
from pipefit.schema.program import Program
from pipefit.schema.trace import Category

FOREVER = "forever"
_HOLDS_ACTIVATIONS = frozenset({"graph", "kept", "copies"})
_OF_THE_STAGE = {
    "parameters": Category.PARAMETERS,
    "gathered": Category.PARAMETERS,
    "newest": Category.PARAMETERS,
    "current": Category.VERSIONS,
    "uses": Category.VERSIONS,
    "parameter gradients": Category.GRADIENTS,
    "optimizer": Category.OPTIMIZER,
}

Levels = dict[Category, int]


class Sample(NamedTuple):
    """One action of a device: peak bytes, a kernel's workspace in them, and the bytes before and after the
    action.
    """

    step: int
    action: Action
    peak_bytes: int
    workspace_bytes: int
    before: Levels
    after: Levels


class Storage:
    """Bytes that live while they have a holder. Compared by identity."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.layer: int | None = None  # of weights and gradients
        self.copy = False  # of weights in half precision, which stays where parameters are away
        self.holders: set[object] = set()
        self.away = False

    @property
    def category(self) -> Category:
        """Purpose of the bytes, derived from their holders."""
        kinds = {str(holder[0] if isinstance(holder, tuple) else holder) for holder in self.holders}
        of_stage = [category for kind, category in _OF_THE_STAGE.items() if kind in kinds]
        if of_stage:
            return of_stage[0]
        return Category.ACTIVATIONS if kinds & _HOLDS_ACTIVATIONS else Category.BOUNDARY


class Gradient(NamedTuple):
    """Gradient of a value: its storage, and whether it is contiguous."""

    storage: Storage
    contiguous: bool


class Device:
    """The storages of one device, and the highest level that they reached."""

    def __init__(self) -> None:
        self._storages: set[Storage] = set()
        self.peak = self.workspace = 0

    @property
    def level(self) -> int:
        """Bytes that live now."""
        return sum(storage.nbytes for storage in self._living())

    @property
    def levels(self) -> Levels:
        """Live bytes by category; empty categories are left out."""
        found: Levels = {}
        for storage in self._living():
            found[storage.category] = found.get(storage.category, 0) + storage.nbytes
        return {category: nbytes for category, nbytes in found.items() if nbytes}

    def new(self, nbytes: int, holder: object) -> Storage:
        """Create a storage that `holder` holds."""
        storage = Storage(nbytes)
        self.hold(holder, [storage])
        return storage

    def hold(self, holder: object, storages: Iterable[Storage | None]) -> None:
        """Add storages to `holder`. None stands for storage that always exists, such as a parameter."""
        for storage in storages:
            if storage is not None:
                storage.holders.add(holder)
                self._storages.add(storage)
        self.reach(0)

    def release(self, holder: object) -> None:
        """Remove `holder` and everything it holds."""
        for storage in self._storages:
            storage.holders.discard(holder)
        self._storages = {storage for storage in self._storages if storage.holders}

    def let_go(self, holder: object, storage: Storage) -> None:
        """Remove one storage from `holder`."""
        storage.holders.discard(holder)
        self._storages = {one for one in self._storages if one.holders}

    def reach(self, above: int, workspace: int = 0) -> None:
        """Record a momentary peak of additional bytes, `workspace` of them for a kernel."""
        if self.level + above > self.peak:
            self.peak, self.workspace = self.level + above, workspace

    def held_by(self, holder: object) -> set[Storage]:
        """Return the storages that `holder` holds."""
        return {storage for storage in self._storages if holder in storage.holders}

    def _living(self) -> list[Storage]:
        return [storage for storage in self._storages if storage.holders and not storage.away]


class Flight:
    """One microbatch in a stage."""

    def __init__(self) -> None:
        self.inputs: list[Storage | None] = []
        self.targets: list[Storage | None] = []
        self.values: list[Storage | None] = []  # at the next layer forward
        self.gradients: list[Gradient | None] = []  # of the values at the next layer backward
        self.kept: dict[
            int, tuple[list[Storage | None], list[Storage | None]]
        ] = {}  # by the first layer of an N
        self.saved: dict[int, list[Storage | None]] = {}  # by layer, in the order of its saved tensors
        self.entered: dict[int, list[Storage | None]] = {}  # what every layer was given
        self.copied: set[int] = set()  # the first layers of runs that work on copies of their buffers
        self.waiting: set[str] = set()  # shared parameters whose gradient waits for an earlier layer's


class StageAccount:
    """Layers `start` to `stop - 1` of a model on `device`, with index `number` in the pipeline. `program`
    defines bundles.
    """

    def __init__(
        self,
        device: Device,
        measurement: Measurement,
        start: int,
        stop: int,
        *,
        microbatches: int,
        number: int = 0,
        program: Program | None = None,
        everything: bool = False,
        grid: Grid | None = None,
        replica: int = 0,
    ) -> None:
        self.program, self.everything = program, everything
        self.shard, self.owned = "none" if grid is None else grid.shard, range(len(measurement.layers) + 1)
        self.gathered: set[int] = set()
        self.device, self.start, self.stop, self.number = device, start, stop, number
        self.last = stop == len(measurement.layers)
        self.costs = dict(enumerate(measurement.costs))
        self.loss = len(measurement.layers)  # the loss is the layer after the last
        self.costs[self.loss] = measurement.loss
        self.layers = range(start, stop + self.last)
        self.shared = [s for s in measurement.shared if len(self._users(s)) > 0]
        self.buffers = measurement.shared_buffers
        self.outputs = self.costs[stop - 1].outputs
        self.targets = measurement.loss.inputs[len(self.outputs) :] if self.last else ()
        self.flights: dict[int, Flight] = {}
        self.born: set[int] = set()  # layers with gradients
        self.stepped: set[int] = set()  # layers with optimizer state
        if grid is not None and grid.shard != "none":
            self.owned = {self.loss, *self._dealt_out(grid.data)[replica]}
        self._exist_before_training(microbatches)

    def _dealt_out(self, replicas: int) -> list[list[int]]:
        """Assign layers to the replicas that own them."""
        groups = [{layer} for layer in range(self.start, self.stop)]
        for shared in self.shared:
            users = set(self._users(shared))
            groups = [*(g for g in groups if not g & users), set().union(*(g for g in groups if g & users))]
        counted = (
            ["state"]
            + ["gradient"] * (self.shard != "optimizer")
            + ["parameter"] * (self.shard == "parameters")
        )
        sizes = {
            min(group): sum(self._alone(layer, what) for layer in group for what in counted)
            for group in groups
        }
        found: list[list[int]] = [[] for _ in range(replicas)]
        owned = [0] * replicas
        for group in sorted(groups, key=lambda group: (-sizes[min(group)], min(group))):
            least = owned.index(min(owned))
            found[least] += group
            owned[least] += sizes[min(group)]
        return found

    def _alone(self, layer: int, what: str) -> int:
        """Return bytes of state, gradients or parameters of a layer; shared parameters count for their first
        user.
        """
        later = self._earlier(layer)
        shared = "nbytes" if what == "parameter" else f"{what}_bytes"
        whole: int = getattr(self.costs[layer], f"{what}_bytes")
        return whole - sum(getattr(s, shared) for s in later)

    def _exist_before_training(self, microbatches: int) -> None:
        """Allocate parameters once each, buffers, constants, early state, and the losses on the last
        stage.
        """
        device, trained = self.device, dict[int, int]()
        for layer in self.layers:
            cost, shared = self.costs[layer], self._shared_by(layer)
            changing = sum(p.nbytes for p in cost.parameters if p.trainable)
            changing -= sum(s.nbytes for s in shared if s.gradient_bytes)
            trained[layer] = changing + sum(
                s.nbytes for s in shared if s.gradient_bytes and self._users(s)[0] == layer
            )
            own = sum(p.nbytes for p in cost.parameters) - sum(s.nbytes for s in shared) - changing
            held = (
                cost.buffer_bytes
                + cost.constant_bytes
                - sum(b.nbytes for b in self.buffers if layer in b.users)
            )
            device.new(own * self._keeps(layer) + held, self._of("parameters"))
            early = cost.early_state_bytes - sum(s.early_state_bytes for s in shared)
            device.new(early * (layer in self.owned), self._of("optimizer"))
        for parameter in self.shared:
            first = self._users(parameter)[0]
            frozen = 0 if parameter.gradient_bytes else parameter.nbytes
            device.new(frozen * self._keeps(first), self._of("parameters"))
            device.new(parameter.early_state_bytes * (first in self.owned), self._of("optimizer"))
        for buffer in self.buffers:
            device.new(
                buffer.nbytes * any(layer in buffer.users for layer in self.layers), self._of("parameters")
            )
        device.new(4 * microbatches if self.last else 0, FOREVER)
        self.trained = trained
        self._new_weights(self.layers)
        device.hold(self._of("current"), device.held_by(self._of("newest")))

    def _new_weights(self, layers: range) -> None:
        """Create a version of the weights of these layers; shared parameters belong to their first user."""
        for layer in layers:
            self.device.new(self.trained[layer] * self._keeps(layer), self._of("newest")).layer = layer
            here = self._copies(layer) * (self.shard != "parameters")
            copies = self.device.new(here, self._of("newest"))
            copies.layer, copies.copy = layer, True

    def _keeps(self, layer: int) -> bool:
        """Return whether the device holds the parameters of a layer throughout."""
        return self.shard != "parameters" or layer in self.owned

    def _gather(self, layers: Sequence[int]) -> None:
        """Gather copies of weights, and parameters of layers owned elsewhere unless they are read only as
        copies.
        """
        self.gathered.update(layers)
        for layer in layers if self.shard == "parameters" else ():
            self.device.new(self._copies(layer), (*self._of("gathered"), layer))
            read = [p for p in self.costs[layer].parameters if not self._is_read_as_copy(layer, p)]
            later = {s.name for s in self._earlier(layer)}
            come = 0 if layer in self.owned else sum(p.nbytes for p in read if p.name not in later)
            self.device.new(come, (*self._of("gathered"), layer))

    def _is_read_as_copy(self, layer: int, parameter: Parameter) -> bool:
        """Return whether all layers of the stage read the parameters only through their copy."""
        shared = [s for s in self._shared_by(layer) if s.name == parameter.name]
        return parameter.cast_only and all(user in s.cast_only for s in shared for user in self._users(s))

    def _copies(self, layer: int) -> int:
        """Return half-precision copies of a layer's weights; a shared copy belongs to the first layer that
        has one.
        """
        first = {s.name: min(set(s.copying) & set(self.layers), default=None) for s in self.shared}
        later = [s.name for s in self.shared if layer in s.copying and first[s.name] != layer]
        return sum(p.copy_bytes for p in self.costs[layer].parameters if p.name not in later)

    def act(self, action: Action) -> None:
        """Apply the allocations and frees of an action."""
        flight = self.flights.setdefault(-1 if action.microbatch is None else action.microbatch, Flight())
        if action.wait:
            self._join(flight, action)
        else:
            self._start(flight, action)

    def _join(self, flight: Flight, action: Action) -> None:
        """Free sent tensors and mark offloaded ones as away; received and reloaded tensors arrived at the
        start.
        """
        if action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            self.device.release((action.kind, id(flight)))
        elif action.kind is Kind.REDUCE and self.shard in ("gradients", "parameters"):
            self._free_gradients([layer for layer in self._run_of(action) if layer not in self.owned])
        elif action.kind is Kind.STASH:
            self.device.release(self._of("current"))
            self.device.hold(self._of("current"), self.device.held_by(self._of("newest")))
        elif action.kind is Kind.OFFLOAD:
            for storage in self._tensors(flight, action):
                readers = {holder[0] for holder in storage.holders if isinstance(holder, tuple)}
                assert not readers & {"values", "targets", Kind.SEND_FORWARD}, "it is read or sent yet"
                assert action.microbatch is None or not readers & {"newest"}, "updates use it yet"
                storage.away = True

    def _start(self, flight: Flight, action: Action) -> None:
        match action.kind:
            case Kind.LOAD:
                self._load(flight)
            case Kind.RECV_FORWARD:
                flight.inputs = self._arriving(flight, self.costs[self.start].inputs)
            case Kind.RECV_BACKWARD:
                flight.gradients = self._new_gradients(flight, self.outputs)
            case Kind.RELOAD:
                for storage in self._tensors(flight, action):
                    storage.away = False
                self.device.reach(0)
            case Kind.UNSHARD | Kind.RESHARD | Kind.STASH | Kind.STEP:
                self._change_state(action)
            case Kind.FORWARD | Kind.FORWARD_ONLY | Kind.RECOMPUTE | Kind.BACKWARD:
                self._compute(flight, action)

    def _change_state(self, action: Action) -> None:
        layers = self._run_of(action)
        match action.kind:
            case Kind.UNSHARD:
                self._gather([layer for layer in layers if layer != self.loss])
            case Kind.RESHARD:
                self.gathered.difference_update(layers)
                for layer in layers:
                    self.device.release((*self._of("gathered"), layer))
            case Kind.STASH:
                self._keep_weights(layers)
            case Kind.STEP:
                for weights in self._newest(layers):
                    assert weights.holders <= {self._of("newest"), self._of("current")}, (
                        "a microbatch needs them"
                    )
                    assert not weights.away, "weights that are updated are away"
                self._step(layers)

    def put_away(self, subjects: Iterable[Subject]) -> None:
        """Mark offloaded parameters as away before the first step."""
        for subject in subjects:
            assert subject.what == "parameters"
            for weights in self._parameters(subject):
                weights.away = True

    def _run_of(self, action: Action) -> range:
        """Return the layers of an update, including the loss after the model's last layer."""
        first, end = action.layers or (self.start, self.stop)
        return range(first, end + (self.last and end == self.stop))

    def _newest(self, layers: range) -> list[Storage]:
        """Return the newest weights of these layers."""
        return [weights for weights in self.device.held_by(self._of("newest")) if weights.layer in layers]

    def _parameters(self, subject: Subject) -> list[Storage]:
        """Return the newest weights of one layer, without half-precision copies, as they move between
        updates.
        """
        return [one for one in self._newest(range(subject.layer, subject.layer + 1)) if not one.copy]

    def _keep_weights(self, layers: range) -> None:
        """Turn the newest weights into an older version, with room for gradients and state, and create their
        copy as the newest.
        """
        for old in self._newest(layers):
            assert not old.away, "weights that are copied are away"
            old.nbytes += 0 if old.copy else self._room(old.layer)
            self.device.let_go(self._of("newest"), old)
        self._new_weights(layers)

    def _compute(self, flight: Flight, action: Action) -> None:
        """Run a stage or a piece of it; the loss belongs to the piece that ends the model."""
        first, end = action.layers or (self.start, self.stop)
        needed = {self._users(s)[0] for layer in range(first, end) for s in self._shared_by(layer)} | {
            *range(first, end)
        }
        assert self.shard != "parameters" or needed <= self.gathered, "parameters are not gathered"
        run = {
            Kind.FORWARD: self._forward,
            Kind.FORWARD_ONLY: self._forward_only,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
        }
        if first == self.start and action.kind in (Kind.FORWARD, Kind.FORWARD_ONLY):
            self.device.hold(("uses", id(flight)), self.device.held_by(self._of("current")))
        for weights in self.device.held_by(("uses", id(flight))):
            assert not (weights.away and first <= weights.layer < end), "weights that it needs are away"
        run[action.kind](flight, range(first, end + (self.last and end == self.stop)))
        if (
            action.kind is Kind.BACKWARD
        ):  # each layer's weights go with the last microbatch that goes backward through it
            for weights in self.device.held_by(("uses", id(flight))):
                if first <= weights.layer < end or weights.layer >= self.stop:
                    self.device.let_go(("uses", id(flight)), weights)

    # ---------------------------------------------------------------- data and messages

    def _load(self, flight: Flight) -> None:
        if self.start == 0:
            flight.inputs = self._arriving(flight, self.costs[0].inputs)
        flight.targets = self._arriving(flight, self.targets)

    def _arriving(self, flight: Flight, values: Sequence[Value]) -> list[Storage | None]:
        return [self.device.new(value.nbytes, ("inputs", id(flight))) for value in values]

    def _new_gradients(self, flight: Flight, values: Sequence[Value]) -> list[Gradient | None]:
        return [
            Gradient(self.device.new(v.nbytes, ("gradients", id(flight))), True) if v.has_gradient else None
            for v in values
        ]

    def _tensors(self, flight: Flight, action: Action) -> list[Storage]:
        """Return the storages that a transfer moves: a saved tensor, a version of weights, or a bundle."""
        subjects = self.program.moved(action)
        if any(subject.what == "parameters" for subject in subjects):
            return [weights for subject in subjects for weights in self._parameters(subject)]
        if any(subject.what == "versions" for subject in subjects):
            layers, used = {subject.layer for subject in subjects}, self.device.held_by(("uses", id(flight)))
            return [weights for weights in used if weights.layer in layers]
        return [self._tensor(flight, subject) for subject in subjects]

    def _tensor(self, flight: Flight, subject: Subject) -> Storage:
        assert isinstance(subject.what, int)
        numbers = [tensor.index for tensor in self.costs[subject.layer].saved]
        found = flight.saved[subject.layer][numbers.index(subject.what)]
        return found or Storage(0)  # a parameter from further back takes no additional bytes

    # ---------------------------------------------------------------- forward

    def _begin(self, flight: Flight, layers: range) -> None:
        """Return a piece's input values; their holder releases them."""
        if layers.start == self.start:
            flight.values = flight.inputs
            self._hold_values(flight, flight.values)
            flight.inputs = []
        if self.loss in layers:
            self.device.hold(("targets", id(flight)), flight.targets)
        waiting = {*flight.inputs, *(() if self.loss in layers else flight.targets)}
        self.device.release(("inputs", id(flight)))
        self.device.hold(("inputs", id(flight)), waiting)

    def _hold_values(self, flight: Flight, values: Sequence[Storage | None]) -> None:
        holder = ("values", id(flight))
        gone = self.device.held_by(holder) - set(values)
        self.device.hold(holder, values)
        for storage in gone:
            storage.holders.discard(holder)

    def _forward(self, flight: Flight, layers: range) -> None:
        self._begin(flight, layers)
        flight.values = self._run(flight, layers, flight.values, flight.targets)
        self._end(flight, layers)

    def _run(
        self,
        flight: Flight,
        layers: range,
        values: list[Storage | None],
        targets: list[Storage | None],
        *,
        saving: bool = True,
    ) -> list[Storage | None]:
        """Run layers forward from `values`, which "values" holds; afterwards it holds the outputs of the last
        layer.
        """
        for layer in layers:
            cost = self.costs[layer]
            given = values + (targets if layer == self.loss else [])
            if saving:
                self.device.reach(cost.forward_peak_bytes, cost.forward_workspace_bytes)
            else:
                self.device.reach(cost.checkpoint_peak_bytes, cost.checkpoint_workspace_bytes)
            needed = (
                range(len(cost.storages))
                if saving
                else [o.index for o in cost.output_origins if o.kind == "own"]
            )
            making = ("making", id(flight))
            own = {k: self.device.new(cost.storages[k], making) for k in sorted(set(needed))}
            if saving:
                flight.saved[layer] = [_found(tensor.origin, own, given) for tensor in cost.saved]
                flight.entered[layer] = given
                self.device.hold(("graph", id(flight), layer), flight.saved[layer])
            values = [_found(origin, own, given) for origin in cost.output_origins]
            self._hold_values(flight, values)
            self.device.release(making)
        return values

    def _end(self, flight: Flight, layers: range) -> None:
        """Move the last layer's outputs to the send buffer; record a loss."""
        if layers.stop - self.last == self.stop:
            if not self.last:
                self.device.hold((Kind.SEND_FORWARD, id(flight)), flight.values)
            self.device.release(("values", id(flight)))
            self.device.release(("targets", id(flight)))
            flight.values, flight.targets = [], []

    def _forward_only(self, flight: Flight, layers: range) -> None:
        """Keep inputs, targets and copies of buffers that feed back; a first layer that works in place gets a
        copy of each input.
        """
        self._begin(flight, layers)
        targets = flight.targets if self.loss in layers else []
        flight.kept[layers.start] = flight.values, targets
        self.device.hold(("kept", id(flight), layers.start), [*flight.values, *targets])
        self.device.new(
            sum(self.costs[n].fed_back_bytes for n in layers), ("copies", id(flight), layers.start)
        )
        flight.copied.add(layers.start)
        values = flight.values
        if self.costs[layers.start].mutates_inputs:
            given = self.costs[layers.start].inputs
            values = [self.device.new(v.nbytes, ("values", id(flight))) for v in given]
            self._hold_values(flight, values)
        flight.values = self._run(flight, layers, values, targets, saving=False)
        self._end(flight, layers)

    def _recompute(self, flight: Flight, layers: range) -> None:
        """Recompute the same layers from the kept inputs, on copies of the other buffers; drop their
        outputs.
        """
        holder = ("kept", id(flight), layers.start)
        values, targets = flight.kept.pop(layers.start)
        self._copy_buffers(layers, ("copies", id(flight), layers.start))
        again = ("values", id(flight))
        self.device.hold(again, values)
        self.device.hold(("targets", id(flight)), targets)
        self.device.release(holder)
        self._run(flight, layers, values, targets)
        self.device.release(again)
        self.device.release(("targets", id(flight)))

    def _copy_buffers(self, layers: range, holder: object) -> None:
        """Copy every buffer that does not feed back, once even if several layers hold it."""
        shared = [b for b in self.buffers if b.copied]
        for layer in layers:
            mine = self.costs[layer].buffer_bytes - self.costs[layer].fed_back_bytes
            own = mine - sum(b.nbytes for b in shared if layer in b.users)
            self.device.new(own, holder)
        for buffer in shared:
            self.device.new(buffer.nbytes * any(layer in buffer.users for layer in layers), holder)

    # ---------------------------------------------------------------- backward

    def _backward(self, flight: Flight, layers: range) -> None:
        if self.loss in layers:
            flight.gradients = self._new_gradients(flight, self.costs[self.loss].outputs)
        for layer in reversed(layers):
            self._backward_of(flight, layer)
        self.device.release(("lasting", id(flight)))
        if layers.start == self.start:
            self._send_gradients(flight)
        for start in {start for start in flight.copied if start >= layers.start}:
            flight.copied.remove(start)
            self.device.release(("copies", id(flight), start))

    def _backward_of(self, flight: Flight, layer: int) -> None:
        cost, device = self.costs[layer], self.device
        adding = [s for s in self._shared_by(layer) if s.name in flight.waiting]
        for parameter in adding:
            device.new(parameter.gradient_bytes, "adding")
        assert not any(s is not None and s.away for s in flight.saved[layer]), "what a backward needs is away"
        lasting = [
            s
            for s in self._shared_by(layer)
            if len(self._users(s)) > 1 and s not in adding and layer in self.born
        ]
        all_wait = bool(lasting) and sum(s.gradient_bytes for s in lasting) == cost.gradient_bytes > 0
        for parameter in lasting if not all_wait else ():
            device.new(parameter.gradient_bytes, "adding")
        added_to = layer in self.born and not all_wait
        usual, inner = (
            (cost.backward_later, cost.inner_later) if added_to else (cost.backward_first, cost.inner_first)
        )
        for span in inner if inner and layer + 1 in self.layers else usual:
            device.reach(span.peak_bytes - self._released(flight, layer, span), span.workspace_bytes)
        device.release("adding")
        saved = zip(flight.saved[layer], cost.saved, strict=True)
        device.hold(("lasting", id(flight)), [storage for storage, tensor in saved if tensor.lasting])
        device.release(("graph", id(flight), layer))
        del flight.saved[layer], flight.entered[layer]
        self._pass_gradients(flight, cost)
        self._parameter_gradients(flight, layer)

    def _released(self, flight: Flight, layer: int, span: Span) -> int:
        """Return storages that a layer frees in a span: inputs that it saved and released, without other
        holders.
        """
        mine, given = ("graph", id(flight), layer), flight.entered[layer]
        saved = {t.origin.index for t in self.costs[layer].saved if t.origin.kind == "input"}
        needed = {given[k] for k in saved - set(span.released)}
        own = {
            s
            for s, t in zip(flight.saved[layer], self.costs[layer].saved, strict=True)
            if t.origin.kind == "own"
        }
        gone = {given[k] for k in saved & set(span.released)} - needed - own
        return sum(storage.nbytes for storage in gone if storage is not None and storage.holders == {mine})

    def _pass_gradients(self, flight: Flight, cost: LayerCost) -> None:
        """Turn the gradients of a layer's outputs into the gradients of its inputs."""
        behind, holder = flight.gradients, ("gradients", id(flight))
        passing = ("passing", id(flight))
        own = [self.device.new(nbytes, passing) for nbytes in cost.gradient_storages]
        found: list[Gradient | None] = []
        for origin in cost.input_gradients:
            source = behind[origin.index] if origin.kind == "output" else None
            if origin.kind == "own":
                found.append(Gradient(own[origin.index], origin.contiguous))
            else:
                found.append(source and Gradient(source.storage, source.contiguous and origin.contiguous))
        self.device.release(holder)
        flight.gradients = found
        self.device.hold(holder, [gradient and gradient.storage for gradient in found])
        self.device.release(passing)

    def _parameter_gradients(self, flight: Flight, layer: int) -> None:
        """Create gradients in the step's first backward, add to them in later ones; shared ones may have to
        wait.
        """
        shared = [s for s in self._shared_by(layer) if len(self._users(s)) > 1]
        if layer not in self.born:
            own = self.costs[layer].gradient_bytes - sum(s.gradient_bytes for s in shared)
            self.device.new(own, self._of("parameter gradients")).layer = layer
        for parameter in shared:
            waiting = ("parameter gradients", id(flight), parameter.name)
            self.device.release(waiting)
            flight.waiting.discard(parameter.name)
            if layer != self._users(parameter)[0]:
                self.device.new(parameter.gradient_bytes, waiting)
                flight.waiting.add(parameter.name)
            elif layer not in self.born:
                self.device.new(parameter.gradient_bytes, self._of("parameter gradients")).layer = layer
        self.born.add(layer)

    def _send_gradients(self, flight: Flight) -> None:
        """Send each input's gradient as one contiguous tensor."""
        sending = (Kind.SEND_BACKWARD, id(flight))
        if self.start:
            for given, gradient in zip(self.costs[self.start].inputs, flight.gradients, strict=True):
                if gradient is not None and gradient.contiguous:
                    self.device.hold(sending, [gradient.storage])
                elif given.has_gradient:
                    self.device.new(given.nbytes, sending)
        self.device.release(("gradients", id(flight)))

    # ---------------------------------------------------------------- the optimizer

    def _step(self, layers: range) -> None:
        """Update one layer after the other, then free their gradients."""
        updated: set[str] = set()
        for layer in (layer for layer in layers if layer in self.owned):
            cost = self.costs[layer]
            mine = [p.name for p in cost.parameters if p.trainable]
            shared = self._earlier(layer)
            has_own = cost.state_bytes > sum(s.state_bytes for s in shared)
            if mine and not has_own and all(any(s.name == name for s in shared) for name in mine):
                continue
            known = sum(
                s.state_bytes - s.early_state_bytes for s in self._shared_by(layer) if s.name in updated
            )
            if layer in self.stepped:
                self.device.reach(cost.update_peak_bytes, cost.update_workspace_bytes)
            else:
                self.device.reach(cost.update_first_peak_bytes - known, cost.update_first_workspace_bytes)
                self.device.new(cost.state_bytes - cost.early_state_bytes - known, self._of("optimizer"))
            updated |= {s.name for s in self._shared_by(layer)}
        self.stepped.update(layers)
        self._free_gradients(layers)

    def _free_gradients(self, layers: Collection[int]) -> None:
        """Free the gradients of these layers."""
        self.born.difference_update(layers)
        for gradient in self.device.held_by(self._of("parameter gradients")):
            if gradient.layer in layers:
                self.device.let_go(self._of("parameter gradients"), gradient)

    def _room(self, layer: int) -> int:
        """Return the bytes of a layer's gradients and optimizer state if every version but the newest has
        room for them; shared ones count for their first user.
        """
        if not self.everything:
            return 0
        repeated = self._earlier(layer)
        own = self.costs[layer].gradient_bytes + self.costs[layer].state_bytes
        return own - sum(s.gradient_bytes + s.state_bytes for s in repeated)

    # ---------------------------------------------------------------- finding things

    def _of(self, kind: str) -> tuple[str, int]:
        return kind, self.number

    def _users(self, parameter: SharedParameter) -> list[int]:
        return [user for user in parameter.users if self.start <= user < self.stop]

    def _shared_by(self, layer: int) -> list[SharedParameter]:
        return [s for s in self.shared if layer in s.users]

    def _earlier(self, layer: int) -> list[SharedParameter]:
        """Return the shared parameters of a layer that an earlier layer of the stage has too."""
        return [s for s in self._shared_by(layer) if layer != self._users(s)[0]]


def _found(origin: Origin, own: dict[int, Storage], inputs: Sequence[Storage | None]) -> Storage | None:
    """Return the storage of an origin; None for parameters and constants, which always exist."""
    return {"own": own.get, "input": dict(enumerate(inputs)).get}.get(origin.kind, lambda _: None)(
        origin.index
    )


# -------------------------------------------------------------------- programs


class Account:
    """Samples of all actions of a device's program over `steps` training steps."""

    def __init__(self, plan: Plan, device: int, *, program: Program | None = None, steps: int = 2) -> None:
        program = lower(plan) if program is None else program
        self.number, self.device = device, Device()
        self.stages = {
            number: StageAccount(
                self.device, plan.measured(number), stage.start, stage.stop,
                microbatches=plan.training.microbatches, number=number, program=program,
                everything=plan.training.versions == "everything",
                grid=stage.grid, replica=stage.grid.replica_of(device),
            )
            for number, stage in enumerate(plan.stages)
            if device in program.placement[number]
        }  # fmt: skip
        for action in program.actions[device]:
            if action.moves_state:
                self.stages[action.stage].put_away(program.moved(action))
        self.rest_bytes = self.device.level
        self.samples = [
            self._sample(step, action) for step in range(steps) for action in program.actions[device]
        ]
        self.peak_bytes = max((sample.peak_bytes for sample in self.samples), default=0)

    def _sample(self, step: int, action: Action) -> Sample:
        before = self.device.levels
        self.device.peak, self.device.workspace = self.device.level, 0
        self.stages[action.stage].act(action)
        self.device.reach(0)
        return Sample(step, action, self.device.peak, self.device.workspace, before, self.device.levels)


def peaks(plan: Plan, *, program: Program | None = None, steps: int = 2) -> tuple[int, ...]:
    """Return the peak bytes of every device of a plan."""
    return tuple(
        Account(plan, device, program=program, steps=steps).peak_bytes
        for device in range(len(plan.cluster.devices))
    )
