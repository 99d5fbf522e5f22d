"""The key of a call, equal for calls whose kernels take the same memory, and the text of the operation made from it.

Two calls have equal keys if they call the same operation on tensors of the same shapes, strides and dtypes, of which
the same ones need a gradient and the same ones are only marked as conjugated or negated, with the same other arguments.
Of numbers that are not sizes, such as a learning rate, only the type counts, because they change from step to step and
no kernel takes more for 0.3 than for 0.4. Values for which some kernels have another path, such as 0 and 1, do count.

A key is made for every operation of a metered run, in a microsecond or two, and its text only for a new key.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipefit.texts import dtype_name

_ANOTHER_PATH = frozenset({-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, float("inf"), float("-inf")})
_SIZES = frozenset({"start", "end", "step", "scales", "scale_factors", "scales_h", "scales_w", "scales_d"})
_AS_THEY_ARE = (str, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format)

Key = tuple[Any, ...]


class Named(NamedTuple):
    """An argument given by name."""

    name: str
    part: Any


def key_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], flags: str) -> Key | None:
    """The key of this call among those of `func`; None if an argument has a type that cannot be part of a key."""
    grad = torch.is_grad_enabled()
    try:
        parts: list[Any] = [
            (arg.shape, arg.stride(), arg.dtype, arg.layout, grad and arg.requires_grad, arg.is_conj(), arg.is_neg())
            if isinstance(arg, Tensor)
            else _part(func, arg, grad)
            for arg in args
        ]
        if kwargs:
            parts += [Named(name, _part(func, arg, grad)) for name, arg in kwargs.items()]
    except (TypeError, RuntimeError, NotImplementedError):  # some layouts have no strides
        return None
    return (flags, *parts)


def _part(func: Any, arg: Any, grad: bool) -> Any:
    kind = type(arg)
    if kind is int or arg is None:
        return arg
    if kind is float:
        return str(arg) if arg in _ANOTHER_PATH or takes_sizes(func) else "float"
    if kind is bool:
        return str(arg)  # True == 1, and they are not alike
    if isinstance(arg, Tensor):
        return arg.shape, arg.stride(), arg.dtype, arg.layout, grad and arg.requires_grad, arg.is_conj(), arg.is_neg()
    if kind is list or kind is tuple:
        return tuple([_part(func, item, grad) for item in arg])
    if kind is complex or kind is torch.Generator:
        return kind.__name__
    if isinstance(arg, _AS_THEY_ARE):
        return arg
    raise TypeError


@cache
def takes_sizes(func: Any) -> bool:
    """Whether the size of something follows from a number that the operation is given."""
    return any(arg.name in _SIZES and str(arg.type) != "Tensor" for arg in func._schema.arguments)


def text_of(func: Any, key: Key) -> str:
    """The operation with its arguments as readable text, as files keep it."""
    flags, *parts = key
    return f"{flags}{func}({', '.join(map(_text, parts))})"


def name_of(func: Any, args: tuple[Any, ...]) -> str:
    """The operation with the types of its arguments, for a call that has no key."""
    return f"{func}({', '.join(type(arg).__name__ for arg in args)})"


def _text(part: Any) -> str:
    if isinstance(part, Named):
        return f"{part.name}={_text(part.part)}"
    if not isinstance(part, tuple):
        return str(part)
    if len(part) == 7 and type(part[0]) is torch.Size:
        return _tensor_text(*part)
    return f"[{', '.join(map(_text, part))}]"


def _tensor_text(
    shape: torch.Size,
    strides: tuple[int, ...],
    dtype: torch.dtype,
    layout: torch.layout,
    differentiable: bool,
    conjugated: bool,
    negated: bool,
) -> str:
    by = f" by {','.join(map(str, strides))}" if strides != _dense(shape) else ""
    if layout is not torch.strided:
        by = f" {str(layout).removeprefix('torch.')}"
    text = f"{dtype_name(dtype)}[{'x'.join(map(str, shape))}{by}]{' conjugated' * conjugated}{' negated' * negated}"
    return f"{text} with gradient" if differentiable else text


def _dense(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))
