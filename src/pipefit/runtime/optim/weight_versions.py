"""Versions of a stage's weights, for updates with microbatches in flight.

`memory.states` decides which versions exist.

The optimizer's parameters hold the newest weights and are updated in place. A microbatch uses leaves instead:
parameters of its version, put into the layers for its forward, its recomputation and its backward. A copy of
the weights is a new storage under the optimizer's parameters; the leaves keep the old one alive until the
graphs that need it are gone. So autograd never sees changed weights, which would be silently wrong in
convolutions and norms if one parameter pointed to other data. A backward leaves its gradients on the leaves,
and they are passed to the optimizer's parameters.

Works for any layer that reads its parameters from its attributes in every forward. Costs two assignments for
each parameter and pass, and no memory in addition to the versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipefit.capture import ChainLayer, storage_key
from pipefit.errors import UsageError
from pipefit.memory import Layers
from pipefit.runtime.optim.half_precision import Copied, WeightCopies, WeightCopy
from pipefit.schema.actions import COMPUTE, Action, Kind
from pipefit.texts import counted, layers_text

Slot = tuple[nn.Module, str, int]  # a module, a parameter's name there, and the parameter's number


@dataclass(eq=False, slots=True)
class Version:
    """Weights for the passes of microbatches.

    A version has a leaf for each trained parameter, and the number of users by layer. `users` are
    microbatches that still need a layer, and `copies` the half-precision copies of weights for autocast, by
    parameter number. Leaves of layers without users are None. An older version may have unused `rooms` by
    layer, in place of gradients and optimizer state. Weights of layers that are `away` have been offloaded,
    or are leaving.
    """

    leaves: list[nn.Parameter | None]
    copies: dict[int, WeightCopy]
    users: Counter[int] = field(default_factory=Counter)
    rooms: dict[int, Tensor] = field(default_factory=dict)
    away: set[int] = field(default_factory=set)


class Weights:
    """The versions of the trained parameters of `layers`, and of their `copies`.

    All versions but the newest also take `rooms` on `device`, bytes for each layer.

    Raises:
        UsageError: a parameter has a hook, or shares its memory with another, which versions do not support.
    """

    def __init__(
        self,
        layers: Sequence[ChainLayer],
        copies: WeightCopies,
        *,
        rooms: Sequence[int],
        device: torch.device,
    ) -> None:
        self._copies, start = copies, copies.start
        self._rooms, self._device = dict(enumerate(rooms, start)), device
        self._layers = range(start, start + len(layers))
        self._layer_of = {
            id(p): n for n, layer in reversed([*enumerate(layers, start)]) for p in _trained(layer)
        }
        named = [(layer.name, name, p) for layer in layers for name, p in layer.module.named_parameters()]
        self._names = {
            id(p): f"{name} of layer {layer}" for layer, name, p in reversed(named) if p.requires_grad
        }
        self.parameters = list({id(p): p for _, _, p in named if p.requires_grad}.values())
        self._numbers = {id(p): number for number, p in enumerate(self.parameters)}
        self._check()
        self._bound = dict[int, tuple[Sequence[ChainLayer], list[Slot]]]()  # by ids of the layers, kept alive
        self._newest = self._current = self._only()
        self._copied = frozenset(self._layers)  # layers that the newest version has copied

    def _only(self) -> Version:
        """Return the newest weights as the only version."""
        return Version(
            self._leaves(), {self._numbers[key]: copy for key, copy in self._copies.copies.items()}
        )

    def take(self) -> Version:
        """Return the version for a microbatch whose forward begins, and count it as a user."""
        self._current.users.update(self._layers)
        return self._current

    def give_back(self, version: Version, layers: Iterable[int]) -> None:
        """End a microbatch's use of these layers after its backward.

        Older weights are freed after their last user.
        """
        version.users.subtract(layers)
        self._drop_unused(version)

    def stash(self, layers: Layers) -> list[Tensor]:
        """Copy the newest weights of a run of layers, for updates of the copy.

        Return the previous version's tensors there.

        Raises:
            UsageError: they have been copied already, and forwards do not use the copy yet.
        """
        if self._newest is self._current:
            self._newest = Version(list(self._current.leaves), dict(self._current.copies))
            self._copied = frozenset()
        if not self._copied.isdisjoint(range(*layers)):
            raise UsageError(f"weights of {layers_text(*layers)} have already been copied")
        self._copied |= frozenset(range(*layers))
        rooms = {
            n: torch.empty(self._rooms[n], dtype=torch.uint8, device=self._device) for n in range(*layers)
        }
        self._current.rooms |= {layer: room for layer, room in rooms.items() if room.nbytes}
        kept: list[Tensor] = [room for room in rooms.values() if room.nbytes]
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters):
                if self._layer_of[id(parameter)] in range(*layers):
                    kept.append(parameter.data)
                    parameter.data = parameter.data.clone()
                    self._newest.leaves[number] = nn.Parameter(parameter.data)
            for parameter in (one for layer in range(*layers) for one in self._copies.own(layer)):
                kept.append(self._copies.renew(parameter).tensor)
                self._newest.copies[self._numbers[id(parameter)]] = self._copies.copies[id(parameter)]
        return kept

    def adopt(self) -> None:
        """Make forwards use the newest weights from now on.

        Raises:
            UsageError: some layers have not been copied.
        """
        if missing := frozenset(self._layers) - self._copied:
            raise UsageError(f"forwards cannot use new weights before the STASH of layer {min(missing)}")
        before, self._current = self._current, self._newest
        self._drop_unused(before)

    def needs_newest(self, action: Action, version: Version | None) -> bool:
        """Return whether an action needs the newest weights, which updates change.

        Only passes that use another `version`, or begin with the current one if it is another, do not.
        """
        is_pass = action.kind in COMPUTE and action.kind is not Kind.STEP
        return not is_pass or (version or self._current) is self._newest

    def check_update(self, layers: Layers) -> None:
        """Check that the newest weights of these layers, which are about to change, are without users.

        Raises:
            UsageError: microbatches in flight use them, or coming forwards would.
        """
        users = max(self._newest.users.values(), default=0)
        if users or not self._copied.issuperset(range(*layers)):
            who = f"{counted(users, 'microbatch')} in flight" if users else "later forwards"
            raise UsageError(
                f"an update would change the weights of {who}: the program must copy them first, with a STASH"
            )

    def updated(self, layers: Layers) -> None:
        """Renew the newest leaves of these layers after their update, which may have changed their memory."""
        for number, parameter in enumerate(self.parameters):
            if self._layer_of[id(parameter)] in range(*layers):
                self._newest.leaves[number] = nn.Parameter(parameter.data)

    def _drop_unused(self, version: Version) -> None:
        """Drop the layers of an older version that are without users."""
        if version in (self._newest, self._current):
            return
        for layer in self._layers:
            if not version.users[layer]:
                version.rooms.pop(layer, None)
        for number, parameter in enumerate(self.parameters):
            if not version.users[self._layer_of[id(parameter)]]:
                version.leaves[number] = None
        for layer in self._layers:
            if not version.users[layer]:
                for parameter in self._copies.own(layer):
                    version.copies.pop(self._numbers[id(parameter)], None)

    def copied(self, version: Version, parameters: Sequence[nn.Parameter]) -> Copied:
        """Return a version's leaves for these parameters, with their copies."""
        numbers = [self._numbers[id(parameter)] for parameter in parameters]
        result = [(version.leaves[number], version.copies[number]) for number in numbers]
        return [(leaf, copy) for leaf, copy in result if leaf is not None]

    def storages(self, version: Version, layer: int) -> list[torch.UntypedStorage]:
        """Return the memory of a layer in a version; a shared weight belongs to the first layer that has it.

        Raises:
            UsageError: updates would change the version, or a parameter is a part of other memory.
        """
        if version is self._newest or (version is self._current and layer not in self._copied):
            raise UsageError(
                f"weights of layer {layer} cannot be offloaded, because updates would change them: copy "
                "them first"
            )
        result = []
        for parameter, leaf in zip(self.parameters, version.leaves, strict=True):
            if self._layer_of[id(parameter)] == layer and leaf is not None:
                storage = leaf.untyped_storage()
                if storage.nbytes() != leaf.nbytes or not storage.resizable():
                    raise UsageError(
                        f"parameter {self._names[id(parameter)]} cannot be offloaded, because its memory is "
                        "shared or does not belong to torch: keep its versions on the device"
                    )
                result.append(storage)
        copied = [version.copies[self._numbers[id(parameter)]] for parameter in self._copies.own(layer)]
        result += [copy.tensor.untyped_storage() for copy in copied]
        return [*result, version.rooms[layer].untyped_storage()] if layer in version.rooms else result

    def forget(self) -> None:
        """Drop all older versions after a failed step, which leaves no microbatch in flight."""
        self._newest = self._current = self._only()
        self._copied = frozenset(self._layers)

    @contextmanager
    def put(self, version: Version, layers: Sequence[ChainLayer]) -> Iterator[None]:
        """Give `layers`, of any specialization, the weights of `version` in the context."""
        slots = self._slots(layers)
        try:
            for part, name, number in slots:
                if (leaf := version.leaves[number]) is not None:
                    _set(part, name, leaf)
            yield
        finally:
            for part, name, number in slots:
                _set(part, name, self.parameters[number])

    @contextmanager
    def going_backward(self, version: Version, layers: Sequence[ChainLayer]) -> Iterator[None]:
        """Give `layers` the weights of `version` for a backward in the context; keep its gradients.

        The gradients are added to those of the optimizer's parameters.

        Raises:
            UsageError: a layer has used an optimizer's parameter directly.
        """
        _hand_over(self.parameters, version.leaves)
        with self.put(version, layers):
            yield
        for parameter, leaf in zip(self.parameters, version.leaves, strict=True):
            if leaf is not None and parameter.grad is not None:
                raise UsageError(
                    f"parameter {self._names[id(parameter)]} was used other than through its attribute, "
                    "such as from a list or another module, which bypasses its versions: read it from its "
                    "attribute in the forward, or use schedule 1f1b"
                )
        _hand_over(version.leaves, self.parameters)

    def _leaves(self) -> list[nn.Parameter | None]:
        """Return new parameters on the data of the optimizer's, with separate version counters."""
        return [nn.Parameter(parameter.data) for parameter in self.parameters]

    def _slots(self, layers: Sequence[ChainLayer]) -> list[Slot]:
        """Return the places of parameters in layers of one specialization."""
        if id(layers) not in self._bound:
            slots = list[Slot]()
            parts = {id(part): part for layer in layers for part in layer.module.modules()}
            for part in parts.values():
                for name, parameter in part._parameters.items():
                    if (number := self._numbers.get(id(parameter))) is not None:
                        slots.append((part, name, number))
            self._bound[id(layers)] = layers, slots
        return self._bound[id(layers)][1]

    def _check(self) -> None:
        storages: dict[int, str] = {}
        for parameter in self.parameters:
            name = self._names[id(parameter)]
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise UsageError(
                    f"parameter {name} has a hook on its gradient, which weight versions would bypass: "
                    "remove it, or use schedule 1f1b"
                )
            other = storages.setdefault(storage_key(parameter), name)
            if other != name:
                raise UsageError(
                    f"parameters {other} and {name} share memory, which weight versions would separate: "
                    "give each its own memory, or use schedule 1f1b"
                )


def required(weights: Weights | None, action: Action, schedule: str) -> Weights:
    """Return the weight versions for an action, in a plan with this schedule.

    Raises:
        UsageError: the schedule has none.
    """
    if weights is None:
        raise UsageError(
            f"{action} belongs to an asynchronous schedule, but the plan uses {schedule}: lower the plan "
            "again"
        )
    return weights


def _trained(layer: ChainLayer) -> Iterator[nn.Parameter]:
    """Return the trained parameters of a layer."""
    return (p for p in layer.module.parameters() if p.requires_grad)


def _set(part: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put a parameter into a module.

    Modules with their own `__setattr__`, such as LSTMs, update their lists themselves.
    """
    if type(part).__setattr__ is nn.Module.__setattr__:
        part._parameters[name] = parameter
    else:
        setattr(part, name, parameter)


def _hand_over(giving: Sequence[nn.Parameter | None], taking: Sequence[nn.Parameter | None]) -> None:
    """Move gradients from one list of parameters to another, wherever both have a parameter."""
    for giver, taker in zip(giving, taking, strict=True):
        if giver is not None and taker is not None:
            taker.grad, giver.grad = giver.grad, None
