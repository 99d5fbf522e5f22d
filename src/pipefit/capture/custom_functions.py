"""Custom `autograd.Function`s in a traced model: each call stays whole, with the backward that its author wrote.

torch.export follows the forward of such a function as if it were plain code, and its backward is lost. So while a model
is traced, each call is one operation of the program, whose shapes are those of a forward over fake tensors. In a layer
the operation calls the function itself.

Models often bind `Function.apply` to a name of their own, `my_relu = MyReLU.apply`, and from torch 2.14 on its code is
compiled. So it is not replaced: what it asks of the class is answered otherwise during a trace. In every release it
asks for `_backward_cls`, which nobody else does, then for `forward`, and for `setup_context` once that has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, FunctionMeta
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
