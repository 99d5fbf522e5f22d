"""Plain attributes of a module: numbers, texts, flags, containers of them, random generators of Python and NumPy.

A forward that changes one of them, as by counting its calls, may compute something else when it runs again. Tensors are
not plain. What lies deep inside, in a closure, or in an object of a C extension is not seen. Microseconds an attribute.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS = (list, tuple, deque, set, frozenset)
_OPAQUE = (type, ModuleType, FunctionType, MethodType, nn.Module)
_REGISTERED = ("_parameters", "_buffers", "_modules")
_DEPTH = 6  # of containers and objects inside of one another

Plain = Mapping[str, object]


class _Same:
    """Equal for one object alone, which it keeps, so that no other one is created in its place."""

    __slots__ = ("item",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, item: object) -> None:
        self.item = item

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.item is self.item


def plain_attributes(owner: object) -> Plain:
    """The attributes of a module and its parts, or of another object, by their paths, as values that can be compared.

    For a method they are those of the object that it belongs to.
    """
    owner = owner.__self__ if isinstance(owner, MethodType) else owner
    parts = owner.named_modules() if isinstance(owner, nn.Module) else [("", owner)]
    return {
        f"{path}.{name}".removeprefix("."): comparable(item)
        for path, part in parts
        for name, item in getattr(part, "__dict__", {}).items()
        if name not in _REGISTERED
    }


def comparable(item: Any, depth: int = _DEPTH) -> object:
    """What is equal as long as `item` has not changed, nor what is in it and its attributes, `depth` levels down."""
    match item:
        case Tensor():
            return Tensor
        case random.Random():
            return item.getstate()
        case np.random.Generator():
            return comparable(item.bit_generator.state)
        case np.random.RandomState():
            return comparable(item.get_state())
        case np.ndarray():
            return item.shape, item.tobytes()
    if isinstance(item, _PLAIN):
        return type(item), item
    if depth == 0 or isinstance(item, _OPAQUE):
        return _Same(item)
    if isinstance(item, Mapping):
        return tuple((comparable(key, depth - 1), comparable(value, depth - 1)) for key, value in item.items())
    if isinstance(item, _CONTAINERS):
        return type(item), tuple(comparable(part, depth - 1) for part in item)
    return _Same(item), comparable(getattr(item, "__dict__", {}), depth - 1)


def changed_name(before: Plain, after: Plain) -> str | None:
    """The first attribute that has changed, is new or is gone."""
    names = dict.fromkeys((*before, *after))
    return next((name for name in names if before.get(name, ...) != after.get(name, ...)), None)
