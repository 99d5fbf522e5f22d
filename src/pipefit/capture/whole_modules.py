"""Modules of a traced model that stay whole, because their behavior depends on the values of tensors.

A trace would record one of their paths forever. So each call of such a module is one operation of the
program, and a layer calls the module itself, as in a written chain: its forward runs anew each time, and
autograd records it.

Its memory, like that of a layer that a user wrote (`pipefit.chain`), is measured on fake tensors, which have
no values. The results of value-dependent operations are then those of a run in which every mask selects its
whole tensor, every condition holds and every number that is read is 1. In a mixture of experts, every expert
gets every token. Peaks for other values are unknown, so profiles and plans report these operations by name. A
whole module that raises an exception under these assumptions runs under the opposite ones (`otherwise`).
Numbers that an optimizer reads, such as its step count, are reported only if its memory depends on them.

The rest of the program is fixed, and so are the module's results: the number of tensors, their shapes and
dtypes, and plain numbers. A module whose results differ in these between two runs with other values cannot
stay whole; a module whose results change later stops training with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import Function, FunctionMeta
from torch.export import ExportedProgram

from pipefit.capture.copying import copied
from pipefit.capture.refusals import LooksAtValues, Refusal, running_place
from pipefit.capture.storages import storage_key
from pipefit.errors import PipefitError, UsageError, in_one_line
from pipefit.schema.layer_costs import Kernel
from pipefit.texts import dtype_name, kind_of
from pipefit.torch_internals import pytree, without_dispatch_modes, without_torch_function
from pipefit.torch_internals.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

aten = torch.ops.aten


@dataclass(slots=True)
class NumberReads:
    """Counters of a layer over all of its runs.

    `count` numbers have been read, `conditions` of them may decide what runs, the last one at the place
    `last` in the user's code, `most` may be read, and `assumed` results have been assumed, numbers included.
    """

    count: int = 0
    conditions: int = 0
    last: str = ""
    assumed: int = 0
    most: int = 20_000


_reading: ContextVar[NumberReads | None] = ContextVar("numbers read by the running layer", default=None)
_otherwise: ContextVar[bool] = ContextVar("assume the opposite", default=False)
_contrary: ContextVar[Collection[str]] = ContextVar("places with the other answer", default=())
_updating: ContextVar[int | None] = ContextVar("numbers read by an update", default=None)

NUMBERS = (1, 2, 1_000_000)  # tried in place of each number that an optimizer's update reads
_REASON = "it depends on values: counted as if every mask selected everything and every condition were true"
_OTHERWISE = "it depends on values: counted as if every mask selected half and every condition were false"


def assumed(func: Any, args: tuple[Any, ...]) -> Any:
    """Return the assumed result of `func(*args)`; None if nothing can be assumed. Call it under a fake
    mode.
    """
    rule, numbers = _RULES.get(func), _reading.get()
    if numbers is not None:
        numbers.assumed += 1
    return None if rule is None else rule(*args)


def assumptions() -> int:
    """Return how many results have been assumed for the running layer, which other values may change."""
    numbers = _reading.get()
    return 0 if numbers is None else numbers.assumed


def unknown(func: Any) -> Kernel:
    """Return a `Kernel` of unknown memory for `func`, whose result is assumed."""
    return Kernel(operation=str(func), peak_bytes=None, reason=_OTHERWISE if _otherwise.get() else _REASON)


def is_assumed(kernel: Kernel) -> bool:
    """Return whether a profile's `kernel` had an assumed result."""
    return kernel.reason in (_REASON, _OTHERWISE)


