"""Parameters that only their owners keep: on other replicas they have memory while they are gathered.

They are storages that lose their memory, as what is moved away is (`pipefit.runtime.moving`). So graphs and layers hold
the tensors all the time, and see their numbers again when they have come from their owner.

Half-precision copies have memory while their parameters are gathered, on the owner too. A parameter that layers read
through its copy alone has none on the others: the owner casts it, and the copy travels. That is what the profile has
seen; a layer that does otherwise here, as in evaluation or with another torch, is refused in its first forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pipefit.actions import Action, Kind
from pipefit.capture.chain import ChainLayer
from pipefit.capture.storages import needed_bytes, storage_key
from pipefit.cost.shares import Gathered, Share
from pipefit.cost.states import Layers
from pipefit.errors import UsageError
from pipefit.runtime.states import storages_of
from pipefit.runtime.weight_copies import WeightCopies

_DEVICE = torch.ops.prim.device.default  # asked of fake tensors


class GatheredParameters:
    """The parameters of one replica of a stage, of which it keeps those of its own layers alone; false where it keeps
    all. `own` are those of every layer from `start` on.

    Raises:
        UsageError: the memory of a parameter is not torch's, and could not be freed.
    """

    def __init__(
        self, share: Share | None, own: Sequence[Sequence[nn.Parameter]], copies: WeightCopies, start: int
    ) -> None:
        self._gathered, self._share, self._own = Gathered(share), share, own
        self._copies, self._start = copies, start
        self._storages: dict[int, list[tuple[torch.UntypedStorage, int]]] = {}  # by layer, of what is gathered
        self._absent: set[int] = set()  # the keys of storages that never have memory here
        self._watched = {mode: WeakSet[nn.Module]() for mode in (True, False)}  # that ran forward, in training or not
        for layer, parameters in enumerate(own if self else (), start=start):
            copied: list[Tensor] = [copies.copies[id(weight)].tensor for weight in copies.own(layer)]
            others = [] if self._owns(layer) else parameters
            gathered = [parameter for parameter in others if not copies.is_cast_only(parameter)]
            refusal = "the plan divides the parameters of this stage"
            needed = {storage_key(tensor): needed_bytes(tensor) for tensor in (*gathered, *copied)}
            found = storages_of([*gathered, *copied], refusal)
            self._storages[layer] = [(one, nbytes or needed[one._cdata]) for one, nbytes in found]
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
        """What travels of every layer: the trained parameters, without their graphs; or all where only owners keep
        them, those that are read through their copies alone as these.
        """
        every = self._own[layers[0] - self._start : layers[1] - self._start]
        if not self:
            return [[parameter.data for parameter in own if parameter.requires_grad] for own in every]
        return [list(map(self._travelling, own)) for own in every]

    def _travelling(self, parameter: nn.Parameter) -> Tensor:
        cast_only = self._copies.is_cast_only(parameter)
        return self._copies.copies[id(parameter)].tensor if cast_only else parameter.data

    def carry_out(self, action: Action, layers: Layers) -> list[torch.UntypedStorage]:
        """Allocate what an UNSHARD brings, or free what a RESHARD does not keep; the storages that were resized.

        Copies have the values of their weights on the owner from the start of an UNSHARD on, and elsewhere behind its
        join.
        """
        found = []
        for layer in self._gathered.carry_out(action, range(*layers)):
            for storage, nbytes in self._storages[layer]:
                storage.resize_(0 if action.kind is Kind.RESHARD else nbytes)
                found.append(storage)
        for layer in range(*layers) if self else ():
            if action.kind is Kind.RESHARD:
                self._outdate(layer)
            elif action.wait is not self._owns(layer):
                self._follow(layer, came=action.wait)
        return found

    def _outdate(self, layer: int) -> None:
        for weight in self._copies.own(layer):
            self._copies.copies[id(weight)].fresh = False

    def _follow(self, layer: int, *, came: bool) -> None:
        """Let the copies of a layer's weights have their values; some `came` from the owner."""
        for weight in self._copies.own(layer):
            copy = self._copies.copies[id(weight)]
            copy.fresh = came and self._copies.is_cast_only(weight)
            copy.follow(weight)

    def watching(self, layer: ChainLayer) -> AbstractContextManager[object]:
        """Inside, a layer runs forward: its first forward must not read what is never here."""
        watched = self._watched[layer.module.training]
        if not self._absent or layer.module in watched:
            return nullcontext()
        watched.add(layer.module)
        own = {storage_key(one): name for name, one in layer.module.named_parameters()}
        return _Refusing(layer.name, {storage: own[storage] for storage in own.keys() & self._absent})

    def check(self, action: Action, layers: Layers) -> None:
        """Check that the parameters of these layers are here.

        Raises:
            UsageError: some are not.
        """
        self._gathered.check(action, range(*layers))

    def abandon(self) -> None:
        """Free what is not kept between steps."""
        self._gathered.reset()
        for layer, storages in self._storages.items():
            self._outdate(layer)
            for storage, _ in storages:
                storage.resize_(0)


class _Refusing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations of a layer that read parameters which have no memory; `absent` has their names, by storage."""

    def __init__(self, layer: str, absent: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layer, self._absent = layer, absent

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in pytree.tree_leaves((args, kwargs)) if not func.is_view and func is not _DEVICE else ():
            if isinstance(tensor, Tensor) and (name := self._absent.get(storage_key(tensor))) is not None:
                raise UsageError(
                    f"layer {self._layer} reads {name!r} as it is in {func}, and through its half-precision copy alone "
                    "in its profile, so that replicas that divide parameters have the copy alone: let the layer do the "
                    "same in training and evaluation, profile it again with this torch, or divide less "
                    '(shard="gradients")'
                )
        return func(*args, **(kwargs or {}))
