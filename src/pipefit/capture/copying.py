"""Deep copies of modules, with every tensor in them replaced: parameters, buffers, and whatever else holds one.

A plain `copy.deepcopy` fails on tensors that were computed, such as the weight that old weight norm keeps in a module,
and on real tensors and random generators under a fake mode. It also loses the hooks of parameters, and leaves functions
as they are: a hook on the forward that writes into a dictionary of the module, or a lambda over self, would reach the
original from the copy.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from pipefit.capture.storages import flat, placed, storage_key

# Shapes of trees never change, and torch warns of every copy of one
_AS_IT_IS = {type(pytree.tree_structure(tree)): lambda spec, memo: spec for tree in ((), 0)}
_PLAIN = frozenset({type(None), bool, int, float, str})  # of these copies are the same objects


def copied(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """A deep copy of `module` in which each tensor is what `convert` makes of it.

    Parameters stay parameters, with their hooks. Other tensors require no gradient in the copy, and lie in one storage
    where they did. Functions that hold a part of the module, or a container in one of its attributes, hold the copy's.
    """
    storages: dict[int, Tensor] = {}
    own = set(map(id, _own(module)))

    def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(tensor) not in memo:
            if isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = nn.Parameter(convert(tensor), requires_grad=tensor.requires_grad)
                copy_hooks(tensor, memo[id(tensor)], memo)
            else:
                memo[id(tensor)] = _converted(tensor, convert, storages)
        found: Tensor = memo[id(tensor)]
        return found

    def function(original: FunctionType, memo: dict[int, Any]) -> FunctionType:
        return _function(original, memo, own) if _reaches(original, own, set()) else original

    with (
        mock.patch.object(Tensor, "__deepcopy__", deepcopy),
        mock.patch.object(nn.Parameter, "__deepcopy__", deepcopy),
        mock.patch.dict(copy._deepcopy_dispatch, {**_COPIED, torch.Generator: _generator, FunctionType: function}),  # type: ignore[attr-defined]
    ):
        return copy.deepcopy(module)


# -------------------------------------------------------------------- tensors


def hooks_of(parameter: nn.Parameter) -> tuple[Any, ...]:
    """The hooks on the gradient of `parameter`, and behind the sum of its gradients."""
    on_gradient, behind = _hooks(parameter)
    return *on_gradient, *behind


def _hooks(parameter: nn.Parameter) -> tuple[list[Any], list[Any]]:
    """The hooks on the gradient of `parameter`, and those behind the sum of its gradients."""
    on_gradient: Any = parameter._backward_hooks
    behind: Any = parameter._post_accumulate_grad_hooks
    return list((on_gradient or {}).values()), list((behind or {}).values())


def copy_hooks(parameter: nn.Parameter, made: nn.Parameter, memo: dict[int, Any]) -> None:
    """Give `made`, the copy of `parameter`, its hooks."""
    on_gradient, behind = _hooks(parameter)
    for hook in on_gradient:
        made.register_hook(copy.deepcopy(hook, memo))  # type: ignore[no-untyped-call]
    for hook in behind:
        made.register_post_accumulate_grad_hook(copy.deepcopy(hook, memo))  # type: ignore[no-untyped-call]


def _converted(tensor: Tensor, convert: Callable[[Tensor], Tensor], storages: dict[int, Tensor]) -> Tensor:
    """What `convert` makes of `tensor`, in the storage that it made of the tensor's; `storages` has those so far."""
    if tensor.layout != torch.strided or type(tensor) not in (Tensor, FakeTensor):
        return convert(tensor)
    key = storage_key(tensor)
    if key not in storages and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        made = convert(tensor)
        storages[key] = flat(made)
        return made
    if key not in storages:
        with _disable_current_modes():
            whole = flat(tensor.detach())
        storages[key] = convert(whole)
    return placed(tensor, storages[key])


def _mapping(mapping: dict[Any, Any], memo: dict[int, Any]) -> dict[Any, Any]:
    """A copy of a dictionary. A module has two dozen plain attributes, of which `copy` would call a function each."""
    made: dict[Any, Any] = {}
    memo[id(mapping)] = made  # before what it holds, which may hold it
    for name, value in mapping.items():
        own = name if type(name) in _PLAIN else copy.deepcopy(name, memo)
        made[own] = value if type(value) in _PLAIN else copy.deepcopy(value, memo)
    return made


def _ordered(mapping: OrderedDict[Any, Any], memo: dict[int, Any]) -> object:
    """A copy of an ordered dictionary. A module has a dozen of them for its hooks, nearly all of them empty."""
    if mapping or vars(mapping):
        return copy._reconstruct(mapping, memo, *mapping.__reduce_ex__(4))  # type: ignore[attr-defined]
    return OrderedDict[Any, Any]()


def _set(members: set[Any], memo: dict[int, Any]) -> set[Any]:
    """A copy of a set."""
    return {copy.deepcopy(member, memo) for member in members}


_COPIED: dict[type, Callable[..., Any]] = {**_AS_IT_IS, dict: _mapping, OrderedDict: _ordered, set: _set}


def _generator(generator: torch.Generator, memo: dict[int, Any]) -> torch.Generator:
    with _disable_current_modes():
        return generator.clone_state()


# -------------------------------------------------------------------- functions


def _own(module: nn.Module) -> Iterator[object]:
    """What functions in `module` may hold of it: its parts, their tensors, and containers in their attributes."""
    for part in module.modules():
        yield part
        for value in vars(part).values():
            if isinstance(value, dict | list | set | Tensor):
                yield value
    yield from module.parameters()
    yield from module.buffers()


def _held(function: FunctionType) -> Iterator[object]:
    """What a function holds: the contents of its closure, and its defaults."""
    yield from (cell.cell_contents for cell in function.__closure__ or () if not is_empty(cell))
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _reaches(held: object, own: set[int], met: set[int]) -> bool:
    """Whether it is one of `own`, or a function or method that holds one; `met` are the functions so far."""
    if isinstance(held, MethodType):
        return id(held.__self__) in own
    if not isinstance(held, FunctionType):
        return id(held) in own
    if id(held) in met:
        return False
    met.add(id(held))
    return any(_reaches(one, own, met) for one in _held(held))


def _function(original: FunctionType, memo: dict[int, Any], own: set[int]) -> FunctionType:
    """A copy of a function that holds copies of what it holds of the module, and all else as it is."""

    def value(held: object) -> Any:
        return copy.deepcopy(held, memo) if _reaches(held, own, set()) else held

    cells = original.__closure__ or ()
    for cell in cells:
        memo.setdefault(id(cell), cell if is_empty(cell) else CellType())  # several functions may share one
    made = FunctionType(
        original.__code__, original.__globals__, original.__name__, None, tuple(memo[id(cell)] for cell in cells)
    )
    memo[id(original)] = made  # before what it holds, which may hold it
    for cell in cells:
        if is_empty(memo[id(cell)]) and not is_empty(cell):
            memo[id(cell)].cell_contents = value(cell.cell_contents)
    made.__defaults__ = tuple(map(value, original.__defaults__)) if original.__defaults__ else None
    made.__kwdefaults__ = {name: value(held) for name, held in (original.__kwdefaults__ or {}).items()}
    made.__dict__.update(original.__dict__)
    made.__qualname__, made.__module__ = original.__qualname__, original.__module__
    return made


def is_empty(cell: CellType) -> bool:
    """Whether a variable around a function has no value yet."""
    try:
        cell.cell_contents  # noqa: B018 -- reading an empty one raises
    except ValueError:
        return True
    return False
