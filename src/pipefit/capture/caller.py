"""What the caller's own contexts and batches may be, and how the caller's module is left as it is.

Training records a graph under `torch.no_grad()` too. What a pipeline cannot do is refused by name: training inside
inference mode, autocast, hooks on saved tensors, fake tensors or another default device; gradients for the tensors of a
batch.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from pipefit.capture.copying import is_empty
from pipefit.capture.refused import copy_of, refuse_module
from pipefit.capture.task import Task
from pipefit.errors import UsageError

# ----------------------------------------------------------------------------------------------------
# What a loss keeps between its calls, such as a count or a centre, put back after it has run over fake
# tensors.
#
# A layer is copied before it runs over fake tensors. A loss may be any function, of which there is no copy,
# and training would begin with the count that a profile has left. What it keeps is looked for in its
# attributes, in the variables around it (closures), and in lists, dictionaries, sets and objects in these,
# six levels down. Microseconds each.

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


# ----------------------------------------------------------------------------------------------------


@contextmanager
def recording(what: str) -> Iterator[None]:
    """Inside, autograd records, whether or not the caller turned it off.

    Raises:
        UsageError: the caller is in a context under which training is another; begins with `what`.
    """
    if torch.is_inference_mode_enabled():
        raise UsageError(
            f"{what} inside torch.inference_mode() is not possible, for no graph can be made there: leave it"
        )
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise UsageError(
            f"{what} inside torch.autocast is not what the plan says: leave it, and use Task(..., "
            "precision='mixed-bfloat16') or 'mixed-float16', which plans know"
        )
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        raise UsageError(
            f"{what} inside hooks on saved tensors (torch.autograd.graph.save_on_cpu, saved_tensors_hooks) is not what "
            "the plan says: leave them, for plans say themselves what is moved and what is computed again"
        )
    refuse_elsewhere(what)
    with torch.enable_grad():
        yield


def refuse_elsewhere(what: str) -> None:
    """Refuse another default device than the CPU, on which numbers of ours would be made that a plan has elsewhere, and
    a mode in which there are no numbers.

    Raises:
        UsageError: there is one; begins with `what`.
    """
    if _is_callers(active_fake_mode()):
        raise UsageError(
            f"{what} inside a FakeTensorMode is not possible, for tensors have no numbers there: leave it; "
            "pipefit.certify is a dry run"
        )
    if torch.get_default_device().type != "cpu":
        raise UsageError(
            f"{what} with another default device than the CPU (torch.set_default_device, torch.device) is not what the "
            "plan says, which has a device for every tensor: put `with torch.device('cpu'):` around it"
        )


def is_callers_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no numbers, and is none of ours."""
    return isinstance(tensor, FakeTensor) and _is_callers(tensor.fake_mode)


def _is_callers(mode: FakeTensorMode | None) -> bool:
    """Whether a mode is one that people enter; ours are of classes of their own."""
    return type(mode) is FakeTensorMode


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside, autograd records and nothing is cast, whatever the caller is in: for training that began before."""
    off = [torch.autocast(device, enabled=False) for device in ("cpu", "cuda")]
    with torch.inference_mode(mode=False), off[0], off[1], torch.enable_grad():
        yield


def refuse_gradients(batch: tuple[Any, Any], name: str) -> None:
    """A batch whose tensors wait for a gradient cannot be trained on: none comes back through a pipeline.

    Raises:
        UsageError: one does; says where, and what to do.
    """
    for what, tree in zip(("inputs", "targets"), batch, strict=True):
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise UsageError(
                    f"{what}{pytree.keystr(path)} of a batch of {name} requires a gradient, and a pipeline returns "
                    "none to the caller: pass its detach(), or, if a module that is to be trained made it, make that "
                    "module a part of the task's"
                )


def on_a_copy(task: Task) -> Task:
    """`task` with a copy of its module, without gradients, so that the caller's own module stays as it is.

    A task whose module is a function is returned as it is: every call builds a new module.
    """
    if not isinstance(task.module, nn.Module):
        return task
    refuse_module(task.module, task.name)
    return replace(task, module=copy_of(task.module, task.name, lambda tensor: tensor.detach().clone()))
