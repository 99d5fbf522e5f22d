"""Versions of a stage's weights, for updates while microbatches are in flight (`pipefit.cost.versions` says which).

The optimizer's parameters hold the newest weights and are updated in place. A microbatch never goes through them, but
through leaves: parameters of its own version, put into the layers for its forward, its second forward and its backward.
A copy of the weights is a new storage under the optimizer's parameters; the leaves keep the old one alive until the
graphs that need it are gone. So autograd never meets weights that have changed behind its back, as it silently would in
convolutions and norms if one pointed the same parameter at other data. A backward leaves its gradients on the leaves,
and they are handed to the optimizer's parameters.

Good for any layer that reads its parameters from its attributes in every forward. Costs two assignments for each
parameter and pass, and no memory beside the versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipefit.actions import Action
from pipefit.capture.chain import ChainLayer
from pipefit.capture.storages import storage_key
from pipefit.errors import UsageError

Slot = tuple[nn.Module, str, int]  # a module, the name of a parameter there, and the parameter's number


@dataclass(eq=False, slots=True)
class Version:
    """Weights that microbatches go through: a leaf for each trained parameter, and how many microbatches use them.

    A version that is not the newest any more may have `rooms` for gradients and optimizer state, by layer, which nobody
    uses. The weights of layers that are `away`, or on their way, have been moved.
    """

    leaves: list[nn.Parameter]
    users: int = 0
    rooms: dict[int, Tensor] = field(default_factory=dict)
    away: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Bound:
    """Where parameters are in layers of one specialization; the layers are kept, so that their ids stay theirs."""

    layers: Sequence[ChainLayer]
    slots: list[Slot] = field(default_factory=list)


class Weights:
    """The versions of the trained parameters of `layers`, the first of which has the number `start` in the model.

    All but the newest also take `rooms` on `device`, bytes for each layer.

    Raises:
        UsageError: a parameter has a hook, or shares its memory with another, which versions could not keep up.
    """

    def __init__(self, layers: Sequence[ChainLayer], *, start: int, rooms: Sequence[int], device: torch.device) -> None:
        self._rooms, self._device = dict(enumerate(rooms, start)), device
        self._layer_of = {id(p): n for n, layer in reversed([*enumerate(layers, start)]) for p in _trained(layer)}
        named = [(layer.name, name, p) for layer in layers for name, p in layer.module.named_parameters()]
        self._names = {id(p): f"{name} of layer {layer}" for layer, name, p in reversed(named) if p.requires_grad}
        self.parameters = list({id(p): p for _, _, p in named if p.requires_grad}.values())
        self._numbers = {id(p): number for number, p in enumerate(self.parameters)}
        self._check()
        self._bound: dict[int, _Bound] = {}
        self._newest = self._current = Version(self._leaves())

    def take(self) -> Version:
        """The version that a microbatch goes through whose forward begins."""
        self._current.users += 1
        return self._current

    def give_back(self, version: Version) -> None:
        """A microbatch has gone backward."""
        version.users -= 1

    def stash(self) -> list[Tensor]:
        """Copy the newest weights, for updates of the copy; what the version holds that was the newest until now."""
        rooms = {layer: nbytes for layer, nbytes in self._rooms.items() if nbytes}
        self._newest.rooms = {
            layer: torch.empty(nbytes, dtype=torch.uint8, device=self._device) for layer, nbytes in rooms.items()
        }
        kept: list[Tensor] = [*self._newest.leaves, *self._newest.rooms.values()]
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.data = parameter.data.clone()
        self._newest = Version(self._leaves())
        return kept

    def adopt(self) -> None:
        """Forwards go through the newest weights from now on."""
        self._current = self._newest

    def check_update(self) -> None:
        """Check that no microbatch in flight goes through the newest weights, which are about to change.

        Raises:
            UsageError: some do.
        """
        if self._newest.users:
            raise UsageError(
                f"{self._newest.users} microbatches in flight need the weights that an update would change: the "
                "program has to copy them first, with a STASH"
            )

    def updated(self) -> None:
        """The newest weights have been updated, perhaps into other memory."""
        self._newest.leaves = self._leaves()

    def storages(self, version: Version, layer: int) -> list[torch.UntypedStorage]:
        """The memory of a layer in a version; that of a shared weight belongs to the first layer that has it.

        Raises:
            UsageError: forwards or updates use the version, or a parameter is a part of other memory.
        """
        if version in (self._newest, self._current):
            raise UsageError(f"weights of layer {layer} cannot be moved: forwards or updates still use them")
        found = []
        for parameter, leaf in zip(self.parameters, version.leaves, strict=True):
            if self._layer_of[id(parameter)] == layer:
                storage = leaf.untyped_storage()
                if storage.nbytes() != leaf.nbytes or not storage.resizable():
                    raise UsageError(
                        f"parameter {self._names[id(parameter)]} cannot be moved, because it lies in memory that holds "
                        "something else or belongs to something else than torch: leave its versions where they are"
                    )
                found.append(storage)
        return [*found, version.rooms[layer].untyped_storage()] if layer in version.rooms else found

    def forget(self) -> None:
        """Nothing is in flight any more, because a step has failed."""
        self._newest = self._current = Version(self._leaves())

    @contextmanager
    def put(self, version: Version, layers: Sequence[ChainLayer]) -> Iterator[None]:
        """Inside, `layers`, in whatever specialization, have the weights of `version`."""
        slots = self._slots(layers)
        try:
            for part, name, number in slots:
                _set(part, name, version.leaves[number])
            yield
        finally:
            for part, name, number in slots:
                _set(part, name, self.parameters[number])

    @contextmanager
    def going_backward(self, version: Version, layers: Sequence[ChainLayer]) -> Iterator[None]:
        """The same for a backward, whose gradients are added to those of the optimizer's parameters.

        Raises:
            UsageError: a layer has used an optimizer's parameter itself.
        """
        _hand_over(self.parameters, version.leaves)
        with self.put(version, layers):
            yield
        for parameter in self.parameters:
            if parameter.grad is not None:
                raise UsageError(
                    f"parameter {self._names[id(parameter)]} was used past the attribute that holds it, as from a list "
                    "or another module, where it has no versions: read it from its attribute in the forward, or use "
                    "schedule 1f1b"
                )
        _hand_over(version.leaves, self.parameters)

    def _leaves(self) -> list[nn.Parameter]:
        """New parameters on the data of the optimizer's, with a count of changes of their own."""
        return [nn.Parameter(parameter.data) for parameter in self.parameters]

    def _slots(self, layers: Sequence[ChainLayer]) -> list[Slot]:
        known = self._bound.get(id(layers))
        if known is None:
            known = self._bound[id(layers)] = _Bound(layers)
            parts = {id(part): part for layer in layers for part in layer.module.modules()}
            for part in parts.values():
                for name, parameter in part._parameters.items():
                    if (number := self._numbers.get(id(parameter))) is not None:
                        known.slots.append((part, name, number))
        return known.slots

    def _check(self) -> None:
        storages: dict[int, str] = {}
        for parameter in self.parameters:
            name = self._names[id(parameter)]
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise UsageError(
                    f"parameter {name} has a hook on its gradient, which the versions of its weights would pass by: "
                    "remove it, or use schedule 1f1b"
                )
            other = storages.setdefault(storage_key(parameter), name)
            if other != name:
                raise UsageError(
                    f"parameters {other} and {name} lie in the same memory, which versions of weights would take "
                    "apart: give each memory of its own, or use schedule 1f1b"
                )


def required(weights: Weights | None, action: Action, schedule: str) -> Weights:
    """The versions of weights that an action is about, in a plan of a schedule.

    Raises:
        UsageError: the schedule has none.
    """
    if weights is None:
        raise UsageError(
            f"{action} belongs to a schedule without end, and the plan's is {schedule}: lower the plan again"
        )
    return weights


def _trained(layer: ChainLayer) -> Iterator[nn.Parameter]:
    """The parameters of a layer that are trained."""
    return (p for p in layer.module.parameters() if p.requires_grad)


def _set(part: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put a parameter into a module; modules with lists of their own, such as LSTMs, keep these up themselves."""
    if type(part).__setattr__ is nn.Module.__setattr__:
        part._parameters[name] = parameter
    else:
        setattr(part, name, parameter)


def _hand_over(giving: Sequence[nn.Parameter], taking: Sequence[nn.Parameter]) -> None:
    """Move gradients from one list of parameters to another."""
    for giver, taker in zip(giving, taking, strict=True):
        taker.grad, giver.grad = giver.grad, None
