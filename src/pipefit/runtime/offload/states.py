"""Offloading of a stage's state, as `memory.states` describes it: storages and their homes.

A home is memory at a place, reserved for the whole run. Offloaded state has storages without memory, like
offloaded saved tensors (`runtime.offload.moving`): optimizers and graphs keep the tensors, and see their
values again after the reload. Parameters that are updated at a place stay on the device; their copies there,
which the optimizer updates, are tensors over the memory of their home, and so are the gradients that arrive.

The join of a copy orders it before later computations of the device, which on a GPU run after the host. So
before the host reads or writes a home, it settles the copies there: an update at a place settles those of its
gradients, on its thread, and access to state between steps settles all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from pipefit.capture import ChainLayer, needed_bytes, storage_key
from pipefit.errors import UsageError
from pipefit.memory import (
    Condition,
    Gathered,
    Home,
    HomeState,
    Layers,
    ReplicaShare,
    StageRest,
    StageStorages,
    StateConditions,
    StateMoves,
    home_of,
    slots,
)
from pipefit.runtime.offload.copying import Slot
from pipefit.runtime.offload.moving import Mover
from pipefit.runtime.optim.half_precision import WeightCopies
from pipefit.runtime.optim.updates import SentGradients, Updates
from pipefit.schema.actions import Action, Kind, Subject
from pipefit.schema.devices import Member
from pipefit.torch_internals import TorchDispatchMode, pytree

Storages = list[tuple[torch.UntypedStorage, int]]


@dataclass(slots=True)
class _Content:
    """Content of a home, and its slots; `storages` are known during a move."""

    kept: HomeState
    slots: Sequence[tuple[Member, Slot]]
    planned: int  # bytes
    storages: Storages = field(default_factory=list)
    copy: Any = None
    changed: bool = True  # since it was last copied to its home
    apart: bool = False  # whether no other layer is known to keep a part of it


class StateMover:
    """Executes the OFFLOADs and RELOADs of one stage's state.

    Args:
        mover: the device's mover; it has the slots, and copies.
        host: the device's host.
        seconds: minimum seconds of updates at a place, by their layers.
    """

    def __init__(
        self, moves: StateMoves, rest: StageRest, mover: Mover, host: int, seconds: Mapping[Layers, float]
    ) -> None:
        self._moves, self._share, self._mover, self._seconds = moves, rest.share, mover, seconds
        self.conditions = StateConditions(moves)
        self._contents: dict[Home, _Content] = {}
        for home, kept in moves.homes.items():
            planned = sum(rest.state_bytes_of(Subject(layer, kept.kind)) for layer in range(*kept.layers))
            taken = [
                (member, mover.borrowed.keep(member, n)) for member, n in slots(home.place, planned, host)
            ]
            self._contents[home] = _Content(kept, taken, planned)
        self._started: dict[Layers, Any] = {}
        self._sent: dict[Layers, SentGradients] = {}

    # ---------------------------------------------------------------- access to state between steps

    def copies(
        self, own: Sequence[Sequence[nn.Parameter]], start: int
    ) -> dict[nn.Parameter, nn.Parameter | None]:
        """Return the copies of the parameters that are updated at a place, over the memory of their home.

        `own` are the parameters of every layer from `start` on. Each copy has the bytes of its parameter; in
        a dry run it is None.
        """
        result: dict[nn.Parameter, nn.Parameter | None] = {}
        for home, content in self._contents.items():
            if content.kept.kind == "parameters" and self._moves.updated_elsewhere(content.kept.layers):
                owned = (n for n in range(*content.kept.layers) if self._share is None or self._share.owns(n))
                parameters = [parameter for layer in owned for parameter in own[layer - start]]
                self._write(home, parameters)
                for parameter, copy in zip(parameters, self._views(content, parameters), strict=True):
                    result[parameter] = None if copy is None else nn.Parameter(copy, parameter.requires_grad)
        return result

    def put_away(self, updates: Updates) -> None:
        """Write optimizer state and parameters to their homes.

        State that is offloaded between steps leaves the device.
        """
        for home, content in self._contents.items():
            if content.kept.kind != "gradients":
                self._write(home, self._tensors(content, updates))
            if self._moves.begins_away(content.kept):
                self._free(content)
        self.conditions.reset()

    @contextmanager
    def all_here(self, updates: Updates) -> Iterator[None]:
        """Keep all state on the device in the context, without counting its memory; offload it again
        afterwards.

        The host may write to homes in the context, because all copies are settled first.
        """
        for home, content in self._contents.items():
            if content.copy is not None:
                self._mover.settle(content.copy)
            if self.conditions.of[home] is Condition.AWAY:
                for storage, nbytes in content.storages:
                    storage.resize_(nbytes)
                self._copy_at_once(content, outward=False)
                content.storages = []
                self.conditions.put(home, Condition.HERE)
        try:
            yield
        finally:
            self.put_away(updates)

    def reader(self) -> Callable[[Tensor], Tensor]:
        """Return a function that reads a state tensor: the tensor, or a copy of it if it is offloaded."""
        copies: dict[int, torch.UntypedStorage] = {}
        for home, content in self._contents.items():
            if self.conditions.of[home] is Condition.AWAY:
                copies |= self._copies_of(content)

        def read(tensor: Tensor) -> Tensor:
            copy = copies.get(tensor.untyped_storage()._cdata)
            if copy is None:
                return tensor
            result = torch.empty(0, dtype=tensor.dtype)
            return result.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())

        return read

    def _copies_of(self, content: _Content) -> dict[int, torch.UntypedStorage]:
        """Return copies of the storages of offloaded state, by the keys of these storages."""
        pairs = [(torch.empty(n, dtype=torch.uint8).untyped_storage(), n) for _, n in content.storages]
        self._mover.settle(self._mover.copy(pairs, content.slots, outward=False, paced=False))
        return {one._cdata: copy for (one, _), (copy, _) in zip(content.storages, pairs, strict=True)}

    # ---------------------------------------------------------------- actions

    def carry_out(self, action: Action, updates: Updates) -> None:
        """Execute an OFFLOAD, a RELOAD or the WAIT of one.

        Raises:
            UsageError: the action does not fit the state's condition, or the state is not as planned.
        """
        after, home = self.conditions.behind(action), home_of(action)
        content = self._contents[home]
        match action.kind, action.wait:
            case Kind.OFFLOAD, False:
                self._gather(action, content, updates)
                content.copy = None
                if content.changed or content.kept.kind != "parameters":
                    content.copy = self._mover.copy(content.storages, content.slots, outward=True)
            case Kind.OFFLOAD, True:
                if content.copy is not None:
                    self._mover.join(content.copy)
                self._leave(content, updates)
                content.changed = False
            case Kind.RELOAD, False:
                self._reload(content, updates, stale=self.conditions.of[home] is Condition.STALE)
            case _:
                self._mover.join(content.copy)
                content.storages = []
        self.conditions.put(home, after)

    def _gather(self, action: Action, content: _Content, updates: Updates) -> None:
        """Find the storages of a state, each once, and check that they are as planned."""
        kept = content.kept
        content.storages = storages_of(self._tensors(content, updates), f"{action} cannot offload {kept}")
        nbytes = sum(nbytes for _, nbytes in content.storages)
        if nbytes > content.planned or (nbytes != content.planned and updates.is_whole(kept)):
            why = "several tensors share their memory, or its size changes"
            if kept.kind == "optimizer":
                why = "it is not stored in tensors of the optimizer's state, or its size changes"
            raise UsageError(
                f"{action}: {nbytes} bytes for {kept}, but {content.planned} by the plan: {why}; "
                "keep it on the device, or profile and plan it again"
            )
        if kept.kind == "optimizer" and content.storages and not content.apart:
            updates.check_apart(kept.layers)
            content.apart = True

    def _tensors(self, content: _Content, updates: Updates) -> list[Tensor]:
        kept = content.kept
        if kept.kind == "optimizer":
            return updates.state(kept.layers, content.planned)
        parameters = updates.owned(kept.layers)
        if kept.kind == "parameters":
            return [*parameters]
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def _leave(self, content: _Content, updates: Updates) -> None:
        """Free the device memory of a state that has arrived at its home.

        Gradients for an update there are dropped, and replaced by tensors at their home.
        """
        layers = content.kept.layers
        if content.kept.kind == "gradients" and self._moves.updated_elsewhere(layers):
            own = [parameter for parameter in updates.owned(layers) if parameter.grad is not None]
            views = self._views(content, [p.grad for p in own if p.grad is not None])
            there = {p: view for p, view in zip(own, views, strict=True) if view is not None}
            self._sent[layers] = SentGradients(there, partial(self._mover.settle, content.copy))
            content.storages = []
            for parameter in own:
                parameter.grad = None
        else:
            self._free(content)

    def _reload(self, content: _Content, updates: Updates, *, stale: bool) -> None:
        """Allocate memory for a state, unless it is only `stale` and has kept it, and begin to copy back."""
        if stale:
            content.storages = storages_of(self._tensors(content, updates))
        for storage, nbytes in content.storages:
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)
                self._mover.resized(storage)
        content.copy = self._mover.copy(content.storages, content.slots, outward=False)

    # ---------------------------------------------------------------- updates

    def update(self, action: Action, layers: Layers) -> None:
        """Note that these layers are updated on the device.

        Raises:
            UsageError: another place updates some of them, or state that they need is not on the device.
        """
        self.conditions.update(action, layers)
        for content in self._contents.values():
            start, stop = content.kept.layers
            content.changed |= start < layers[1] and layers[0] < stop

    def update_elsewhere(self, action: Action, layers: Layers, updates: Updates) -> None:
        """Begin an update at a place, or join it.

        Raises:
            UsageError: the gradients are not at the place, or the parameters are not on the device.
        """
        self.conditions.update_elsewhere(action, layers)
        if action.wait:
            updates.end_elsewhere(layers, self._started.pop(layers))
        else:
            seconds = self._seconds.get(layers, 0.0)
            self._started[layers] = updates.start_elsewhere(layers, self._sent.pop(layers), seconds)

    # ---------------------------------------------------------------- after a failed step

    def abandon(self, updates: Updates) -> None:
        """Return state to its place between steps and drop gradients, after a failed step."""
        updates.abandon()
        self._started.clear()
        self._sent.clear()
        for home, content in self._contents.items():
            content.copy = None
            condition, kind = self.conditions.of[home], content.kept.kind
            if self._moves.begins_away(content.kept):
                if condition in (Condition.HERE, Condition.LEAVING):
                    self._write(home, self._tensors(content, updates))
                self._free(content)
                continue
            if kind == "parameters" and condition is not Condition.HERE:
                content.storages = storages_of(updates.owned(content.kept.layers))
                self._copy_at_once(content, outward=False)
            content.storages = []
        self.conditions.reset()

    # ---------------------------------------------------------------- bytes

    def _write(self, home: Home, tensors: Sequence[Tensor]) -> None:
        """Copy tensors to their home, without pacing; the copy is complete on return."""
        content = self._contents[home]
        refusal = f"the plan offloads {content.kept}" if self._moves.begins_away(content.kept) else ""
        content.storages = storages_of(tensors, refusal)
        if sum(nbytes for _, nbytes in content.storages) > content.planned:
            raise UsageError(
                f"the plan reserves only {content.planned} bytes for {content.kept}: "
                "profile and plan it again"
            )
        self._copy_at_once(content, outward=True)
        content.changed = False

    def _copy_at_once(self, content: _Content, *, outward: bool) -> None:
        self._mover.settle(self._mover.copy(content.storages, content.slots, outward=outward, paced=False))

    def _free(self, content: _Content) -> None:
        for storage, _ in content.storages:
            storage.resize_(0)
            self._mover.resized(storage)

    def _views(self, content: _Content, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """Return host tensors like these, over the memory of a home.

        Return None for a home without memory, as in a dry run.
        """
        places, at = dict[int, tuple[int, int]](), 0
        for storage, nbytes in storages_of(tensors):
            places[storage._cdata] = at, nbytes
            at += nbytes
        return [_view(content.slots[0][1], *places[t.untyped_storage()._cdata], t) for t in tensors]


def storages_of(tensors: Sequence[Tensor], refusal: str = "") -> Storages:
    """Return the storages of tensors with their bytes, each once.

    With a `refusal`, their memory must be freeable.

    Raises:
        UsageError: the memory of one belongs to another library than torch; the message begins with the
            `refusal`.
    """
    result: dict[int, tuple[torch.UntypedStorage, int]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if refusal and not storage.resizable():
            raise UsageError(
                f"{refusal}: its memory does not belong to torch, but for example to a numpy array; keep it "
                "on the device"
            )
        result.setdefault(storage._cdata, (storage, storage.nbytes()))
    return list(result.values())


def _view(slot: Slot, at: int, nbytes: int, like: Tensor) -> Tensor | None:
    """Return a host tensor like another one, over a slot that holds its storage from byte `at` on."""
    if not slot.address or not nbytes:
        return None if not slot.address and nbytes else torch.empty_like(like, device="cpu")
    memory = (ctypes.c_char * nbytes).from_address(slot.address + at)
    flat = torch.frombuffer(memory, dtype=like.dtype, count=nbytes // like.element_size())
    return flat.as_strided(like.shape, like.stride(), like.storage_offset())


# ---- Gathered parameters of shard owners
# Only the shard owner keeps a parameter; on other replicas it has memory while it is gathered. Its storage
# loses its memory like offloaded state (`runtime.offload.moving`), so graphs and layers keep the tensors, and
# see their numbers again when they have come from the owner.
#
# Half-precision copies have memory while their parameters are gathered, on the owner too. A parameter that
# layers read only through its copy has no memory on the other replicas: the owner casts it, and the copy is
# sent. The profile shows which parameters these are; a layer that reads one directly here, as in evaluation
# or with another torch, raises an error in its first forward.

_DEVICE = torch.ops.prim.device.default  # fake tensors call it


class GatheredParameters:
    """The parameters of one replica of a stage, which keeps only those of layers that it owns.

    `own` are the parameters of every layer of the stage. The object is false if the replica keeps all
    parameters.

    Raises:
        UsageError: the memory of a parameter is not torch's, and could not be freed.
    """

    def __init__(
        self,
        share: ReplicaShare | None,
        own: Sequence[Sequence[nn.Parameter]],
        copies: WeightCopies,
        storages: StageStorages,
    ) -> None:
        self._gathered, self._share, self._own = Gathered(share, storages), share, own
        self._copies, self._start = copies, storages.start
        self._storages: dict[int, list[tuple[torch.UntypedStorage, int]]] = {}  # gathered, by layer
        self._absent: set[int] = set()  # keys of storages that never have memory here
        self._watched = {mode: WeakSet[nn.Module]() for mode in (True, False)}  # ran, by training mode
        for layer, parameters in enumerate(own if self else (), start=storages.start):
            copied: list[Tensor] = [copies.copies[id(weight)].tensor for weight in copies.own(layer)]
            others = [] if self._owns(layer) else parameters
            gathered = [parameter for parameter in others if not copies.is_cast_only(parameter)]
            refusal = "the plan shards the parameters of this stage"
            needed = {storage_key(tensor): needed_bytes(tensor) for tensor in (*gathered, *copied)}
            result = storages_of([*gathered, *copied], refusal)
            self._storages[layer] = [(one, nbytes or needed[one._cdata]) for one, nbytes in result]
            absent = [parameter for parameter in others if copies.is_cast_only(parameter)]
            for storage, _ in storages_of(absent, refusal):
                storage.resize_(0)
            self._absent |= set(map(storage_key, absent))
        self.abandon()

    def __bool__(self) -> bool:
        return bool(self._gathered)

    def _owns(self, layer: int) -> bool:
        return self._share is None or self._share.owns(layer)

    def parameters(self, layers: Layers) -> list[list[Tensor]]:
        """Return the tensors of every layer that replicas exchange: trained parameters, without their graphs.

        If only owners keep parameters, these are all parameters, or copies of those that layers read only
        through copies.
        """
        every = self._own[layers[0] - self._start : layers[1] - self._start]
        if not self:
            return [[parameter.data for parameter in own if parameter.requires_grad] for own in every]
        return [list(map(self._travelling, own)) for own in every]

    def _travelling(self, parameter: nn.Parameter) -> Tensor:
        cast_only = self._copies.is_cast_only(parameter)
        return self._copies.copies[id(parameter)].tensor if cast_only else parameter.data

    def carry_out(self, action: Action, layers: Layers) -> list[torch.UntypedStorage]:
        """Allocate memory for an UNSHARD, or free memory at a RESHARD; return the resized storages.

        Copies have the values of their weights from the start of an UNSHARD on the owner, and after its join
        elsewhere.
        """
        result = []
        for layer in self._gathered.carry_out(action, range(*layers)):
            for storage, nbytes in self._storages[layer]:
                storage.resize_(0 if action.kind is Kind.RESHARD else nbytes)
                result.append(storage)
        for layer in range(*layers) if self else ():
            if action.kind is Kind.RESHARD:
                self._outdate(layer)
            elif action.wait is not self._owns(layer):
                self._follow(layer, came=action.wait)
        return result

    def _outdate(self, layer: int) -> None:
        for weight in self._copies.own(layer):
            self._copies.copies[id(weight)].fresh = False

    def _follow(self, layer: int, *, came: bool) -> None:
        """Update the copies of a layer's weights; cast-only copies may have come (`came`) from the owner."""
        for weight in self._copies.own(layer):
            copy = self._copies.copies[id(weight)]
            copy.fresh = came and self._copies.is_cast_only(weight)
            copy.follow(weight)

    def watching(self, layer: ChainLayer) -> AbstractContextManager[object]:
        """Return a context for a layer's forward; the first one must not read parameters without memory."""
        watched = self._watched[layer.module.training]
        if not self._absent or layer.module in watched:
            return nullcontext()
        watched.add(layer.module)
        own = {storage_key(parameter): name for name, parameter in layer.module.named_parameters()}
        return _Refusing(layer.name, {storage: own[storage] for storage in own.keys() & self._absent})

    def check(self, action: Action, layers: Layers) -> None:
        """Check that the parameters of these layers are gathered.

        Raises:
            UsageError: some are not.
        """
        self._gathered.check(action, range(*layers))

    def abandon(self) -> None:
        """Free the memory that is not kept between steps."""
        self._gathered.reset()
        for layer, storages in self._storages.items():
            self._outdate(layer)
            for storage, _ in storages:
                storage.resize_(0)


class _Refusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises an error for operations of a layer that read parameters without memory.

    `absent` has their names, by storage.
    """

    def __init__(self, layer: str, absent: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layer, self._absent = layer, absent

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in pytree.tree_leaves((args, kwargs)) if not func.is_view and func is not _DEVICE else ():
            if isinstance(tensor, Tensor) and (name := self._absent.get(storage_key(tensor))) is not None:
                raise UsageError(
                    f"layer {self._layer} reads {name!r} in full precision in {func}, but only its "
                    "half-precision copy in its profile, so replicas that shard parameters hold only the "
                    "copy: make the layer do the same in training and evaluation, profile it again with "
                    "this torch, or shard less (shard='gradients')"
                )
        return func(*args, **(kwargs or {}))
