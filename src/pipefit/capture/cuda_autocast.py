"""CUDA's `torch.autocast` for tensors on another device: on the CPU in a trace, or on a fake device.

A trace records the dtypes that its module computes with, whenever the module reads them (`x.to(y.dtype)`).
Under autocast these depend on the device: on CUDA a layer norm returns float32, on the CPU the dtype of its
input. So a model for GPUs is traced, and compared with its module, under CUDA's casts on CPU tensors.

Code that names the device `cuda` gets the device that stands for it. Otherwise `torch.autocast("cuda", ...)`
would be off on a machine without GPUs, and would query the GPU on others.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor

from pipefit.errors import UsageError
from pipefit.schema.profile import Target
from pipefit.torch_internals import (
    DispatchKey,
    DispatchKeySet,
    registrations,
    without_dispatch_keys,
    without_torch_function,
)
from pipefit.torch_internals.patches import autocast_calls

# ---- CUDA's casts: which operators cast their arguments, to which dtype, and which fail
#
# Torch's casts for CUDA are C++ kernels of a dispatch key that only tensors on `cuda` have. Here the same
# rules are Python kernels for another device type's key. The operators of each rule are read from the header
# that torch ships, `include/ATen/autocast_mode.h`, so the lists are those of the installed torch; the header
# also describes the rules. A test compares the lists with the kernels that torch registers for CUDA.
#
#     lower precision   products, convolutions, attention: all arguments to the half-precision type
#     float32           logarithms, powers, norms, losses: all arguments to float32
#     optional dtype    sums and softmax: the result is float32, unless the call gives a dtype
#     appended dtype    two forms of `norm`: the same, through the form that takes a dtype
#     promote           operators of several tensors: to float32 if one of them is, else to the half-precision
# type
#     banned            `binary_cross_entropy`, which overflows in half precision
#
# Operators that cast under CUDA's autocast but are not in the header raise an error when called.

Policy = Literal["lower precision", "float32", "optional dtype", "appended dtype", "promote", "banned"]
Kernel = Callable[..., Any]

_MACROS: dict[str, Policy] = {
    "LOWER_PRECISION_FP": "lower precision",
    "FP32": "float32",
    "FP32_SET_OPT_DTYPE": "optional dtype",
    "DIFFERENT_REDISPATCH_SIGNATURE": "appended dtype",
    "PROMOTE": "promote",
}
# Registered outside of the lists, in ATen/autocast_mode.cpp
_BESIDE: dict[str, Policy] = {
    "aten::cudnn_convolution": "lower precision",
    "aten::cudnn_convolution_transpose": "lower precision",
    "aten::binary_cross_entropy": "banned",
}
_WITH_DTYPE = {"aten::norm.Scalar": "ScalarOpt_dtype", "aten::norm.ScalarOpt_dim": "ScalarOpt_dim_dtype"}
_PROMOTING = ("Tensor", "List[Tensor]")  # argument types; optional tensors are cast, but do not promote
_BANNED = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: use "
    "binary_cross_entropy_with_logits or BCEWithLogitsLoss, and leave out the sigmoid before them"
)


@functools.cache
def policies() -> Mapping[str, Policy]:
    """Return the rule of every operator that CUDA's autocast treats specially, by `aten::name.overload`.

    Raises:
        UsageError: this torch does not ship the header, or the header has other lists.
    """
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    try:
        text = header.read_text()
    except OSError as error:
        raise UsageError(
            f"CUDA's autocast rules are read from {header}, which this torch does not have: install torch "
            "from a wheel, or profile for the target cpu"
        ) from error
    result = dict(_BESIDE)
    for macro, policy in _MACROS.items():
        match = re.search(rf"#define AT_FORALL_{macro}\(_\)((?:.*\\\n)+.*\n)", text)
        if match is None:
            raise UsageError(
                f"{header} does not have the list AT_FORALL_{macro}, so pipefit does not support this "
                "torch: install another version"
            )
        result |= dict.fromkeys(map(_operator, _entries(match[1], policy)), policy)
    return result


def _entries(macro: str, policy: Policy) -> Iterable[str]:
    """Return the entries of a list: `name` or `name, overload`; strings if the rule calls another
    overload.
    """
    return (
        re.findall(r'"([\w.]+)"', macro)
        if policy == "appended dtype"
        else re.findall(r"_\(([\w, ]+)\)", macro)
    )


def _operator(entry: str) -> str:
    return "aten::" + ".".join(part.strip() for part in entry.split(","))


class CudaCasts:
    """CUDA's casts for tensors of `device_type`, whose autocast kernels have the dispatch key `key`.

    Half-precision copies of parameters are cached until `clear`, as `at::autocast::cached_cast` does.
    """

    def __init__(self, device_type: str, key: str) -> None:
        self.device_type, self.key = device_type, key
        self._off = DispatchKeySet(getattr(DispatchKey, key))
        self._copies: dict[int, tuple[ref[Tensor], Tensor]] = {}

    def kernels(self, *, known: Collection[str] = ()) -> Iterator[tuple[str, Kernel]]:
        """Yield every operator that casts on CUDA, except the `known` ones, with an equivalent kernel."""
        registered = registrations("AutocastCUDA")
        for name in set(registered).difference(known):
            policy = policies().get(name)
            yield name, _refusing(name) if policy is None else self._kernel(name, policy)

    def clear(self) -> None:
        """Drop the half-precision copies of parameters."""
        self._copies.clear()

    def _kernel(self, name: str, policy: Policy) -> Kernel:
        operator = _overload(name)
        rule: Kernel = {
            "lower precision": self._lower,
            "float32": self._float32,
            "optional dtype": self._optional_dtype,
            "appended dtype": self._appended_dtype,
            "promote": self._promote,
            "banned": _banned,
        }[policy]

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with without_torch_function(), without_dispatch_keys(self._off):
                return rule(operator, args, kwargs)

        return kernel

    # ---------------------------------------------------------------- the rules

    def _lower(self, operator: Any, args: Any, kwargs: Any) -> Any:
        return self._called(operator, args, kwargs, self._low)

    def _float32(self, operator: Any, args: Any, kwargs: Any) -> Any:
        return self._called(operator, args, kwargs, torch.float32)

    def _optional_dtype(self, operator: Any, args: Any, kwargs: Any) -> Any:
        if not self._casts(args[0]):
            return operator(*args, **kwargs)
        given = _named(operator, args) | kwargs
        if given.get("dtype") is None:
            given["dtype"] = torch.float32
        return operator(**given)

    def _appended_dtype(self, operator: Any, args: Any, kwargs: Any) -> Any:
        wide = torch.float32 if self._casts(args[0]) else args[0].dtype
        form = getattr(operator.overloadpacket, _WITH_DTYPE[_name(operator)])
        return form(**_named(operator, args), **kwargs, dtype=wide)

    def _promote(self, operator: Any, args: Any, kwargs: Any) -> Any:
        low, given = self._low, _named(operator, args) | kwargs
        promoting = [
            a.name for a in operator._schema.arguments if str(a.type) in _PROMOTING and a.name in given
        ]
        dtypes = {t.dtype for name in promoting for t in _tensors(given[name]) if self._casts(t)}
        if dtypes - {low, torch.float32}:
            raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
        return self._called(operator, args, kwargs, torch.float32 if torch.float32 in dtypes else low)

    # ---------------------------------------------------------------- the casts

    @property
    def _low(self) -> torch.dtype:
        return torch.get_autocast_dtype(self.device_type)

    def _called(self, operator: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
        keywords = {name: self._cast(argument, dtype) for name, argument in kwargs.items()}
        cast = [
            self._cast(argument, dtype) for argument in reversed(args)
        ]  # GCC evaluates arguments last to first
        return operator(*reversed(cast), **keywords)

    def _casts(self, argument: Any) -> bool:
        """Return whether autocast may change the argument's dtype: floating point, but not float64."""
        return (
            isinstance(argument, Tensor)
            and argument.device.type == self.device_type
            and argument.is_floating_point()
            and argument.dtype != torch.float64
        )

    def _cast(self, argument: Any, dtype: torch.dtype) -> Any:
        if isinstance(argument, (list, tuple)):
            return [self._cast(part, dtype) for part in argument]
        if not self._casts(argument) or argument.dtype == dtype:
            return argument
        if not self._keeps(argument, dtype):
            return argument.to(dtype)
        known = self._copies.get(id(argument))
        if known is not None and known[0]() is argument:
            return known[1]
        with torch.enable_grad():  # a copy made under no_grad may be used later with gradients
            copy = argument.to(dtype)
        self._copies[id(argument)] = ref(argument), copy
        return copy

    def _keeps(self, tensor: Tensor, dtype: torch.dtype) -> bool:
        """Return whether the cast is cached: a parameter's cast from float32 to half precision."""
        leaf = (
            tensor.dtype == torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
        )
        cached = torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()
        return leaf and cached and dtype == self._low


