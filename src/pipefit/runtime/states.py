"""State of a stage that is moved away and back, by what `pipefit.cost.states` says: storages and their homes.

A home is memory at a place, of its own for the whole run. What is away has storages without memory, as saved tensors
that are away have (`pipefit.runtime.moving`): all who hold the tensors, optimizers and graphs, see them again when they
are back. Parameters that are updated at a place stay on the device; their copies there, which the optimizer works on,
are tensors over the memory of their home, and so are the gradients that arrive.

A join of a copy orders it before what the device computes next, which on a GPU is later than the host. So whoever reads
or writes a home on the host settles the copies there first: an update at a place those of its gradients, on its own
thread, and whatever looks at state between steps all of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.actions import Action, Kind, Subject
from pipefit.cost.rest import StageRest
from pipefit.cost.states import Condition, Conditions, Home, Kept, Layers, StateMoves, home_of
from pipefit.errors import UsageError
from pipefit.places import Member
from pipefit.runtime.copying import Slot
from pipefit.runtime.moving import Mover
from pipefit.runtime.updates import Gradients, Updates
from pipefit.schedule.arenas import slots

Storages = list[tuple[torch.UntypedStorage, int]]


@dataclass(slots=True)
class _Content:
    """What a home keeps, and its slots there; the storages are known while they are not in use."""

    kept: Kept
    slots: Sequence[tuple[Member, Slot]]
    planned: int  # bytes
    storages: Storages = field(default_factory=list)
    copy: Any = None
    changed: bool = True  # since it was last at its home
    apart: bool = False  # whether it is known that no other layer keeps any of it


class StateMover:
    """Carries out the OFFLOADs and RELOADs of one stage's state.

    Args:
        mover: of the device; it has the slots, and copies.
        host: that the device is in.
        seconds: which updates at a place take at least, by their layers.
    """

    def __init__(
        self, moves: StateMoves, rest: StageRest, mover: Mover, host: int, seconds: Mapping[Layers, float]
    ) -> None:
        self._moves, self._share, self._mover, self._seconds = moves, rest.share, mover, seconds
        self.conditions = Conditions(moves)
        self._contents: dict[Home, _Content] = {}
        for home, kept in moves.homes.items():
            planned = sum(rest.state_bytes_of(Subject(layer, kept.kind)) for layer in range(*kept.layers))
            taken = [(member, mover.borrowed.keep(member, n)) for member, n in slots(home.place, planned, host)]
            self._contents[home] = _Content(kept, taken, planned)
        self._started: dict[Layers, Any] = {}
        self._sent: dict[Layers, Gradients] = {}

    # ---------------------------------------------------------------- before training, and around what looks at state

    def copies(self, own: Sequence[Sequence[nn.Parameter]], start: int) -> dict[nn.Parameter, nn.Parameter | None]:
        """The copies of the parameters that are updated at a place, over the memory of their home.

        `own` are the parameters of every layer from `start` on. Each copy has the bytes of its parameter; in a dry run
        it is None.
        """
        found: dict[nn.Parameter, nn.Parameter | None] = {}
        for home, content in self._contents.items():
            if content.kept.kind == "parameters" and self._moves.updated_elsewhere(content.kept.layers):
                owned = (n for n in range(*content.kept.layers) if self._share is None or self._share.owns(n))
                parameters = [parameter for layer in owned for parameter in own[layer - start]]
                self._write(home, parameters)
                for parameter, copy in zip(parameters, self._views(content, parameters), strict=True):
                    found[parameter] = None if copy is None else nn.Parameter(copy, parameter.requires_grad)
        return found

    def put_away(self, updates: Updates) -> None:
        """Give homes what exists of optimizer state and parameters; what is away between steps leaves the device."""
        for home, content in self._contents.items():
            if content.kept.kind != "gradients":
                self._write(home, self._tensors(content, updates))
            if self._moves.begins_away(content.kept):
                self._free(content)
        self.conditions.reset()

    @contextmanager
    def all_here(self, updates: Updates) -> Iterator[None]:
        """Inside, everything is on the device, outside of its account; afterwards all is where it was.

        The host may write to homes inside, so that no copy is under way.
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
        """A function of a tensor of the state that gives it, or a copy of it if its memory is away."""
        copies: dict[int, torch.UntypedStorage] = {}
        for home, content in self._contents.items():
            if self.conditions.of[home] is Condition.AWAY:
                copies |= self._copies_of(content)

        def read(tensor: Tensor) -> Tensor:
            copy = copies.get(tensor.untyped_storage()._cdata)
            if copy is None:
                return tensor
            found = torch.empty(0, dtype=tensor.dtype)
            return found.set_(copy, tensor.storage_offset(), tensor.shape, tensor.stride())

        return read

    def _copies_of(self, content: _Content) -> dict[int, torch.UntypedStorage]:
        """Copies of the storages of a state that is away, by these storages."""
        pairs = [(torch.empty(n, dtype=torch.uint8).untyped_storage(), n) for _, n in content.storages]
        self._mover.settle(self._mover.copy(pairs, content.slots, outward=False, paced=False))
        return {one._cdata: copy for (one, _), (copy, _) in zip(content.storages, pairs, strict=True)}

    # ---------------------------------------------------------------- actions

    def carry_out(self, action: Action, updates: Updates) -> None:
        """Carry out an OFFLOAD, a RELOAD or the join of one.

        Raises:
            UsageError: the action does not fit what has been done with the state, or the state is not as planned.
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
        """Find the storages of a state, each once, and check that they are as it was planned."""
        kept = content.kept
        content.storages = storages_of(self._tensors(content, updates), f"{action} cannot move {kept}")
        nbytes = sum(nbytes for _, nbytes in content.storages)
        if nbytes > content.planned or (nbytes != content.planned and updates.is_whole(kept)):
            why = "it is not kept in tensors of the optimizer's state, or it changes its size"
            raise UsageError(
                f"{action}: {kept} takes {nbytes} bytes, but by the plan {content.planned}: "
                f"{why if kept.kind == 'optimizer' else 'several tensors share their memory, or it changes its size'}; "
                "leave it where it is, or profile and plan it again"
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
        """A state has arrived at its home: its memory on the device is freed.

        Gradients for an update there are dropped, and seen at their home instead.
        """
        layers = content.kept.layers
        if content.kept.kind == "gradients" and self._moves.updated_elsewhere(layers):
            own = [parameter for parameter in updates.owned(layers) if parameter.grad is not None]
            views = self._views(content, [p.grad for p in own if p.grad is not None])
            there = {p: view for p, view in zip(own, views, strict=True) if view is not None}
            self._sent[layers] = Gradients(there, partial(self._mover.settle, content.copy))
            content.storages = []
            for parameter in own:
                parameter.grad = None
        else:
            self._free(content)

    def _reload(self, content: _Content, updates: Updates, *, stale: bool) -> None:
        """Give a state memory, unless it has kept it because it is only `stale`, and start copying back."""
        if stale:
            content.storages = storages_of(self._tensors(content, updates))
        for storage, nbytes in content.storages:
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)
                self._mover.resized(storage)
        content.copy = self._mover.copy(content.storages, content.slots, outward=False)

    # ---------------------------------------------------------------- updates

    def update(self, action: Action, layers: Layers) -> None:
        """These layers are updated on the device.

        Raises:
            UsageError: another place updates some of them, or what they need is not on the device.
        """
        self.conditions.update(action, layers)
        for content in self._contents.values():
            start, stop = content.kept.layers
            content.changed |= start < layers[1] and layers[0] < stop

    def update_elsewhere(self, action: Action, layers: Layers, updates: Updates) -> None:
        """Begin an update at a place, or join it.

        Raises:
            UsageError: the gradients are not there, or the parameters are not on the device.
        """
        self.conditions.update_elsewhere(action, layers)
        if action.wait:
            updates.end_elsewhere(layers, self._started.pop(layers))
        else:
            seconds = self._seconds.get(layers, 0.0)
            self._started[layers] = updates.start_elsewhere(layers, self._sent.pop(layers), seconds)

    # ---------------------------------------------------------------- after a failed step

    def abandon(self, updates: Updates) -> None:
        """All is at rest again after a step has failed: what was away for the step is away, and gradients are gone."""
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
        """Copy tensors to their home, in no time of a link. They are there when this returns."""
        content = self._contents[home]
        refusal = f"the plan moves {content.kept}" if self._moves.begins_away(content.kept) else ""
        content.storages = storages_of(tensors, refusal)
        if sum(nbytes for _, nbytes in content.storages) > content.planned:
            raise UsageError(
                f"{content.kept} takes more than the {content.planned} bytes of the plan: profile and plan it again"
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
        """Tensors of the host like these, over the memory of a home there; None where it has none, as in a dry run."""
        places, at = dict[int, tuple[int, int]](), 0
        for storage, nbytes in storages_of(tensors):
            places[storage._cdata] = at, nbytes
            at += nbytes
        return [_view(content.slots[0][1], *places[t.untyped_storage()._cdata], t) for t in tensors]


def storages_of(tensors: Sequence[Tensor], refusal: str = "") -> Storages:
    """The storages of tensors with their bytes, each once.

    Raises:
        UsageError: the memory of one could not be freed, because it belongs to something else than torch; it begins
            with the `refusal`. Without one, nothing is to be freed.
    """
    found: dict[int, tuple[torch.UntypedStorage, int]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if refusal and not storage.resizable():
            raise UsageError(
                f"{refusal}: its memory belongs to something else than torch, such as an array of numpy; leave it "
                "where it is"
            )
        found.setdefault(storage._cdata, (storage, storage.nbytes()))
    return list(found.values())


def _view(slot: Slot, at: int, nbytes: int, like: Tensor) -> Tensor | None:
    """A tensor of the host like another one, over a slot in which the other one's storage begins at byte `at`."""
    if not slot.address or not nbytes:
        return None if not slot.address and nbytes else torch.empty_like(like, device="cpu")
    memory = (ctypes.c_char * nbytes).from_address(slot.address + at)
    flat = torch.frombuffer(memory, dtype=like.dtype, count=nbytes // like.element_size())
    return flat.as_strided(like.shape, like.stride(), like.storage_offset())
