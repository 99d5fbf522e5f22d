"""Checks of the caller's contexts and batches, and protection of the caller's module.

Training records a graph under `torch.no_grad()` too. Errors name what a pipeline cannot do: train inside
inference mode, autocast, saved-tensor hooks, fake tensors or with another default device; return gradients
for the tensors of a batch.
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

from pipefit.capture.copying import copy_of, is_empty
from pipefit.capture.refusals import refuse_module
from pipefit.capture.structure import named_tensors
from pipefit.capture.task import Task
from pipefit.errors import UsageError
from pipefit.torch_internals import saved_tensors_hooks_on_top
from pipefit.torch_internals.fake_tensors import FakeTensor, FakeTensorMode, active_fake_mode

# ---- State that a loss keeps between its calls
#
# Layers are copied before they run over fake tensors. A loss may be any function, which cannot be copied, so
# its state (a count, a center) is restored instead. State is looked for in attributes, closures, lists,
# dictionaries, sets and objects, six levels deep.

_DEPTH = 6
_LEAVES = (int, float, complex, str, bytes, type(None), type, ModuleType)


@contextmanager
def left_as_found(item: object) -> Iterator[None]:
    """Restore the state of `item` on exit. The values in tensors are not restored."""
    undone = [undo for one in reachable(item) for undo in _undoing(one)]
    try:
        yield
    finally:
        for undo in undone:
            undo()


def reachable(item: object) -> list[Any]:
    """Return `item` and the objects that it holds, each once, six levels deep."""
    met: dict[int, object] = {}
    level: list[Any] = [item]
    for _ in range(_DEPTH + 1):
        level = [one for one in level if id(one) not in met and not isinstance(one, _LEAVES)]
        met |= {id(one): one for one in level}
        level = [inner for one in level for inner in _inside(one)]
    return list(met.values())


def _inside(item: Any) -> list[Any]:
    """Return the objects that `item` holds directly."""
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
    """Yield functions that restore what `item` itself holds now."""
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
    """Restore the contents of a container to `had`, unless they are unchanged."""
    if list(map(id, _parts(item))) != list(map(id, _parts(had))):
        item.clear()
        fill(had)


def _parts(item: Any) -> list[object]:
    """Return the members of a container; of a dictionary, keys and values."""
    return [*item, *item.values()] if isinstance(item, dict) else list(item)


# ---- Contexts, batches and copies of the caller's


@contextmanager
def recording(what: str) -> Iterator[None]:
    """Record gradients in the body, even if the caller turned autograd off.

    Raises:
        UsageError: the caller is in a context that changes training. The message begins with `what`.
    """
    if torch.is_inference_mode_enabled():
        raise UsageError(
            f"{what} does not work inside torch.inference_mode(), because no graph can be made there: leave "
            "it"
        )
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise UsageError(
            f"{what} inside torch.autocast would differ from the plan: leave autocast and use Task(..., "
            "precision='mixed-bfloat16') or 'mixed-float16', which plans support"
        )
    if saved_tensors_hooks_on_top(False) is not None:
        raise UsageError(
            f"{what} inside hooks on saved tensors (torch.autograd.graph.save_on_cpu, saved_tensors_hooks) "
            "would differ from the plan: leave the hooks, because the plan decides about offloading and "
            "recomputation"
        )
    refuse_elsewhere(what)
    with torch.enable_grad():
        yield


def refuse_elsewhere(what: str) -> None:
    """Check that the caller is not in a fake mode, and that the default device is the CPU.

    pipefit makes tensors on the default device, where a plan would not have them; fake tensors have no
    values.

    Raises:
        UsageError: a fake mode is active, or the default device is not the CPU. The message begins with
            `what`.
    """
    if _is_callers(active_fake_mode()):
        raise UsageError(
            f"{what} does not work inside a FakeTensorMode, because tensors hold no numbers there: leave "
            "it, or use pipefit.certify for a dry run"
        )
    if torch.get_default_device().type != "cpu":
        raise UsageError(
            f"{what} with a default device other than the CPU (torch.set_default_device, torch.device) "
            "would differ from the plan, which chooses the device of every tensor: put `with "
            "torch.device('cpu'):` around it"
        )


def is_callers_fake(tensor: Tensor) -> bool:
    """Return whether a tensor is fake in a mode of the caller's, not of pipefit's."""
    return isinstance(tensor, FakeTensor) and _is_callers(tensor.fake_mode)


def _is_callers(mode: FakeTensorMode | None) -> bool:
    """Return whether the caller entered `mode`; pipefit's modes are of subclasses."""
    return type(mode) is FakeTensorMode


@contextmanager
def undisturbed() -> Iterator[None]:
    """Record gradients without autocast or inference mode in the body, for training that began before."""
    off = [torch.autocast(device, enabled=False) for device in ("cpu", "cuda")]
    with torch.inference_mode(mode=False), off[0], off[1], torch.enable_grad():
        yield


def refuse_gradients(batch: tuple[Any, Any], name: str) -> None:
    """Check that no tensor of a batch requires a gradient: a pipeline returns none to the caller.

    Raises:
        UsageError: a tensor does. The message says which one, and what to do.
    """
    for what, tensor in named_tensors(batch):
        if tensor.requires_grad:
            raise UsageError(
                f"{what} of a batch of {name} requires a gradient, but a pipeline returns no gradient to "
                "the caller: pass its detach(), or, if a trainable module computed it, make that module "
                "part of the task's module"
            )


def on_a_copy(task: Task) -> Task:
    """Return `task` with a copy of its module, without gradients; the caller's module does not change.

    A task whose module is a function is returned as it is: every call builds a new module.
    """
    if not isinstance(task.module, nn.Module):
        return task
    refuse_module(task.module, task.name)
    return replace(task, module=copy_of(task.module, task.name, lambda tensor: tensor.detach().clone()))
