"""What a loss keeps between its calls, such as a count or a centre, put back after it has run over fake tensors.

A layer is copied before it runs over fake tensors. A loss may be any function, of which there is no copy, and training
would begin with the count that a profile has left. What it keeps is looked for in its attributes, in the variables
around it (closures), and in lists, dictionaries, sets and objects in these, six levels down. Microseconds each.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from pipefit.capture.copying import is_empty

_DEPTH = 6
_LEAVES = (int, float, complex, str, bytes, type(None), type, ModuleType)


@contextmanager
def left_as_found(item: object) -> Iterator[None]:
    """Inside, `item` may change what it keeps; afterwards it keeps what it did. Numbers in tensors stay."""
    undone = [undo for one in reachable(item) for undo in _undoing(one)]
    try:
        yield
    finally:
        for undo in undone:
            undo()


def reachable(item: object) -> list[Any]:
    """`item`, and what it keeps, each once."""
    met: dict[int, object] = {}
    level: list[Any] = [item]
    for _ in range(_DEPTH + 1):
        level = [one for one in level if id(one) not in met and not isinstance(one, _LEAVES)]
        met |= {id(one): one for one in level}
        level = [inner for one in level for inner in _inside(one)]
    return list(met.values())


def _inside(item: Any) -> list[Any]:
    """What an object keeps, one level down."""
    match item:
        case Tensor():
            return []
        case nn.Module():
            return [vars(part) for part in item.modules()]
        case dict():
            return list(item.values())
        case list() | tuple() | deque() | set() | frozenset():
            return list(item)
        case MethodType():
            return [item.__self__, item.__func__]
        case partial():
            return [item.func, item.args, item.keywords]
        case FunctionType():
            return [*(item.__closure__ or ()), vars(item)]
        case CellType():
            return [] if is_empty(item) else [item.cell_contents]
    return [vars(item)] if hasattr(item, "__dict__") else []


def _undoing(item: Any) -> Iterator[Callable[[], object]]:
    """What puts back what `item` itself keeps now."""
    match item:
        case dict():
            yield partial(_refill, item, dict(item), item.update)
        case list() | deque():
            yield partial(_refill, item, list(item), item.extend)
        case set():
            yield partial(_refill, item, set(item), item.update)
        case CellType() if not is_empty(item):
            yield partial(setattr, item, "cell_contents", item.cell_contents)
        case random.Random():
            yield partial(item.setstate, item.getstate())
        case np.random.RandomState():
            yield partial(item.set_state, item.get_state())
        case np.random.Generator():
            yield partial(setattr, item.bit_generator, "state", item.bit_generator.state)
        case np.ndarray():
            yield partial(np.copyto, item, item.copy())


def _refill(item: Any, had: Any, fill: Callable[[Any], object]) -> None:
    """Put what a container `had` into it again, unless that is what it has."""
    if list(map(id, _parts(item))) != list(map(id, _parts(had))):
        item.clear()
        fill(had)


def _parts(item: Any) -> list[object]:
    """What is in a container, with the keys of a dictionary."""
    return [*item, *item.values()] if isinstance(item, dict) else list(item)
