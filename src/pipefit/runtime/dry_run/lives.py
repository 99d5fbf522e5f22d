"""Lives of storages: the order of allocations and frees, which decides a GPU's reserved bytes.

A `LivesMeter` records every birth and death of a storage, action by action. cuBLAS workspaces are births too:
torch allocates one from the caching allocator for each thread that multiplies matrices, at its first product,
and keeps it (`getCurrentCUDABlasHandle` in aten/src/ATen/cuda/CublasHandlePool.cpp). One thread runs forwards
and updates, and autograd has another one for backwards. Costs about a microsecond for each birth and death.

An `OwningMeter` also records the layer whose state each event is about.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from sys import maxsize
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipefit.capture import storage_key
from pipefit.measure import SCALAR_BYTES, Kernels, Number, Tracked
from pipefit.runtime.dry_run.layers import NEXT_STEP, Copy, Passing, RepeatedMeter, storages_in
from pipefit.runtime.engine.stage import StageRunner
from pipefit.schema.actions import FORWARDS, MESSAGES, SPLIT_BACKWARD, Action, Kind, parse_action
from pipefit.schema.trace import CATEGORIES, Category
from pipefit.torch_internals import backward_id

Life = tuple[int, int]  # a storage, and its bytes at birth or 0 at death
Lives = tuple[Life, ...]

FORWARD_WORKSPACE, BACKWARD_WORKSPACE = -1, -2  # storages that are never freed
_aten = torch.ops.aten
_PRODUCTS = frozenset(
    getattr(operation, overload)
    for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot")
    for operation in (getattr(_aten, name),)
    for overload in operation.overloads()
)


class LivesMeter(RepeatedMeter):  # type: ignore[no-untyped-call]
    """A meter that also records the lives of storages.

    Args:
        place: torch device of the device's tensors.
        workspace_bytes: size of one cuBLAS workspace.
    """

    def __init__(
        self,
        device: int,
        *,
        kernels: Kernels | None,
        passings: Mapping[str, Passing],
        place: torch.device,
        workspace_bytes: int,
    ) -> None:
        super().__init__(device, kernels=kernels, passings=passings, place=place)
        self._workspace_bytes = workspace_bytes
        self._workspaces: set[int] = set()
        self._names: dict[int, int] = {}  # of living storages, by their keys, which later storages reuse
        self._named = 0
        self._lives: list[list[Life]] = [[]]  # before the first action, and in every action

    def take(self) -> tuple[Lives, list[Lives]]:
        """Return the lives before the next action, and in every action since the last call.

        Call it after `changes`.
        """
        before, *actions, between = map(tuple, self._lives)
        self._lives = [list(between)]
        return before, actions

    # ---------------------------------------------------------------- meter interface

    def begin(self, action: str) -> None:
        super().begin(action)
        self._lives.append([])

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().operation(func, args, kwargs)
        if func in _PRODUCTS and self._workspace_bytes:
            self._compute_in_workspace()
        return out

    def _compute_in_workspace(self) -> None:
        backward = backward_id() >= 0
        name = BACKWARD_WORKSPACE if backward else FORWARD_WORKSPACE
        if name not in self._workspaces:
            self._workspaces.add(name)
            self._grow_workspace(name)

    def _grow_workspace(self, name: int) -> None:
        self._lives[-1].append((name, self._workspace_bytes))

    def _track(self, tensor: Tensor) -> Tracked:
        known = storage_key(tensor) in self._live
        tracked = super()._track(tensor)
        if not known:
            self._birth(tracked.key, tracked.nbytes)
        return tracked

    def _resize(self, tracked: Tracked, nbytes: int) -> None:
        """Record new memory of a resized storage before the death of its old memory."""
        super()._resize(tracked, nbytes)
        old = self._names.pop(tracked.key, None)
        self._birth(tracked.key, nbytes)
        self._death(old)

    def _died(self, tracked: Tracked) -> None:
        super()._died(tracked)
        self._death(self._names.pop(tracked.key, None))

    def _birth(self, key: int, nbytes: int) -> None:
        if nbytes:  # an empty tensor takes no memory
            self._names[key] = self._named
            self._lives[-1].append((self._named, nbytes))
            self._named += 1

    def _death(self, name: int | None) -> None:
        if name is not None:
            self._lives[-1].append((name, 0))


# ---- Events of a device's account, with the layers whose state they are about
# Two runs of a stage that own different layers have equal events except those about the state of these
# layers. Executions of repeated layers have equal events except for their names. An `OwningMeter` names every
# storage by the execution that made it, by the action, and by a number in it, so that the same event has the
# same name in other runs, and after its execution the same in other executions. The layer of a state storage
# follows from the tensors of the operation that made it, and from parameters, their gradients and the
# optimizer at the end of the action. Costs about a microsecond per event more than `LivesMeter`.

_ACTIVATIONS, _LENT = CATEGORIES.index(Category.ACTIVATIONS), CATEGORIES.index(Category.LENT)
_PASSES = FORWARDS | SPLIT_BACKWARD | MESSAGES | {Kind.LOAD, Kind.RECOMPUTE, Kind.BACKWARD}

_COPYING = frozenset(
    {torch.ops.aten.clone.default, torch.ops.aten.new_empty_strided.default}
)  # used by autograd


class Execution(NamedTuple):
    """An execution of repeated layers: a repeat, and the number of the execution."""

    repeat: int
    number: int


class StorageName(NamedTuple):
    """Name of a storage: the execution that made it, None outside of repeats, and the rest.

    The rest is equal in executions that do the same.
    """

    maker: Execution | None
    rest: Hashable


Arguments = tuple[StorageName, ...]
NamedLife = tuple[
    Hashable, int
]  # a storage and the number of its memory, and its bytes at birth or 0 at death


class LifeEvent(NamedTuple):
    """An event in the account of a device.

    `name` has the kind of event, its storage, and the count of such events in the action; it is equal in
    other runs. `layer` is the layer whose state it is about: None if it is about none, or if the layer is
    unknown. `deltas` are positions of categories with bytes, and `taken` is the temporary memory of a kernel.
    It happens in the execution `at`, or about a storage of it.
    """

    name: tuple[str, Hashable, int]
    layer: int | None
    deltas: tuple[tuple[int, int], ...] = ()
    taken: int = 0
    lives: tuple[NamedLife, ...] = ()
    at: Execution | None = None

    @property
    def key(self) -> Hashable:
        """Identity of the event in its action."""
        return self.name, self.at


class OwningMeter(LivesMeter):  # type: ignore[no-untyped-call]
    """A meter that also records all events of a device.

    `layer_of` has the layer of every storage that has been state of one, by the storage's name.
    """

    def __init__(self, device: int, **options: Any) -> None:
        super().__init__(device, **options)
        self.layer_of: dict[Hashable, int] = {}
        self._stages: list[StageRunner] = []
        self._places: dict[int, tuple[Execution, int]] = {}  # of repeated layers: execution, and number in it
        self._called: dict[Tracked, StorageName] = {}
        self._living: dict[Tracked, Hashable] = {}  # names of lives in storages that have memory now
        self._memories = Counter[StorageName]()  # lives of every storage that has been resized
        self._story: list[tuple[LifeEvent, Arguments]] = []  # of the present action
        self._told: list[list[LifeEvent]] = []  # of every action, and before the first one
        self._counts = Counter[Hashable]()
        self._number = 0  # of the present action; 0 until `settled`
        self._occurrences = Counter[Hashable]()  # of actions within an execution
        self._moment: Hashable = 0  # the present action, equal in executions that do the same
        self._present: Action | None = None
        self._worked_on: int | None = None  # the only layer whose state the present operation uses
        self._arguments: Arguments = ()
        self._users: defaultdict[Hashable, set[int]] = defaultdict(set)  # by stateless storage: its layers
        self._operation = ""

    def own_layers(self, stage: StageRunner, copies: Sequence[Copy | None]) -> None:
        super().own_layers(stage, copies)
        self._stages.append(stage)
        first = dict[Execution, int]()
        for layer, copy in enumerate(copies, start=stage.start):
            if copy is not None:
                execution = Execution(copy.repeat, copy.number)
                self._places[layer] = execution, layer - first.setdefault(execution, layer)

    def settled(self) -> list[LifeEvent]:
        """Begin to record events, after all layers are registered; return present storages as births."""
        self._number = 1
        for layer, stage in self._layers():
            own = stage.updates.parameters((layer, layer + 1))
            copied = [stage.copies.copies[id(weight)].tensor for weight in stage.copies.own(layer)]
            kept = stage.updates.state((layer, layer + 1), maxsize)
            maker, place = self._places.get(layer, (None, layer))
            for what, tensors in (("parameter", own), ("copy", copied), ("kept", kept)):
                for number, tensor in enumerate(tensors):
                    tracked = self._live.get(storage_key(tensor))
                    if tracked is not None and tracked not in self._called:
                        name = self._called[tracked] = StorageName(maker, (what, place, number))
                        self.layer_of[name] = layer
        numbers = Counter[Execution | None]()
        for tracked in self._live.values():
            if tracked not in self._called:
                made_by = self._maker.get(tracked.key)
                maker = None if made_by is None else Execution(made_by.repeat, made_by.number)
                self._called[tracked] = StorageName(maker, ("own", numbers[maker]))
                numbers[maker] += 1
        result = [LifeEvent(("lent", None, 1), None, ((_LENT, self.bytes[_LENT]),))]
        for tracked in self._live.values():
            name, deltas = self._called[tracked], ((tracked.category, tracked.nbytes),)
            lives = tuple(self._life(tracked, tracked.nbytes))
            result.append(
                LifeEvent(("born", name, 1), self.layer_of.get(name), deltas, lives=lives, at=name.maker)
            )
        return result

    def events(self) -> list[list[LifeEvent]]:
        """Return the events before the next action, and in every action since the last call.

        Call it after `changes`.
        """
        told, self._told = self._told, []
        return told

    # ---------------------------------------------------------------- meter interface

    def begin(self, action: str) -> None:
        super().begin(action)
        self._close()
        self._number += 1
        self._story, self._counts, self._users = [], Counter(), defaultdict(set)
        self._present = None if action == NEXT_STEP else parse_action(action)
        self._moment = self._number
        if (copy := self._passing.copy) is not None:
            self._occurrences[copy, self._passing.relative] += 1
            self._moment = self._passing.relative, self._occurrences[copy, self._passing.relative]

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._operation = str(func)
        if not self._is_pass:
            self._look_at((args, kwargs))
        elif func in _COPYING:
            self._arguments = self._names_in(args)
        out = super().operation(func, args, kwargs)
        self._worked_on, self._arguments = None, ()
        return out

    @property
    def _is_pass(self) -> bool:
        """True if the present action transfers or runs microbatches, instead of changing one layer's
        state.
        """
        return self._present is not None and self._present.kind in _PASSES

    def _look_at(self, arguments: Any) -> None:
        """Find the only layer whose state is among the arguments of an operation, if there is one."""
        self._arguments = self._names_in(arguments)
        result = {self.layer_of[name] for name in self._arguments if name in self.layer_of}
        if len(result) == 1:
            (self._worked_on,) = result
            for name in self._arguments:
                self._users[name] |= result

    def _names_in(self, arguments: Any) -> Arguments:
        tracked = (self._live.get(key) for key in storages_in(arguments))
        return tuple(self._called[one] for one in tracked if one in self._called)

    def _track(self, tensor: Tensor) -> Tracked:
        known = storage_key(tensor) in self._live
        tracked = super()._track(tensor)
        if not known and self._number:  # copies are counted separately
            at = self._at()
            arguments = self._arguments if self._is_pass else ()
            where = self._moment, self._seen_layer(at), *(_relative(name, at) for name in arguments)
            self._counts[at, where] += 1
            name = StorageName(at, (*where, self._counts[at, where]))
            self._called[tracked] = name
            if self._worked_on is not None:
                self.layer_of[name] = self._worked_on
            self._tell(
                "born", name, [(tracked.category, tracked.nbytes)], self._life(tracked, tracked.nbytes)
            )
        return tracked

    def _resize(self, tracked: Tracked, nbytes: int) -> None:
        deltas = [(tracked.category, nbytes - tracked.nbytes)]
        super()._resize(tracked, nbytes)
        if self._number:
            death = self._death_of(tracked)
            self._tell("resized", self._called[tracked], deltas, [*self._life(tracked, nbytes), *death])

    def _died(self, tracked: Tracked) -> None:
        super()._died(tracked)
        if self._number:
            death = self._death_of(tracked)
            self._tell("died", self._called.pop(tracked), [(tracked.category, -tracked.nbytes)], death)

    def _move(self, tracked: Tracked, category: int) -> None:
        before = tracked.category
        super()._move(tracked, category)
        if self._number and before != category:
            self._tell(
                "moved", self._called[tracked], [(before, -tracked.nbytes), (category, tracked.nbytes)]
            )

    def count_number(self, number: Number, change: int) -> None:
        super().count_number(number, change)
        self._tell("numbers", None, [(_ACTIVATIONS, SCALAR_BYTES * change)])

    def _take(self, level: int, asked: int) -> None:
        super()._take(level, asked)
        if level > self.total:
            self._tell("taken", self._operation, [], taken=level - self.total)

    def _grow_workspace(self, name: int) -> None:
        super()._grow_workspace(name)
        self._tell("workspace", name, [], [(name, self._workspace_bytes)])

    # ---------------------------------------------------------------- recording

    def _at(self, name: Hashable = None) -> Execution | None:
        """Return the execution whose layers are active, or whose state the present operation uses.

        Between microbatches it is that of the storage with this `name`, if it has one.
        """
        active = self._at_work and Execution(self._at_work.repeat, self._at_work.number)
        maker = name.maker if isinstance(name, StorageName) else None
        if self._passing.copy is not None or self._is_pass:
            return active or maker
        state = self._places[self._worked_on][0] if self._worked_on in self._places else None
        return maker or state or active

    def _seen_layer(self, at: Execution | None) -> Hashable:
        """Return the layer that the present operation works on, counted from the first of its execution."""
        if self._worked_on is None:
            return None
        execution, place = self._places.get(self._worked_on, (None, self._worked_on))
        return place if execution == at else (_distance(execution, at), place)

    def _tell(
        self,
        what: str,
        name: Hashable,
        deltas: Sequence[tuple[int, int]],
        lives: Sequence[NamedLife] = (),
        taken: int = 0,
    ) -> None:
        """Record an event about the storage with this name, unless it changes nothing."""
        if not lives and not taken and not any(nbytes for _, nbytes in deltas):
            return
        at = self._at(name)
        self._counts[at, what, name] += 1
        count = self._counts[at, what, name]
        event = LifeEvent((what, name, count), self._worked_on, tuple(deltas), taken, tuple(lives), at)
        self._story.append((event, self._arguments))

    def _life(self, tracked: Tracked, nbytes: int) -> list[NamedLife]:
        """Begin a new life in a storage of `nbytes`; return its birth."""
        if not nbytes:
            return []
        name = self._called[tracked]
        self._memories[name] += 1
        life = self._living[tracked] = (name, self._memories[name])
        return [(life, nbytes)]

    def _death_of(self, tracked: Tracked) -> list[NamedLife]:
        """End the life in a storage; return its death, if it had memory."""
        life = self._living.pop(tracked, None)
        return [] if life is None else [(life, 0)]

    def _close(self) -> None:
        """End an action: give its events the layers that are known by now."""
        if self._present is None or self._present.kind in (Kind.BACKWARD, Kind.STEP):
            self._find_state()
        for event, arguments in self._story:  # a gradient may be a copy of a computed tensor
            if event.name[0] == "born" and (layer := self.layer_of.get(event.name[1])) is not None:
                for name in arguments:
                    self._users[name].add(layer)
        dead = {event.name[1] for event, _ in self._story if event.name[0] == "died"}
        for used, layers in self._users.items():
            if len(layers) == 1 and used in dead:  # only this layer used it
                self.layer_of.setdefault(used, *layers)
        self._told.append([self._resolved(*told) for told in self._story])

    def _resolved(self, event: LifeEvent, arguments: Arguments) -> LifeEvent:
        """Return an event with its layer, if its storage or the arguments determine the layer by now."""
        if event.layer is not None:
            return event
        what, about, _ = event.name
        result = {self.layer_of[name] for name in (about, *arguments) if name in self.layer_of}
        if len(result) != 1:
            return event
        (layer,) = result
        if what == "born":
            self.layer_of[about] = layer
        return event._replace(layer=layer)

    def _find_state(self) -> None:
        """Register the layers of present gradients and optimizer tensors."""
        layers = None if self._present is None else self._present.layers
        for layer, stage in self._layers():
            if layers is None or layers[0] <= layer < layers[1]:
                own = stage.updates.parameters((layer, layer + 1))
                held = [parameter.grad for parameter in own if parameter.grad is not None]
                for tensor in (*held, *stage.updates.state((layer, layer + 1), maxsize)):
                    tracked = self._live.get(storage_key(tensor))
                    if tracked is not None:
                        self.alike &= self.layer_of.setdefault(self._called[tracked], layer) == layer

    def _layers(self) -> Iterator[tuple[int, StageRunner]]:
        return ((layer, stage) for stage in self._stages for layer in range(stage.start, stage.stop))


def _distance(execution: Execution | None, at: Execution | None) -> Hashable:
    """Return an execution as seen from another one: the difference of their numbers in the same repeat."""
    if execution is None or at is None or execution.repeat != at.repeat:
        return execution
    return execution.number - at.number


def _relative(name: StorageName, at: Execution | None) -> Hashable:
    """Return a storage's name as seen from an execution."""
    return _distance(name.maker, at), name.rest