def _overload(name: str) -> Any:
    base, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def _name(operator: Any) -> str:
    schema = operator._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)


def _named(operator: Any, args: Sequence[Any]) -> dict[str, Any]:
    """Return positional arguments by name, with default values for missing ones."""
    taken = [argument for argument in operator._schema.arguments if not argument.kwarg_only]
    defaults = {argument.name: argument.default_value for argument in taken[len(args) :]}
    return defaults | {argument.name: given for argument, given in zip(taken, args, strict=False)}


def _tensors(argument: Any) -> list[Tensor]:
    return [argument] if isinstance(argument, Tensor) else [t for t in argument if isinstance(t, Tensor)]


def _banned(*_: Any) -> Any:
    raise RuntimeError(_BANNED)


def _refusing(name: str) -> Kernel:
    def kernel(*_: Any, **__: Any) -> Any:
        raise UsageError(
            f"CUDA's autocast casts {name} by a special rule that pipefit does not support: call it under "
            "torch.autocast(..., enabled=False), with arguments in the dtypes it should compute in"
        )

    return kernel


# ---- Autocast of a target, on the CPU

_CUDA, _CPU_KEY = "cuda", "AutocastCPU"

State = tuple[bool, torch.dtype]


@contextmanager
def casting_for(target: Target) -> Iterator[None]:
    """Let autocast treat CPU tensors in the body as it treats tensors of the target.

    Not thread-safe: torch has one table of kernels for all threads.
    """
    with ExitStack() as stack:
        if target == _CUDA:
            stack.enter_context(as_on_cuda("cpu", stack.enter_context(_casts_on_the_cpu())))
        else:
            stack.enter_context(autocast_calls(begin=_off_for_cuda))
        yield


