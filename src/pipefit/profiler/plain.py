"""What a forward may count in: numbers, texts, flags, containers of them, random generators of Python and NumPy.

They are attributes of a module, of its class or of another object, variables of the functions that these hold
(closures), and variables of the Python module that a class or function names (globals); and whether a parameter is
trained. A forward that changes one of them may compute something else when it runs again. Tensors are not plain. What
lies deep inside, or in an object of a C extension, is not seen, nor are globals of functions that a forward calls.
Microseconds an attribute.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipefit.capture.copying import is_empty

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_CONTAINERS = (list, tuple, deque, set, frozenset)
_OPAQUE = (type, ModuleType, nn.Module)
_LIBRARIES = ("torch", "pipefit", "builtins")  # whose classes and functions count nothing
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
    return {f"{path}.{name}".removeprefix("."): item for path, part in parts for name, item in _attributes(part)}


def _attributes(part: object) -> Iterator[tuple[str, object]]:
    """Those of one module, or of another object or function, its class's and the globals that it names among them."""
    own = getattr(part, "__dict__", {})
    classes = [each for each in type(part).__mro__ if not _of_a_library(each)]
    functions = [part, *(item for each in classes for item in vars(each).values())]
    for name, item in (*_countable((n, i) for each in classes for n, i in vars(each).items()), *_globals(functions)):
        yield name, comparable(item)
    yield from ((name, comparable(item)) for name, item in own.items() if name not in _REGISTERED)
    if isinstance(part, nn.Module):
        yield from ((f"{name}.requires_grad", p.requires_grad) for name, p in part.named_parameters(recurse=False))
    if isinstance(part, FunctionType):
        yield from ((name, comparable(item)) for name, item in _closure(part))


def _globals(functions: Iterable[object]) -> Iterator[tuple[str, object]]:
    """What functions may count in among the variables of their Python modules, by name."""
    for function in functions:
        if isinstance(function, FunctionType) and not _of_a_library(function):
            names = _names(function.__code__)
            yield from _countable((n, function.__globals__[n]) for n in names if n in function.__globals__)


def _names(code: CodeType) -> Iterator[str]:
    """The names that a function, and the functions inside of it, look up."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _countable(items: Iterable[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    """Those that are numbers, texts, flags or containers, without Python's own."""
    return ((n, i) for n, i in items if isinstance(i, (*_PLAIN, *_CONTAINERS, Mapping)) and not n.startswith("__"))


def _closure(function: FunctionType) -> list[tuple[str, object]]:
    """The variables around a function, by name, that have a value."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [(name, cell.cell_contents) for name, cell in cells if not is_empty(cell)]


def _of_a_library(item: Any) -> bool:
    return str(getattr(item, "__module__", None)).partition(".")[0] in _LIBRARIES


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
    return _Same(item), comparable(_inside(item), depth - 1)


def _inside(item: Any) -> Mapping[str, object]:
    """What an object has, or a function holds, by name."""
    match item:
        case MethodType():
            return {"self": item.__self__}
        case partial():
            return {"func": item.func, "args": item.args, "keywords": item.keywords}
        case FunctionType():
            return {} if _of_a_library(item) else dict(_closure(item))
    found: Mapping[str, object] = getattr(item, "__dict__", {})
    return found


def changed_name(before: Plain, after: Plain) -> str | None:
    """The first attribute that has changed, is new or is gone."""
    names = dict.fromkeys((*before, *after))
    return next((name for name in names if before.get(name, ...) != after.get(name, ...)), None)
