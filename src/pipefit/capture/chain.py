"""A chain of layers: what every other part of pipefit means by a model.

Layers are run one after the other; each takes what the one before returned, a tensor or a tuple of tensors.
"""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pipefit.capture.shared import shared_parameters
from pipefit.capture.task import Task
from pipefit.errors import UsageError

Values = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class ChainLayer:
    """One layer: its name in the model, and the module."""

    name: str
    module: nn.Module

    def __call__(self, values: Values) -> Values:
        """What the layer makes of the values from the layer before: of the tensor, or of the tuple of several."""
        return as_values(self.module(single(values)), self.name)


@dataclass(frozen=True, slots=True)
class Chain:
    """A model as layers in order."""

    name: str
    layers: tuple[ChainLayer, ...]

    @property
    def fingerprint(self) -> str:
        """A digest of layer names, classes and the shapes and dtypes of parameters: the same for the same model,
        anywhere.
        """
        digest = hashlib.sha256()
        for layer in self.layers:
            digest.update(f"{layer.name}:{type(layer.module).__qualname__};".encode())
            for name, tensor in (*layer.module.named_parameters(), *layer.module.named_buffers()):
                digest.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype};".encode())
        for shared in shared_parameters([layer.module for layer in self.layers]):
            digest.update(f"shared:{shared.places};".encode())
        return digest.hexdigest()[:16]


def capture(task: Task) -> Chain:
    """The chain of a task's module, built here and now.

    Raises:
        UsageError: not an `nn.Sequential`, or without layers.
    """
    module = task.build()
    if not isinstance(module, nn.Sequential):
        raise UsageError(
            f"{task.name} is a {type(module).__name__}; pipefit takes an nn.Sequential whose layers pass a tensor or a "
            "tuple of tensors: "
            "wrap the model's parts in one, in the order they run"
        )
    if not len(module):
        raise UsageError(f"{task.name} has no layers")
    met: set[int] = set()
    parts = ((name, part) for name, part in module._modules.items() if part is not None)
    return Chain(task.name, tuple(ChainLayer(name, _own_module(part, met)) for name, part in parts))


def single(values: Values) -> Tensor | Values:
    """What a layer or a user's function expects: the tensor itself when there is one, else the tuple."""
    return values[0] if len(values) == 1 else values


def as_values(outputs: Any, where: str) -> Values:
    """`outputs` as a tuple of tensors.

    Raises:
        UsageError: something other than a tensor or a tuple of tensors.
    """
    values = outputs if isinstance(outputs, tuple) else tuple(outputs) if isinstance(outputs, list) else (outputs,)
    strange = next((value for value in values if not isinstance(value, Tensor)), None)
    if strange is not None:
        raise UsageError(f"{where} returns a {type(strange).__name__}; layers pass a tensor or a tuple of tensors")
    return values


def _own_module(part: nn.Module, met: set[int]) -> nn.Module:
    """`part`, or, if the chain has it already, a twin with the same parameters and buffers: each layer is itself."""
    if id(part) not in met:
        met.add(id(part))
        return part
    return copy.deepcopy(part, {id(tensor): tensor for tensor in (*part.parameters(), *part.buffers())})
