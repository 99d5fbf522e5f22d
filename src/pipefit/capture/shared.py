"""Parameters that several layers of a chain use: tied embeddings, layers that share their weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from pipefit.capture.constants import constants

Place = tuple[int, str]  # the number of a layer, and the parameter's name there


@dataclass(frozen=True, slots=True)
class Shared:
    """One parameter, and every place that uses it."""

    parameter: nn.Parameter
    places: tuple[Place, ...]

    @property
    def users(self) -> tuple[int, ...]:
        """The layers, rising, each once."""
        return tuple(sorted({layer for layer, _ in self.places}))


def shared_parameters(modules: Sequence[nn.Module]) -> tuple[Shared, ...]:
    """The parameters that more than one of `modules` uses, in the order in which they are first met."""
    places: dict[int, list[Place]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for number, module in enumerate(modules):
        for name, parameter in module.named_parameters(remove_duplicate=False):
            parameters[id(parameter)] = parameter
            places.setdefault(id(parameter), []).append((number, name))
    found = (Shared(parameters[key], tuple(where)) for key, where in places.items())
    return tuple(shared for shared in found if len(shared.users) > 1)


def give_own_copies(modules: Sequence[nn.Module], shared: Shared, users: Sequence[int]) -> nn.Parameter:
    """A new parameter with the value of `shared`, put in its place in the layers `users`."""
    own = nn.Parameter(shared.parameter.detach().clone(), requires_grad=shared.parameter.requires_grad)
    for layer, name in shared.places:
        if layer in users:
            path, _, attribute = name.rpartition(".")
            setattr(modules[layer].get_submodule(path), attribute, own)
    return own


def own_module(part: nn.Module, met: set[int]) -> nn.Module:
    """`part`, or a copy of it that holds the same tensors, if the chain has it or one of its parameters already.

    So layers are distinct, and a stage may put its own copy of a shared parameter into one without changing `part`.
    `met` are the modules and parameters that the chain has, and becomes those that it has then.
    """
    own = {id(part), *map(id, part.parameters())}
    is_known = not met.isdisjoint(own)
    met |= own
    return copy_with_tensors(part) if is_known else part


def copy_with_tensors(part: nn.Module) -> nn.Module:
    """A copy of `part` that holds the same tensors."""
    tensors = (*part.parameters(), *part.buffers(), *constants(part))
    return copy.deepcopy(part, {id(tensor): tensor for tensor in tensors})
