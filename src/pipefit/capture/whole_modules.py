"""Modules of a traced model that stay whole, because what they do depends on the values of tensors.

A trace would take one of their ways for ever. So while a model is traced, each call of such a module is one operation
of the program, and in a layer the operation calls the module itself, as a layer by hand is called: its forward is run
anew each time, and recorded by autograd. What it needs is measured as that of a layer by hand (`by_value`).

The rest of the program is fixed, and so is what it is given: as many tensors, of the same shapes and dtypes, and the
same numbers. A module of which two runs, with other values, return something else does not stay whole; one that does
so later stops training with a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd.function import Function, FunctionMeta
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from pipefit.capture.by_value import Reading, assumed, otherwise, reading
from pipefit.capture.copying import copied
from pipefit.capture.refusals import LooksAtValues, Refusal
from pipefit.capture.storages import storage_key
from pipefit.errors import PipefitError, UsageError, in_one_line
from pipefit.texts import dtype_name, kind_of

# ----------------------------------------------------------------------------------------------------
# Calls that stay whole in a trace: what each is given, and the operations that stand for them in the program.


class Given(NamedTuple):
    """The arguments of a call, flat: tensors, which the program hands on, and all else, which it does not know."""

    leaves: list[Any]
    spec: pytree.TreeSpec

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """These arguments."""
        return Given(*pytree.tree_flatten((args, kwargs)))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among them."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def other_than(self, kinds: tuple[type, ...]) -> Any:
        """The first that is neither a tensor nor of these kinds; None if there is none."""
        return next((leaf for leaf in self.leaves if not isinstance(leaf, (Tensor, *kinds))), None)

    def with_tensors(self, tensors: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with others in the place of the tensors."""
        others = iter(tensors)
        leaves = [next(others) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


def nodes_of(program: ExportedProgram, operator: Any) -> Iterator[Any]:
    """The operations of a program, nested ones too, that call an operator."""
    for part in program.graph_module.modules():
        if isinstance(part, fx.GraphModule):
            yield from (node for node in part.graph.nodes if node.target is operator)


# ----------------------------------------------------------------------------------------------------
# Custom `autograd.Function`s in a traced model: each call stays whole, with the backward that its author
# wrote.
#
# torch.export follows the forward of such a function as if it were plain code, and its backward is lost. So
# while a model is traced, each call is one operation of the program, whose shapes are those of a forward over
# fake tensors. In a layer the operation calls the function itself.
#
# Models often bind `Function.apply` to a name of their own, `my_relu = MyReLU.apply`, and from torch 2.14 on
# its code is compiled. So it is not replaced: what it asks of the class is answered otherwise during a trace.
# In every release it asks for `_backward_cls`, which nobody else does, then for `forward`, and for
# `setup_context` once that has returned.

_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
_OPERATORS = "GeneratedBackwardFor_"  # how torch.library names the backward of an operator, which traces keep whole


class CustomFunction:
    """A custom function as the target of a node: takes its arguments, returns the tensors of its result."""

    def __init__(self, function: type[Function]) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = function.__qualname__.replace("<locals>", "").replace(".", "_")
        self.__module__ = f"{__name__}.{function.__module__}"  # code of a layer would call one of torch's by its name

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        results = self.function.apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return tuple(leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor))