def reads_a_number(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether `func(*args)` gives Python an assumed number, as every condition on a tensor does."""
    return func is aten._local_scalar_dense.default and getattr(args[0], "constant", None) is None


@contextmanager
def _set(variable: ContextVar[Any], value: object) -> Iterator[None]:
    """Give a context variable this value in the body."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def reading(numbers: NumberReads) -> Iterator[NumberReads]:
    """Count in `numbers` what a layer reads and assumes in the body.

    Raises:
        RuntimeError: more than `numbers.most` numbers are read, as by a loop whose condition always holds.
    """
    with _set(_reading, numbers):
        yield numbers


def updating(number: int = NUMBERS[0]) -> AbstractContextManager[None]:
    """Let an optimizer's update in the body read `number` in place of every number, without reporting it.

    The profiler tries several numbers, and reports the read if the memory of the update depends on the
    number.
    """
    return _set(_updating, number)


def otherwise() -> AbstractContextManager[None]:
    """Assume the opposite in the body: conditions fail, masks select half, and numbers are 2 or hardly 0."""
    return _set(_otherwise, True)


def contrary(places: Collection[str]) -> AbstractContextManager[None]:
    """Give conditions at these places of the user's code the other answer in the body."""
    return _set(_contrary, places)


READINGS = [unknown(aten._local_scalar_dense.default)]
with otherwise():
    READINGS.append(unknown(aten._local_scalar_dense.default))


def is_named(func: Any) -> bool:
    """Return whether assumptions about `func` are reported: not those about numbers that an update reads."""
    return func is not aten._local_scalar_dense.default or _updating.get() is None


def _number(tensor: Tensor) -> bool | int | float:
    numbers, place = _reading.get(), running_place()
    opposite = _otherwise.get() != (place in _contrary.get())
    if numbers is not None:
        numbers.count += 1
        if (tensor.dtype is torch.bool or tensor.is_floating_point()) and _updating.get() is None:
            numbers.conditions += 1
            numbers.last = place
        if numbers.count > numbers.most:
            raise RuntimeError("numbers are read from tensors endlessly if every condition is true")
    if tensor.is_floating_point() and opposite and _updating.get() is None:
        return 2.0**-24  # below every probability, so `item() < p` holds here alone
    result = _updating.get() or (2 if opposite else 1)
    return (
        result % 2 == 1
        if tensor.dtype is torch.bool
        else float(result)
        if tensor.is_floating_point()
        else result
    )


def _selects(count: int) -> int:
    """Return how many of `count` elements a mask selects."""
    return count // 2 if _otherwise.get() else count


def _nonzero(tensor: Tensor) -> Tensor:
    """Return indices with the strides that kernels give them: one dimension after the other."""
    return torch.empty((tensor.ndim, _selects(tensor.numel())), dtype=torch.int64, device=tensor.device).t()


def _selected(tensor: Tensor, mask: Tensor) -> Tensor:
    return tensor.new_empty(_selects(aten.broadcast_tensors.default([tensor, mask])[0].numel()))


def _indexed(tensor: Tensor, indices: list[Tensor | None]) -> Tensor:
    """Index `tensor`, with each mask replaced by the indices of all its elements."""
    places: list[Tensor | None] = []
    for index in indices:
        places += _nonzero(index).unbind(1) if index is not None and index.dtype is torch.bool else (index,)
    result: Tensor = aten.index.Tensor(tensor, places)
    return result


def _ctc(log_probabilities: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return the losses and log alphas: 2 * (longest target) + 1 log alphas for each step and sample."""
    steps, samples = log_probabilities.shape[:2]
    longest = targets.shape[1] if targets.ndim == 2 else targets.numel()
    return log_probabilities.new_empty(samples), log_probabilities.new_empty(samples, steps, 2 * longest + 1)


_RULES: dict[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _number,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _selected,
    aten.index.Tensor: _indexed,
    aten._ctc_loss.Tensor: _ctc,
}


# ---- Calls that stay whole: their arguments, and the operations that stand for them


class Given(NamedTuple):
    """The flat arguments of a call: tensors, which the program passes, and values unknown to it."""

    leaves: list[Any]
    spec: pytree.TreeSpec

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
        """Return the flat form of these arguments."""
        return Given(*pytree.tree_flatten((args, kwargs)))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def other_than(self, kinds: tuple[type, ...]) -> Any:
        """Return the first argument that is neither a tensor nor of these types; None if there is none."""
        return next((leaf for leaf in self.leaves if not isinstance(leaf, (Tensor, *kinds))), None)

    def with_tensors(self, tensors: Iterable[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with the tensors replaced."""
        others = iter(tensors)
        leaves = [next(others) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


torch.library.define(
    "pipefit::whole", "(Tensor[] parameters, Tensor[] buffers, Tensor[] given, int call) -> Tensor[]"
)  # for traces only


@torch.library.register_fake("pipefit::whole")  # type: ignore[untyped-decorator]
def _(parameters: list[Tensor], buffers: list[Tensor], given: list[Tensor], call: int) -> list[Tensor]:
    """Return the results of a call over fake tensors."""
    trace = _trace.get()
    assert trace is not None
    with functions_as_they_are():  # custom functions inside this call belong to it
        return trace.calls[call].results(given)


@contextmanager
def whole_parts(root: nn.Module, paths: Collection[str]) -> Iterator[list[_FunctionCall | _ModuleCall]]:
    """Turn calls traced in the body into single operations; yield the list of calls.

    These are calls of custom functions, and of the parts of `root`, a fake copy, at `paths`.
    """
    trace = _Trace()
    token = _trace.set(trace)
    FunctionMeta.__getattribute__ = _asked  # type: ignore[method-assign,assignment]
    for path in paths:
        if any(path.startswith(f"{other}.") for other in paths):
            continue  # a part of another one
        part = root.get_submodule(path)
        part.forward = _WholeForward(path, part, trace.calls)
    try:
        yield trace.calls
    finally:
        del FunctionMeta.__getattribute__
        _trace.reset(token)


def call_whole_parts(program: ExportedProgram, calls: Sequence[_FunctionCall | _ModuleCall]) -> None:
    """Let the operations that stand for `calls` call the functions, and the modules by their paths."""
    for part in program.graph_module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                if node.target is torch.ops.pipefit.whole.default:
                    calls[node.args[3]].take_over(node)


# ---- Custom `autograd.Function`s: each call stays whole, with its author's backward
#
# torch.export traces the forward of such a function like plain code, and loses its backward. So each call
# during a trace is one operation of the program, with the shapes of a forward over fake tensors. In a layer
# the operation calls the function itself.
#
# Models often bind `Function.apply` to a name, `my_relu = MyReLU.apply`, and from torch 2.14 on the code of
# `apply` is compiled. So `apply` is not replaced; instead, attribute reads on the class return other values
# during a trace. Every release reads `_backward_cls`, which no other code does, then `forward`, and
# `setup_context` after the forward returned.

_PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
_OPERATORS = "GeneratedBackwardFor_"  # torch.library's backward of operators, which traces keep whole


class CustomFunction:
    """A custom function as the target of a node: takes its arguments, returns the tensors of its result."""

    def __init__(self, function: type[Function]) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = function.__qualname__.replace("<locals>", "").replace(".", "_")
        self.__module__ = (
            f"{__name__}.{function.__module__}"  # generated code would call a torch function by name
        )

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        results = self.function.apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        return tuple(leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor))


class _FunctionCall:
    """A call during a trace."""

    def __init__(self, function: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function = function
        self.given = Given.of(args, kwargs)
        if (strange := self.given.other_than(_PLAIN)) is not None:
            raise Refusal(
                f"{self.name} takes a {type(strange).__name__}; in a traced model, custom functions take "
                "only tensors, numbers, texts and None",
                in_a_whole_module=True,
            )

    @property
    def name(self) -> str:
        """Name of the call in messages."""
        return f"{self.function.__qualname__}.apply"

    def take_over(self, node: fx.Node) -> None:
        """Let a node that stands for the call call the function."""
        node.target = CustomFunction(self.function)
        node.args, node.kwargs = self.given.with_tensors(node.args[2])  # type: ignore[arg-type]

    def results(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return fake tensors like the function's results for fake arguments; set `packing` and `returned`.

        Raises:
            Refusal: the function changes an argument in place, or returns something other than tensors and
                None.
        """
        versions = [tensor._version for tensor in tensors]
        args, kwargs = self.given.with_tensors(tensors)
        result = self.function.apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        leaves, self.packing = pytree.tree_flatten(result)
        if versions != [tensor._version for tensor in tensors]:
            raise Refusal(f"{self.name} changes its arguments in place", in_a_whole_module=True)
        if not all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves):
            raise Refusal(f"{self.name} returns values other than tensors and None", in_a_whole_module=True)
        self.returned = [leaf is not None for leaf in leaves]
        result = (leaf for leaf in leaves if leaf is not None)
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in result]

    def packed(self, results: Sequence[Tensor]) -> Any:
        """Return `results` in the structure that the function returns."""
        given = iter(results)
        return pytree.tree_unflatten(
            [next(given) if there else None for there in self.returned], self.packing
        )


# -------------------------------------------------------------------- the trace


class _Trace:
    """The calls of a trace, and torch's progress with the current one, of a function.

    While `inside` one of the calls, custom functions are called as they are.
    """

    def __init__(self) -> None:
        self.calls: list[_FunctionCall | _ModuleCall] = []
        self.inside = False
        self.begun: type[Function] | None = None  # torch reads its forward next
        self.returned: type[Function] | None = None  # torch reads its setup_context next

    def answer(self, function: type[Function], name: str, found: Any) -> Any:
        """Return the attribute `name` of `function` that torch sees during a trace; `found` is the real
        one.
        """
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
        """Return a forward that records the call as one operation, or runs `plain` if no tensor is given."""
        has_context = function.setup_context is Function.setup_context

        def forward(*given: Any) -> Any:
            call = _FunctionCall(function, given[1:] if has_context else given, {})
            if not (tensors := call.given.tensors):
                return plain(*given)
            self.calls.append(call)
            results = call.packed(torch.ops.pipefit.whole([], [], tensors, len(self.calls) - 1))
            self.returned = None if has_context else function
            return results

        return forward


def _nothing_is_kept(*_: Any) -> None:
    """Do nothing in place of `setup_context`: the traced operation has no backward that reads the context."""


_trace: ContextVar[_Trace | None] = ContextVar("the trace in progress", default=None)


def _asked(function: type[Function], name: str) -> Any:
    """Return the attribute of a function's class that torch sees."""
    result = type.__getattribute__(function, name)
    trace = _trace.get()
    return result if trace is None or trace.inside else trace.answer(function, name, result)


@contextmanager
def functions_as_they_are() -> Iterator[None]:
    """Call custom functions in the body as they are, inside code that is one operation of the trace."""
    trace = _trace.get()
    assert trace is not None
    before, trace.inside = trace.inside, True
    try:
        yield
    finally:
        trace.inside = before


# ---- Modules that stay whole

Form = tuple[str, tuple[int, ...]] | int | float | str | bool | type | None  # (dtype, shape) of a tensor

_PLAIN_RESULTS = (int, float, str, bool, type(None))
_GIVEN = (*_PLAIN_RESULTS, torch.dtype, torch.device)


def call_whole(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    forms: tuple[Form, ...],
    *,
    opposite: bool = False,
) -> tuple[Tensor, ...]:
    """Return the tensors that the forward of `module` returns.

    The target of a node, which has two more arguments after the module: its parameters, which the operation
    reads, and its buffers, which it may change. `forms` describes the results in the trace. `opposite` says
    that the forward raises an exception when every condition holds, so conditions do not hold over fake
    tensors.

    Raises:
        UsageError: the results differ from `forms`, or the forward changes an argument in place.
    """
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    versions = _versions(given)
    with otherwise() if opposite else nullcontext():
        leaves = pytree.tree_leaves(module.forward(*args, **kwargs))
    name = type(module).__name__
    if versions != _versions(given):
        raise UsageError(
            f"{name}, which stays whole in a traced model, changed an argument in place: {_REMEDY}"
        )
    result = tuple(map(_form, leaves))
    if result != forms:
        raise UsageError(
            f"{name}, which stays whole in a traced model, returned {_words(result)}, but {_words(forms)} "
            f"when the model was traced: {_REMEDY}"
        )
    return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


_REMEDY = (
    "make its output shapes and numbers independent of values, or give pipefit the parts with "
    "pipefit.chain([...])"
)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _form(leaf: Any) -> Form:
    """Return dtype and shape of a tensor, a plain value itself, and the class of anything else."""
    if isinstance(leaf, Tensor):
        return dtype_name(leaf.dtype), tuple(leaf.shape)
    return leaf if isinstance(leaf, _PLAIN_RESULTS) else type(leaf)


def _words(forms: Sequence[Form]) -> str:
    """Return the forms in words, for messages."""
    return (
        ", ".join(f"{form[0]} {form[1]}" if isinstance(form, tuple) else repr(form) for form in forms)
        or "nothing"
    )


# -------------------------------------------------------------------- the trace


class _ModuleCall(NamedTuple):
    """A call during a trace: the non-tensor arguments of `call_whole`, and fake tensors like its results."""

    path: str
    given: Given
    forms: tuple[Form, ...]
    opposite: bool
    returned: list[Tensor]

    def results(self, _: Sequence[Tensor]) -> list[Tensor]:
        """Return fake tensors like the results of the call."""
        return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in self.returned]

    def take_over(self, node: fx.Node) -> None:
        """Let a node that stands for the call call the module, which it names by path."""
        parameters, buffers, tensors, _ = node.args
        args, kwargs = self.given.with_tensors(tensors)  # type: ignore[arg-type]
        node.target = call_whole
        node.args = (self.path, parameters, buffers, args, kwargs, self.forms)  # type: ignore[assignment]
        node.kwargs = {"opposite": True} if self.opposite else {}


class _WholeForward:
    """The forward of a part that stays whole, during a trace."""

    def __init__(self, path: str, part: nn.Module, calls: list[_FunctionCall | _ModuleCall]) -> None:
        self._path, self._part, self._calls = path, part, calls
        self._mode = _Assuming(allow_non_fake_inputs=True)
        self._like = copied(part, self._fake)  # a fake copy that is run for the results of calls

    def __deepcopy__(self, memo: dict[int, Any]) -> _WholeForward:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = Given.of(args, kwargs)
        if (strange := given.other_than(_GIVEN)) is not None:
            self._refuse(f"it takes {kind_of(strange)}")
        tensors = given.tensors
        returned, opposite = self._run(given)
        result, packing = pytree.tree_flatten(returned)
        made, forms = [leaf for leaf in result if isinstance(leaf, Tensor)], tuple(map(_form, result))
        parameters, buffers = list(self._part.parameters()), list(self._part.buffers())
        if not (parameters or buffers or tensors):
            self._refuse("neither it nor its arguments hold a tensor")
        self._calls.append(_ModuleCall(self._path, given, forms, opposite, made))
        results = iter(torch.ops.pipefit.whole(parameters, buffers, tensors, len(self._calls) - 1))
        return pytree.tree_unflatten(
            [next(results) if isinstance(form, tuple) else form for form in forms], packing
        )

    def _run(self, given: Given) -> tuple[Any, bool]:
        """Return the results of a call, and True if it only succeeds when no condition holds."""
        result, error = dict[bool, Any](), Exception()
        for opposite in (False, True):
            try:
                with otherwise() if opposite else nullcontext():
                    result[opposite] = self._once(given)
            except (PipefitError, Refusal):
                raise
            except Exception as raised:  # noqa: BLE001 -- meaningless values may raise anything
                error = raised
        if not result:
            self._refuse(in_one_line(error))
        forms = {tuple(map(_form, pytree.tree_leaves(returned))) for returned in result.values()}
        if len(forms) > 1:
            self._refuse("the number, shapes or numbers of its outputs depend on values")
        if not all(isinstance(form, (tuple, *_PLAIN_RESULTS)) for form in next(iter(forms))):
            self._refuse("it returns values other than tensors, numbers, texts and None")
        return next(iter(result.values())), False not in result

    def _once(self, given: Given) -> Any:
        """Return the results of a call over separate fake tensors."""
        with (
            without_dispatch_modes(),
            without_torch_function(),
            functions_as_they_are(),
            reading(NumberReads()),
        ):
            fakes = [self._argument(tensor) for tensor in given.tensors]
            args, kwargs = given.with_tensors(fakes)
            with self._mode:
                returned = self._like.forward(*args, **kwargs)
            if any(fake._version for fake in fakes):
                self._refuse("it changes an argument in place")
            own = {storage_key(tensor) for tensor in (*self._like.parameters(), *self._like.buffers())}
            if any(
                isinstance(leaf, Tensor) and storage_key(leaf) in own for leaf in pytree.tree_leaves(returned)
            ):
                self._refuse("it returns a parameter or a buffer")
            return returned

    def _argument(self, tensor: Tensor) -> Tensor:
        """Return a fake copy of an argument that is not a leaf, so it may be changed in place."""
        made = self._fake(tensor).requires_grad_(tensor.requires_grad)
        with self._mode:
            return made.clone()

    def _fake(self, tensor: Tensor) -> Tensor:
        with without_dispatch_modes(), self._mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    def _refuse(self, reason: str) -> NoReturn:
        raise LooksAtValues(
            f"{type(self._part).__name__} cannot stay whole: {reason}", self._path, whole=True
        )


class _Assuming(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A `FakeTensorMode` in which value-dependent operations return their assumed results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            with self:
                result = assumed(func, args)
            if result is None:
                raise
            return result


# -------------------------------------------------------------------- which ones


def wider(module: nn.Module, whole: Mapping[str, str], refused: LooksAtValues) -> dict[str, str] | None:
    """Return the paths of parts to keep whole, with reasons, after a trace with `whole` was refused.

    The part that looks at values is added, with all others of its class. If one of these cannot stay whole
    either, the part around it is added instead. Returns None if that is the model itself.
    """
    parts = dict(module.named_modules())
    path = _around(refused.path, parts) if refused.whole else refused.path
    if not path:
        return None
    why = refused.why or whole.get(refused.path, "")
    alike = {other: why for other, part in parts.items() if other and type(part) is type(parts[path])}
    result = {**alike, **whole}
    return None if result == whole else result


def _around(path: str, parts: Mapping[str, nn.Module]) -> str:
    """Return the path of the module that calls the one at `path`: the next one around it with a forward."""
    while path := path.rpartition(".")[0]:
        if type(parts[path]).forward is not nn.Module.forward:
            break
    return path
