"""What tells operations apart whose kernels may take different memory, and the text that says so.

Two calls are alike when the same operation is called with tensors of the same shapes, strides and dtypes, of which the
same ones need a gradient, and with the same other arguments. Numbers that are not sizes, such as a learning rate, count
by their kind alone: they change from step to step, and no kernel takes more for 0.3 than for 0.4. A few that kernels
treat apart, such as 0 and 1, keep their value.

A key is made for every operation of a metered run, in a microsecond or two; its text only when a new one is met.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

_TREATED_APART = frozenset({-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0, 3.0, float("inf"), float("-inf")})
_SIZES = frozenset({"start", "end", "step", "scales", "scale_factors", "scales_h", "scales_w", "scales_d"})
_AS_THEY_ARE = (str, torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format)

Key = tuple[Any, ...]


class Named(NamedTuple):
    """An argument given by name."""

    name: str
    part: Any


def key_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], flags: str) -> Key | None:
    """What tells this call from others of `func`; None where an argument is of a kind that can be no part of a key."""
    grad = torch.is_grad_enabled()
    try:
        parts: list[Any] = [
            (arg.shape, arg.stride(), arg.dtype, arg.layout, grad and arg.requires_grad)
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
        return str(arg) if arg in _TREATED_APART or takes_sizes(func) else "float"
    if kind is bool:
        return str(arg)  # True == 1, and they are not alike
    if isinstance(arg, Tensor):
        return arg.shape, arg.stride(), arg.dtype, arg.layout, grad and arg.requires_grad
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
    """The operation as people read it, and as files keep it."""
    flags, *parts = key
    return f"{flags}{func}({', '.join(map(_text, parts))})"


def name_of(func: Any, args: tuple[Any, ...]) -> str:
    """The operation as far as it can be told where a call has no key."""
    return f"{func}({', '.join(type(arg).__name__ for arg in args)})"


def _text(part: Any) -> str:
    if isinstance(part, Named):
        return f"{part.name}={_text(part.part)}"
    if not isinstance(part, tuple):
        return str(part)
    if len(part) == 5 and type(part[0]) is torch.Size:
        return _tensor_text(*part)
    return f"[{', '.join(map(_text, part))}]"


def _tensor_text(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, layout: torch.layout, differentiable: bool
) -> str:
    by = f" by {','.join(map(str, strides))}" if strides != _dense(shape) else ""
    if layout is not torch.strided:
        by = f" {str(layout).removeprefix('torch.')}"
    text = f"{str(dtype).removeprefix('torch.')}[{'x'.join(map(str, shape))}{by}]"
    return f"{text} with gradient" if differentiable else text


def _dense(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))
