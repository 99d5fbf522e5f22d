"""Custom `autograd.Function`s in a traced model: each call stays whole, with the backward that its author wrote.

torch.export follows the forward of such a function as if it were plain code, and its backward is lost. So while a model
is traced, each call is one operation of the program, whose shapes are those of a forward over fake tensors. In a layer
the operation calls the function itself.

The code of `Function.apply` is replaced during a trace, and not the name, because models often bind it to a name of
their own: `my_relu = MyReLU.apply`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from pipefit.capture.refusals import Refusal
from pipefit.capture.whole_calls import Given, nodes_of

_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
_OPERATORS = "GeneratedBackwardFor_"  # how torch.library names the backward of an operator, which traces keep whole


class CustomFunction:
    """A custom function as the target of a node: takes its arguments, returns the tensors of its result."""

    def __init__(self, function: type[Function]) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = function.__qualname__.replace("<locals>", "").replace(".", "_")
        self.__module__ = f"{__name__}.{function.__module__}"  # code of a layer would call one of torch's by its name

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        results = applied(self.function, args, kwargs)  # a layer may be traced again
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
        leaves, self.packing = pytree.tree_flatten(_APPLY(self.function, *args, **kwargs))
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


_calls: ContextVar[list[_Call] | None] = ContextVar("the calls of the trace that is going on", default=None)


torch.library.define("pipefit::custom_function", "(Tensor[] tensors, int call) -> Tensor[]")  # for traces alone


@torch.library.register_fake("pipefit::custom_function")  # type: ignore[untyped-decorator]
def _(tensors: list[Tensor], call: int) -> list[Tensor]:
    """The results of a call, over fake tensors."""
    calls = _calls.get()
    assert calls is not None
    with not_kept():  # functions inside the function are a part of it
        return calls[call].results(tensors)


def applied(function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `function.apply` returns; during a trace it becomes an operation."""
    calls = _calls.get()
    if calls is None or function.__name__.startswith(_OPERATORS):
        return _APPLY(function, *args, **kwargs)
    call = _Call(function, args, kwargs)
    tensors = call.given.tensors
    if not tensors:
        return _APPLY(function, *args, **kwargs)
    calls.append(call)
    return call.packed(torch.ops.pipefit.custom_function(tensors, len(calls) - 1))


def _replacement() -> CodeType:
    __class__ = Function  # the code of a method that uses super() has this one free variable

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        assert __class__ is not None
        from pipefit.capture.custom_functions import applied  # the names around the code are those of torch.autograd

        return applied(cls, args, kwargs)

    return apply.__code__


_FUNCTION: FunctionType = Function.apply.__func__  # type: ignore[attr-defined]
_ORIGINAL, _REPLACEMENT = _FUNCTION.__code__, _replacement()
_APPLY = FunctionType(_ORIGINAL, _FUNCTION.__globals__, "apply", _FUNCTION.__defaults__, _FUNCTION.__closure__)


@contextmanager
def not_kept() -> Iterator[None]:
    """Inside, custom functions are called as they are, as by whatever is itself an operation of the trace."""
    token = _calls.set(None)
    try:
        yield
    finally:
        _calls.reset(token)


@contextmanager
def kept_whole() -> Iterator[list[_Call]]:
    """Inside, a call of a custom function that is traced becomes one operation; gives the list of the calls."""
    calls: list[_Call] = []
    token = _calls.set(calls)
    _FUNCTION.__code__ = _REPLACEMENT
    try:
        yield calls
    finally:
        _FUNCTION.__code__ = _ORIGINAL
        _calls.reset(token)


def call_them(program: ExportedProgram, calls: Sequence[_Call]) -> None:
    """Let the operations that stand for `calls` call the functions."""
    for node in nodes_of(program, torch.ops.pipefit.custom_function.default):
        tensors, number = node.args
        call = calls[number]
        node.target = CustomFunction(call.function)
        node.args, node.kwargs = call.given.with_tensors(tensors)
