"""Deep copies of modules, with every tensor replaced: parameters, buffers, and tensors in other attributes.

A plain `copy.deepcopy` fails on computed tensors, such as the weight that old weight norm keeps in a module,
and on real tensors and random generators under a fake mode. It also loses the hooks of parameters, and does
not copy functions: a forward hook that writes into a dictionary of the module, or a lambda over self, would
reach the original from the copy.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from types import CellType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipefit.capture.refusals import STRANGER, Refusal
from pipefit.capture.storages import flat, placed, storage_key
from pipefit.errors import UsageError, in_one_line
from pipefit.torch_internals import pytree, without_dispatch_modes
from pipefit.torch_internals.fake_tensors import FakeTensor, active_fake_mode
from pipefit.torch_internals.patches import deep_copies

# ---- Fake stand-ins for real tensors in a loss, such as class weights
#
# Tensors of a loss module move to the last stage's device; tensors of a closure stay where its script puts
# them. Both exist before and after what a plan counts, so they add nothing to it. A parameter among them is
# refused: its gradient would be on the loss's device alone, where no optimizer has the parameter. A loss may
# change its tensors or replace its buffers; these are restored.


@dataclass(slots=True)
class StoodIn:
    """Real tensors that losses used, each with its stand-in, and the buffers that losses replaced."""

    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    replaced: list[Tensor] = field(default_factory=list)


_noticing: ContextVar[StoodIn | None] = ContextVar("fakes in place of real tensors", default=None)


@contextmanager
def noticing() -> Iterator[StoodIn]:
    """Collect the stand-ins of losses that run over fake tensors in the body."""
    token = _noticing.set(result := StoodIn())
    try:
        yield result
    finally:
        _noticing.reset(token)


def standing_in(values: tuple[Tensor, ...], loss: object) -> AbstractContextManager[object]:
    """Replace real tensors that a loss combines with `values` by fake ones in the body, if `values` are
    fake.
    """
    like = values[0]
    return _standing_in(like, loss) if isinstance(like, FakeTensor) else nullcontext()


@contextmanager
def _standing_in(like: FakeTensor, loss: object) -> Iterator[None]:
    parts = loss.modules() if isinstance(loss, nn.Module) else ()
    buffers = {(part, name): buffer for part in parts for name, buffer in part._buffers.items()}
    result, stand_ins = _noticing.get(), _StandIns(like)
    try:
        with stand_ins:
            yield
    finally:
        for (part, name), buffer in buffers.items():
            if part._buffers.get(name) is not buffer:
                part._buffers[name] = buffer
                if result is not None and buffer is not None:
                    result.replaced.append(buffer)
        if result is not None:
            result.pairs.extend(stand_ins.pairs)


def left_real(tensor: Tensor) -> AbstractContextManager[object]:
    """Let a real tensor be copied to a real one under a fake mode; fake tensors stay with their mode."""
    return nullcontext() if isinstance(tensor, FakeTensor) else real()


def is_faking() -> bool:
    """Return whether a fake mode is active, so that no real tensors can be used."""
    return active_fake_mode() is not None


def real() -> AbstractContextManager[object]:
    """Make real tensors in the body, even if a fake mode is active."""
    return without_dispatch_modes() if is_faking() else nullcontext()


class _StandIns(TorchFunctionMode):
    """Gives every operation fake tensors on the device of `like` in place of real ones."""

    def __init__(self, like: FakeTensor) -> None:
        super().__init__()
        self._like = like
        self._made: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # id of a real tensor -> it, kept alive, and its stand-in

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """The real tensors used so far, with their stand-ins."""
        return list(self._made.values())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, self._stand_in, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor.requires_grad:
            raise Refusal(*STRANGER)
        if id(tensor) not in self._made:
            with without_dispatch_modes(), self._like.fake_mode:
                made = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._like.device
                )
            self._made[id(tensor)] = tensor, made
        return self._made[id(tensor)][1]


# ---- Tensors in plain attributes: neither parameters nor buffers, such as a table of frequencies
#
# They stay on a device as long as their layer, and recomputation does not copy them. A forward may not put
# other tensors into attributes: how long these live is unknown to a plan.

_REGISTERED = ("_parameters", "_buffers", "_modules")
_PLAIN = frozenset({type(None), bool, int, float, str})  # immutable: a copy is the object itself
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set})


def constants(module: nn.Module) -> list[Tensor]:
    """Return the tensors in attributes of `module` and its parts, in lists and dictionaries too, each
    once.
    """
    return list(
        {id(tensor): tensor for tensors in _attributes(module).values() for tensor in tensors}.values()
    )


def named_constants(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return these tensors with their attributes' names; several in one attribute get a number too."""
    return [
        (name if len(tensors) == 1 else f"{name}[{number}]", tensor)
        for name, tensors in _attributes(module).items()
        for number, tensor in enumerate(tensors)
    ]