class _Call:
    """A call during a trace."""

    def __init__(self, function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function = function
        self.given = Given.of(args, kwargs)
        if (strange := self.given.other_than(_PLAIN)) is not None:
            raise Refusal(
                f"{self.name} takes a {type(strange).__name__}; in a traced model, custom functions take tensors, "
                "numbers, texts and None",
                in_a_whole_module=True,
            )

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.function.__qualname__}.apply"

    def results(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Fake tensors like those of the result, and `packing`, for fake arguments.

        Raises:
            Refusal: the function changes an argument in place, or returns something other than tensors and None.
        """
        versions = [tensor._version for tensor in tensors]
        args, kwargs = self.given.with_tensors(tensors)
        leaves, self.packing = pytree.tree_flatten(self.function.apply(*args, **kwargs))  # type: ignore[no-untyped-call]
        if versions != [tensor._version for tensor in tensors]:
            raise Refusal(f"{self.name} changes its arguments in place", in_a_whole_module=True)
        if not all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves):
            raise Refusal(f"{self.name} returns something other than tensors and None", in_a_whole_module=True)
        self.returned = [leaf is not None for leaf in leaves]
        found = (leaf for leaf in leaves if leaf is not None)
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in found]

    def packed(self, results: Sequence[Tensor]) -> Any:
        """`results` as the function returns them."""
        given = iter(results)
        return pytree.tree_unflatten([next(given) if there else None for there in self.returned], self.packing)


# -------------------------------------------------------------------- the trace


class _Trace:
    """The calls of a trace, and how far torch got with the one that it is making."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.begun: type[Function] | None = None  # its forward is asked for next
        self.returned: type[Function] | None = None  # its context is filled next

    def answer(self, function: type[Function], name: str, found: Any) -> Any:
        """What torch is told where it asks `function` for an attribute, which is `found`."""
        if name == "_backward_cls" and not function.__name__.startswith(_OPERATORS):
            self.begun = function
        elif name == "forward" and self.begun is function:
            self.begun = None
            return self._forward(function, found)
        elif name == "setup_context" and self.returned is function:
            self.returned = None
            return _nothing_is_kept
        return found

    def _forward(self, function: type[Function], plain: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a call: one operation; the function's own where no tensor is given."""
        has_context = function.setup_context is Function.setup_context

        def forward(*given: Any) -> Any:
            call = _Call(function, given[1:] if has_context else given, {})
            if not (tensors := call.given.tensors):
                return plain(*given)
            self.calls.append(call)
            results = call.packed(torch.ops.pipefit.custom_function(tensors, len(self.calls) - 1))
            self.returned = None if has_context else function
            return results

        return forward


def _nothing_is_kept(*_: Any) -> None:
    """The context of an operation that stands for a call: no backward will ask for it."""


_trace: ContextVar[_Trace | None] = ContextVar("the trace that is going on", default=None)


torch.library.define("pipefit::custom_function", "(Tensor[] tensors, int call) -> Tensor[]")  # for traces alone


@torch.library.register_fake("pipefit::custom_function")  # type: ignore[untyped-decorator]
def _(tensors: list[Tensor], call: int) -> list[Tensor]:
    """The results of a call, over fake tensors."""
    trace = _trace.get()
    assert trace is not None
    with not_kept():  # functions inside the function are a part of it
        return trace.calls[call].results(tensors)


def _asked(function: type[Function], name: str) -> Any:
    """The attribute of a function's class, as torch is to see it."""
    found = type.__getattribute__(function, name)
    trace = _trace.get()
    return found if trace is None else trace.answer(function, name, found)


@contextmanager
def not_kept() -> Iterator[None]:
    """Inside, custom functions are called as they are, as by whatever is itself an operation of the trace."""
    token = _trace.set(None)
    try:
        yield
    finally:
        _trace.reset(token)


@contextmanager
def kept_whole() -> Iterator[list[_Call]]:
    """Inside, a call of a custom function that is traced becomes one operation; gives the list of the calls."""
    trace = _Trace()
    token = _trace.set(trace)
    FunctionMeta.__getattribute__ = _asked  # type: ignore[method-assign,assignment]
    try:
        yield trace.calls
    finally:
        del FunctionMeta.__getattribute__
        _trace.reset(token)


def call_them(program: ExportedProgram, calls: Sequence[_Call]) -> None:
    """Let the operations that stand for `calls` call the functions."""
    for node in nodes_of(program, torch.ops.pipefit.custom_function.default):
        tensors, number = node.args
        call = calls[number]
        node.target = CustomFunction(call.function)
        node.args, node.kwargs = call.given.with_tensors(tensors)


# ----------------------------------------------------------------------------------------------------

Form = tuple[str, tuple[int, ...]] | int | float | str | bool | type | None  # of a tensor; plain values as they are

_WHOLE_MODULES_PLAIN = (int, float, str, bool, type(None))
_GIVEN = (*_WHOLE_MODULES_PLAIN, torch.dtype, torch.device)


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
    return leaf if isinstance(leaf, _WHOLE_MODULES_PLAIN) else type(leaf)


def _words(forms: Sequence[Form]) -> str:
    """For people."""
    return ", ".join(f"{one[0]} {one[1]}" if isinstance(one, tuple) else repr(one) for one in forms) or "nothing"


# -------------------------------------------------------------------- the trace


class _WholeModulesCall(NamedTuple):
    """A call during a trace: all that `call_whole` is given but tensors, and like what the tensors are returned."""

    path: str
    given: Given
    forms: tuple[Form, ...]
    opposite: bool
    results: list[Tensor]


_calls: ContextVar[list[_WholeModulesCall] | None] = ContextVar(
    "calls of whole modules in the trace that is going on", default=None
)

torch.library.define(
    "pipefit::whole_module", "(Tensor[] parameters, Tensor[] buffers, Tensor[] given, int call) -> Tensor[]"
)


@torch.library.register_fake("pipefit::whole_module")  # type: ignore[untyped-decorator]
def _whole_modules_(parameters: list[Tensor], buffers: list[Tensor], given: list[Tensor], call: int) -> list[Tensor]:
    """Tensors like those that the call returned, over fake tensors."""
    calls = _calls.get()
    assert calls is not None
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in calls[call].results]


@contextmanager
def whole_modules(root: nn.Module, paths: Collection[str]) -> Iterator[list[_WholeModulesCall]]:
    """Inside, the parts of `root`, a fake copy that is traced, with these paths stay whole; gives the list of calls."""
    calls: list[_WholeModulesCall] = []
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

    def __init__(self, path: str, part: nn.Module, calls: list[_WholeModulesCall]) -> None:
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
        self._calls.append(_WholeModulesCall(self._path, given, forms, opposite, made))
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
        if not all(isinstance(form, (tuple, *_WHOLE_MODULES_PLAIN)) for form in next(iter(forms))):
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


def call_the_modules(program: ExportedProgram, calls: Sequence[_WholeModulesCall]) -> None:
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
