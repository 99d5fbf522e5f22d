"""Modules of a traced model that stay whole, because what they do depends on the values of tensors.

A trace would take one of their ways for ever. So while a model is traced, each call of such a module is one operation
of the program, and in a layer the operation calls the module itself, as a layer by hand is called: its forward is run
anew each time, and recorded by autograd. What it needs is measured as that of a layer by hand (`by_value`).

The rest of the program is fixed, and so is what it is given: as many tensors, of the same shapes and dtypes, and the
same numbers. A module of which two runs, with other values, return something else does not stay whole; one that does
so later stops training with a sentence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from pipefit.capture.by_value import Reading, assumed, otherwise, reading
from pipefit.capture.copying import copied
from pipefit.capture.custom_functions import not_kept
from pipefit.capture.refusals import LooksAtValues, Refusal
from pipefit.capture.storages import storage_key
from pipefit.capture.whole_calls import Given, nodes_of
from pipefit.errors import PipefitError, UsageError, in_one_line
from pipefit.texts import dtype_name, kind_of

Form = tuple[str, tuple[int, ...]] | int | float | str | bool | type | None  # of a tensor; plain values as they are

_PLAIN = (int, float, str, bool, type(None))
_GIVEN = (*_PLAIN, torch.dtype, torch.device)


def call_whole(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    forms: tuple[Form, ...],
    *,
    opposite: bool = False,
) -> tuple[Tensor, ...]:
    """The tensors that the forward of `module` returns.

    The target of a node, which has two arguments more behind the module: its parameters, which the operation reads, and
    its buffers, which it may change. `forms` is what it returned in the trace. `opposite` says that its forward raises
    an exception where every condition holds, so that over fake tensors none does.

    Raises:
        UsageError: it returns something else now, or changes an argument in place.
    """
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    versions = _versions(given)
    with otherwise() if opposite else nullcontext():
        leaves = pytree.tree_leaves(module.forward(*args, **kwargs))
    name = type(module).__name__
    if versions != _versions(given):
        raise UsageError(f"{name}, which stays whole in a traced model, changed an argument in place: {_REMEDY}")
    found = tuple(map(_form, leaves))
    if found != forms:
        raise UsageError(
            f"{name}, which stays whole in a traced model, returned {_words(found)}, and {_words(forms)} when the "
            f"model was traced: {_REMEDY}"
        )
    return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


_REMEDY = "let its shapes and numbers not depend on values, or give pipefit the parts instead, pipefit.chain([...])"


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _form(leaf: Any) -> Form:
    """What a returned leaf is; of something that is neither a tensor nor plain it is the class."""
    if isinstance(leaf, Tensor):
        return dtype_name(leaf.dtype), tuple(leaf.shape)
    return leaf if isinstance(leaf, _PLAIN) else type(leaf)


def _words(forms: Sequence[Form]) -> str:
    """For people."""
    return ", ".join(f"{one[0]} {one[1]}" if isinstance(one, tuple) else repr(one) for one in forms) or "nothing"


# -------------------------------------------------------------------- the trace


class _Call(NamedTuple):
    """A call during a trace: all that `call_whole` is given but tensors, and like what the tensors are returned."""

    path: str
    given: Given
    forms: tuple[Form, ...]
    opposite: bool
    results: list[Tensor]


_calls: ContextVar[list[_Call] | None] = ContextVar(
    "calls of whole modules in the trace that is going on", default=None
)

torch.library.define(
    "pipefit::whole_module", "(Tensor[] parameters, Tensor[] buffers, Tensor[] given, int call) -> Tensor[]"
)


@torch.library.register_fake("pipefit::whole_module")  # type: ignore[untyped-decorator]
def _(parameters: list[Tensor], buffers: list[Tensor], given: list[Tensor], call: int) -> list[Tensor]:
    """Tensors like those that the call returned, over fake tensors."""
    calls = _calls.get()
    assert calls is not None
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in calls[call].results]


@contextmanager
def whole_modules(root: nn.Module, paths: Collection[str]) -> Iterator[list[_Call]]:
    """Inside, the parts of `root`, a fake copy that is traced, with these paths stay whole; gives the list of calls."""
    calls: list[_Call] = []
    token = _calls.set(calls)
    for path in paths:
        if any(path.startswith(f"{other}.") for other in paths):
            continue  # a part of another one
        part = root.get_submodule(path)
        part.forward = _Whole(path, part, calls)
    try:
        yield calls
    finally:
        _calls.reset(token)


class _Whole:
    """The forward of a part that stays whole, during a trace."""

    def __init__(self, path: str, part: nn.Module, calls: list[_Call]) -> None:
        self._path, self._part, self._calls = path, part, calls
        self._mode = _Assuming(allow_non_fake_inputs=True)
        self._like = copied(part, self._fake)  # what is run to see what a call returns

    def __deepcopy__(self, memo: dict[int, Any]) -> _Whole:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = Given.of(args, kwargs)
        if (strange := given.other_than(_GIVEN)) is not None:
            self._refuse(f"it takes {kind_of(strange)}")
        tensors = given.tensors
        returned, opposite = self._run(given)
        found, packing = pytree.tree_flatten(returned)
        made, forms = [leaf for leaf in found if isinstance(leaf, Tensor)], tuple(map(_form, found))
        parameters, buffers = list(self._part.parameters()), list(self._part.buffers())
        if not (parameters or buffers or tensors):
            self._refuse("neither it nor its arguments hold a tensor")
        self._calls.append(_Call(self._path, given, forms, opposite, made))
        results = iter(torch.ops.pipefit.whole_module(parameters, buffers, tensors, len(self._calls) - 1))
        return pytree.tree_unflatten([next(results) if isinstance(form, tuple) else form for form in forms], packing)

    def _run(self, given: Given) -> tuple[Any, bool]:
        """What a call returns, and whether that is so only as if no condition held."""
        found, error = dict[bool, Any](), Exception()
        for opposite in (False, True):
            try:
                with otherwise() if opposite else nullcontext():
                    found[opposite] = self._once(given)
            except (PipefitError, Refusal):
                raise
            except Exception as raised:  # noqa: BLE001 -- with values of no meaning a forward may raise anything
                error = raised
        if not found:
            self._refuse(in_one_line(error))
        forms = {tuple(map(_form, pytree.tree_leaves(returned))) for returned in found.values()}
        if len(forms) > 1:
            self._refuse("how many values it returns, or their shapes or numbers, depends on values")
        if not all(isinstance(form, (tuple, *_PLAIN)) for form in next(iter(forms))):
            self._refuse("it returns something other than tensors, numbers, texts and None")
        return next(iter(found.values())), False not in found

    def _once(self, given: Given) -> Any:
        """What a call returns over fake tensors of its own."""
        with _disable_current_modes(), torch._C.DisableTorchFunction(), not_kept(), reading(Reading()):
            fakes = [self._argument(tensor) for tensor in given.tensors]
            args, kwargs = given.with_tensors(fakes)
            with self._mode:
                returned = self._like.forward(*args, **kwargs)
            if any(fake._version for fake in fakes):
                self._refuse("it changes an argument in place")
            own = {storage_key(tensor) for tensor in (*self._like.parameters(), *self._like.buffers())}
            if any(isinstance(one, Tensor) and storage_key(one) in own for one in pytree.tree_leaves(returned)):
                self._refuse("it returns a parameter or a buffer")
            return returned

    def _argument(self, tensor: Tensor) -> Tensor:
        """A fake of an argument, which an operation has made, so that it may be changed in place."""
        made = self._fake(tensor).requires_grad_(tensor.requires_grad)
        with self._mode:
            return made.clone()

    def _fake(self, tensor: Tensor) -> Tensor:
        with _disable_current_modes(), self._mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    def _refuse(self, reason: str) -> NoReturn:
        raise LooksAtValues(f"{type(self._part).__name__} cannot stay whole: {reason}", self._path, whole=True)


class _Assuming(FakeTensorMode):  # type: ignore[no-untyped-call]
    """`FakeTensorMode` in which operations whose results depend on values return what is assumed of them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            with self:
                found = assumed(func, args)
            if found is None:
                raise
            return found