@contextmanager
def _casts_on_the_cpu() -> Iterator[CudaCasts]:
    """Replace the CPU's autocast kernels by CUDA's in the body."""
    casts = CudaCasts("cpu", _CPU_KEY)
    own = registrations(_CPU_KEY)
    kernels = dict.fromkeys(own, torch.library.fallthrough_kernel) | dict(casts.kernels())
    libraries: dict[str, torch.library.Library] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about replaced kernels
        for name, kernel in kernels.items():
            namespace, _, operator = name.partition("::")
            if namespace not in libraries:
                made = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
                libraries[namespace] = made
            library = libraries[namespace]
            library.impl(operator, kernel, _CPU_KEY, allow_override=True)  # type: ignore[no-untyped-call]
    try:
        yield casts
    finally:
        for library in libraries.values():
            library._destroy()  # type: ignore[no-untyped-call]


@contextmanager
def as_on_cuda(device_type: str, casts: CudaCasts) -> Iterator[None]:
    """Let autocast for `cuda` act on `device_type` in the body; clearing its cache clears `casts` too."""
    with autocast_calls(
        begin=lambda begin: _renamed(begin, device_type),
        enter=lambda enter: _entered(enter, device_type),
        leave=_left,
        cast=lambda cast: _cast_on(cast, device_type),
        clear=lambda clear: _both(casts.clear, clear),
    ):
        yield


def _off_for_cuda(begin: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor of `torch.autocast` without effect for `cuda`, and without a query for a GPU."""

    def off(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        begin(self, device_type, dtype, enabled and device_type != _CUDA, cache_enabled)

    return off


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


def _renamed(begin: Callable[..., None], stand_in: str) -> Callable[..., None]:
    """Return the constructor of `torch.autocast` with `stand_in` in place of `cuda`."""

    def renamed(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        begin(self, stand_in if device_type == _CUDA else device_type, dtype, enabled, cache_enabled)

    return renamed


def _entered(enter: Callable[[Any], Any], device_type: str) -> Callable[[Any], Any]:
    """Wrap `__enter__`: torch's query functions for `cuda` then return the state of the stand-in's
    autocast.
    """

    def entered(self: Any) -> Any:
        result = enter(self)
        if self.device == device_type:
            of_cuda = torch.is_autocast_enabled(_CUDA), torch.get_autocast_dtype(_CUDA)
            self.of_cuda = [*vars(self).get("of_cuda", ()), of_cuda]  # a stack, because autocasts nest
            _tell_of_cuda((torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)))
        return result

    return entered


def _left(leave: Callable[..., Any]) -> Callable[..., Any]:
    def left(self: Any, *error: Any) -> Any:
        if before := vars(self).get("of_cuda"):
            _tell_of_cuda(before.pop())
        return leave(self, *error)

    return left


def _tell_of_cuda(state: State) -> None:
    torch.set_autocast_enabled(_CUDA, state[0])
    torch.set_autocast_dtype(_CUDA, state[1])


def _cast_on(cast: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """Return the cast of `custom_fwd`, with `device_type` in place of `cuda`."""
    return lambda value, kind, dtype: cast(value, device_type if kind == _CUDA else kind, dtype)