def held_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return all tensors that `module` holds: parameters and buffers under all names, and plain
    attributes.
    """
    registered = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return dict([*registered, *named_constants(module)])


@contextmanager
def unchanged_constants(module: nn.Module) -> Iterator[None]:
    """Check that the forward of `module` in the body leaves its attributes' tensors in place.

    Raises:
        Refusal: the forward put another tensor into an attribute. The message names the attribute.
    """
    before = _attributes(module)
    yield
    for name, tensors in _attributes(module).items():
        if list(map(id, before.get(name, []))) != list(map(id, tensors)):
            raise Refusal(
                f"its forward stores a tensor in the attribute {name!r}, and plans do not count tensors in "
                "attributes",
                "make it a buffer that the forward updates, or call the layers in the forward of a module, "
                "which is traced; for spectral_norm and weight_norm use torch.nn.utils.parametrizations",
            )


def _attributes(module: nn.Module) -> dict[str, list[Tensor]]:
    """Return the unregistered tensors in each attribute of `module` and its parts, by the attribute's
    name.
    """
    registered = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    result = {}
    for path, part in module.named_modules():
        for name, item in vars(part).items():
            if name in _REGISTERED or type(item) in _PLAIN or (type(item) in _CONTAINERS and not item):
                continue
            leaves = pytree.tree_leaves(item)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in registered]
            if tensors:
                result[f"{path}.{name}".removeprefix(".")] = tensors
    return result


# ---- Deep copies

# TreeSpecs never change, and torch warns about every copy of one
_AS_IT_IS = {type(pytree.tree_structure(tree)): lambda spec, memo: spec for tree in ((), 0)}


def copied(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a deep copy of `module` in which each tensor is replaced by `convert(tensor)`.

    Parameters stay parameters, with their hooks; a parameter that `convert` returns is used as it is. Other
    tensors require no gradient in the copy, and share storages as the originals do. Functions that hold a
    part of the module, or a container in one of its attributes, hold the copy's.
    """
    storages: dict[int, Tensor] = {}
    own = cache(lambda: set(map(id, _own(module))))  # most modules hold no function

    def deepcopy(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
        if id(tensor) not in memo:
            if isinstance(tensor, nn.Parameter):
                memo[id(tensor)] = converted = convert(tensor)
                if not isinstance(converted, nn.Parameter):
                    memo[id(tensor)] = _as_parameter(converted, requires_grad=tensor.requires_grad)
                    copy_hooks(tensor, memo[id(tensor)], memo)
            else:
                memo[id(tensor)] = _converted(tensor, convert, storages)
        result: Tensor = memo[id(tensor)]
        return result

    def function(original: FunctionType, memo: dict[int, Any]) -> FunctionType:
        return _function(original, memo, own()) if _reaches(original, own(), set()) else original

    with deep_copies(deepcopy, {**_COPIED, torch.Generator: _generator, FunctionType: function}):
        return copy.deepcopy(module)


def _as_parameter(tensor: Tensor, *, requires_grad: bool) -> nn.Parameter:
    """Return a new tensor as a parameter, without the view of it that torch would make of a fake one."""
    if type(tensor) is not FakeTensor:
        return nn.Parameter(tensor, requires_grad=requires_grad)
    tensor.requires_grad_(requires_grad)
    vars(tensor)["_is_param"] = True
    return cast(nn.Parameter, tensor)


def copy_of(module: nn.Module, name: str, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a copy of `module`, the model `name`, with each tensor replaced by `convert(tensor)`.

    Raises:
        UsageError: the module cannot be copied. The message names the innermost part that cannot.
    """
    try:
        return copied(module, convert)
    except Exception as error:
        place, part = _innermost(module, convert)
        raise UsageError(
            f"{f'{place} of {name}' if place else name} ({type(part).__name__}) cannot be copied "
            f"({in_one_line(error)}), but profiling copies the module: give it a __deepcopy__, or pass a "
            "function that builds the module"
        ) from error


def _innermost(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> tuple[str, nn.Module]:
    """Return path and module of the last part, from outside to inside, that cannot be copied."""
    result = "", module
    for place, part in module.named_modules():
        try:
            copied(part, convert)
        except Exception:  # noqa: BLE001 -- whatever a copy of the user's part raises
            result = place, part
    return result


# -------------------------------------------------------------------- tensors


def hooks_of(parameter: nn.Parameter) -> tuple[Any, ...]:
    """Return the hooks on the gradient of `parameter`, and those after the accumulation of its gradients."""
    on_gradient, behind = _hooks(parameter)
    return *on_gradient, *behind


def _hooks(parameter: Tensor) -> tuple[list[Any], list[Any]]:
    """Return the hooks on the gradient of `parameter`, and those after the accumulation of its gradients."""
    on_gradient: Any = parameter._backward_hooks
    behind: Any = parameter._post_accumulate_grad_hooks
    return list((on_gradient or {}).values()), list((behind or {}).values())


def copy_hooks(parameter: Tensor, made: Tensor, memo: dict[int, Any] | None = None) -> None:
    """Give `made`, a copy of `parameter`, its hooks, or with a `memo` copies of them."""
    hooks = _hooks(parameter)
    on_gradient, behind = hooks if memo is None else copy.deepcopy(hooks, memo)
    for hook in on_gradient:
        made.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in behind:
        made.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _converted(tensor: Tensor, convert: Callable[[Tensor], Tensor], storages: dict[int, Tensor]) -> Tensor:
    """Convert `tensor`, placed in the converted storage of the original; `storages` has the storages so
    far.
    """
    if tensor.layout != torch.strided or type(tensor) not in (Tensor, FakeTensor):
        return convert(tensor)
    key = storage_key(tensor)
    if key not in storages and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        made = convert(tensor)
        storages[key] = flat(made)
        return made
    if key not in storages:
        with without_dispatch_modes():
            whole = flat(tensor.detach())
        storages[key] = convert(whole)
    return placed(tensor, storages[key])


def _mapping(mapping: dict[Any, Any], memo: dict[int, Any]) -> dict[Any, Any]:
    """Copy a dictionary, without a function call of `copy` for each of a module's two dozen attributes."""
    made: dict[Any, Any] = {}
    memo[id(mapping)] = made  # first: its contents may hold it
    for name, value in mapping.items():
        own = name if type(name) in _PLAIN else copy.deepcopy(name, memo)
        made[own] = value if type(value) in _PLAIN else copy.deepcopy(value, memo)
    return made


def _ordered(mapping: OrderedDict[Any, Any], memo: dict[int, Any]) -> object:
    """Copy an ordered dictionary. A module has a dozen of them for its hooks, nearly all of them empty."""
    if mapping or vars(mapping):
        return copy._reconstruct(mapping, memo, *mapping.__reduce_ex__(4))  # type: ignore[attr-defined]
    return OrderedDict[Any, Any]()


def _set(members: set[Any], memo: dict[int, Any]) -> set[Any]:
    """Copy a set."""
    return {copy.deepcopy(member, memo) for member in members}


_COPIED: dict[type, Callable[..., Any]] = {**_AS_IT_IS, dict: _mapping, OrderedDict: _ordered, set: _set}


def _generator(generator: torch.Generator, memo: dict[int, Any]) -> torch.Generator:
    with without_dispatch_modes():
        return generator.clone_state()


# -------------------------------------------------------------------- functions


def _own(module: nn.Module) -> Iterator[object]:
    """Yield what functions in `module` may hold: its parts, tensors, and containers in attributes."""
    for part in module.modules():
        yield part
        for value in vars(part).values():
            if isinstance(value, dict | list | set | Tensor):
                yield value
    yield from module.parameters()
    yield from module.buffers()


def _held(function: FunctionType) -> Iterator[object]:
    """Yield what a function holds: the contents of its closure, and its defaults."""
    yield from (cell.cell_contents for cell in function.__closure__ or () if not is_empty(cell))
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def _reaches(held: object, own: set[int], met: set[int]) -> bool:
    """Return whether `held` is one of `own`, or a function that holds one; `met` are functions so far."""
    if isinstance(held, MethodType):
        return id(held.__self__) in own
    if not isinstance(held, FunctionType):
        return id(held) in own
    if id(held) in met:
        return False
    met.add(id(held))
    return any(_reaches(one, own, met) for one in _held(held))


def _function(original: FunctionType, memo: dict[int, Any], own: set[int]) -> FunctionType:
    """Copy a function; parts of the module that it holds are copied too, other objects are not."""

    def value(held: object) -> Any:
        return copy.deepcopy(held, memo) if _reaches(held, own, set()) else held

    cells = original.__closure__ or ()
    for cell in cells:
        memo.setdefault(
            id(cell), cell if is_empty(cell) else CellType()
        )  # several functions may share one cell
    function = FunctionType(
        original.__code__,
        original.__globals__,
        original.__name__,
        None,
        tuple(memo[id(cell)] for cell in cells),
    )
    memo[id(original)] = function  # first: its contents may hold it
    for cell in cells:
        if is_empty(memo[id(cell)]) and not is_empty(cell):
            memo[id(cell)].cell_contents = value(cell.cell_contents)
    function.__defaults__ = tuple(map(value, original.__defaults__)) if original.__defaults__ else None
    function.__kwdefaults__ = {name: value(held) for name, held in (original.__kwdefaults__ or {}).items()}
    function.__dict__.update(original.__dict__)
    function.__qualname__, function.__module__ = original.__qualname__, original.__module__
    return function


def is_empty(cell: CellType) -> bool:
    """Return whether a closure's variable does not have a value yet."""
    try:
        cell.cell_contents  # noqa: B018 -- reading an empty one raises
    except ValueError:
        return True
    return False