def call_the_modules(program: ExportedProgram, calls: Sequence[_Call]) -> None:
    """Let the operations that stand for `calls` call the modules, each of which they name by its path."""
    for node in nodes_of(program, torch.ops.pipefit.whole_module.default):
        parameters, buffers, tensors, number = node.args
        call = calls[number]
        node.target = call_whole
        node.args = (call.path, parameters, buffers, *call.given.with_tensors(tensors), call.forms)
        node.kwargs = {"opposite": True} if call.opposite else {}


# -------------------------------------------------------------------- which ones


def wider(module: nn.Module, whole: Mapping[str, str], refused: LooksAtValues) -> dict[str, str] | None:
    """The paths of the parts of `module` that are to stay whole, and why, after a trace with `whole` was refused.

    They are more by the part that looks at values, and by all others of its class, which do the same. Where one of
    those cannot stay whole either, the part around it is to. None where that is the model.
    """
    parts = dict(module.named_modules())
    path = _around(refused.path, parts) if refused.whole else refused.path
    if not path:
        return None
    why = refused.why or whole.get(refused.path, "")
    alike = {other: why for other, part in parts.items() if other and type(part) is type(parts[path])}
    found = {**alike, **whole}
    return None if found == whole else found


def _around(path: str, parts: Mapping[str, nn.Module]) -> str:
    """The path of the module that calls the one at `path`: the next one around it that has a forward."""
    while path := path.rpartition(".")[0]:
        if type(parts[path]).forward is not nn.Module.forward:
            break
    return path
