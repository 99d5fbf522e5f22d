"""Element-wise operators: numbers become one-element tensors, and operands of other types are cast.

`x * 2` allocates eight bytes for the number (`wrapped_scalar_tensor` in ATen/ScalarOps.h, one byte for a boolean),
then a copy of that tensor in the type of the computation, while `TensorIterator` (ATen/TensorIterator.cpp,
`compute_types`) keeps a cast copy of every operand, and of an in-place destination, whose type differs from it. All
of them live until the kernel returns. Exact for dense operands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pipefit.meter.workspace.ledger import Call, nbytes

aten = torch.ops.aten


def number_nbytes(number: Any) -> int:
    """Bytes of the zero-dimensional tensor that stands for a Python number."""
    if isinstance(number, (bool, torch.SymBool)):
        return 1
    return 16 if isinstance(number, complex) else 8


def cast_nbytes(operand: Any, dtype: torch.dtype) -> int:
    """Bytes that an operand adds to a computation in `dtype`: the number itself, and its cast copy."""
    if isinstance(operand, torch.Tensor):
        return 0 if operand.dtype == dtype else operand.numel() * dtype.itemsize
    held = number_nbytes(operand)
    already = {1: torch.bool, 8: torch.float64 if isinstance(operand, float) else torch.int64, 16: torch.complex128}
    return held if already[held] == dtype else held + dtype.itemsize


def common_dtype(operands: Sequence[Any], *, floating: bool) -> torch.dtype:
    """The type of the computation: ATen's promotion, to the default float if `floating` and it is an integer."""
    first = operands[0]
    dtype: torch.dtype
    if all(isinstance(o, torch.Tensor) and o.dtype == first.dtype for o in operands):
        dtype = first.dtype
    elif len(operands) == 2:
        dtype = torch.result_type(*operands)
    else:
        dtype = operands[0].dtype
        for other in operands[1:]:
            dtype = torch.promote_types(dtype, other.dtype) if isinstance(other, torch.Tensor) else dtype
    if floating and not (dtype.is_floating_point or dtype.is_complex):
        return torch.get_default_dtype()
    return dtype


def in_place_cast_nbytes(destination: torch.Tensor, dtype: torch.dtype) -> int:
    """Bytes of the temporary that replaces an in-place destination of another type."""
    return 0 if destination.dtype == dtype else destination.numel() * dtype.itemsize


def pointwise(
    count: int, *, first: int = 0, in_place: bool = False, floating: bool = False
) -> Callable[[Call], int | None]:
    """The formula of an operator over the `count` operands from position `first` on."""

    def kernel(call: Call) -> int | None:
        operands = call.args[first : first + count]
        if all(isinstance(o, torch.Tensor) for o in operands):
            kind = operands[0].dtype
            if (kind.is_floating_point or not floating) and all(o.dtype == kind for o in operands):
                return None
        dtype = common_dtype(operands, floating=floating)
        casts = sum(cast_nbytes(operand, dtype) for operand in operands)
        if in_place:
            return casts + in_place_cast_nbytes(operands[0], dtype)
        return casts + call.out_nbytes()

    return kernel


def true_divide_by_mode(*, in_place: bool) -> Callable[[Call], int | None]:
    """`div` with a rounding mode: a true division, in floating point, only without one."""
    exact = pointwise(2, in_place=in_place, floating=True)
    rounded = pointwise(2, in_place=in_place)
    return lambda call: exact(call) if call.kwargs.get("rounding_mode") is None else rounded(call)


def divide_scalar(call: Call) -> int | None:
    """`div` of a whole tensor by a number: the number, its cast, the cast operand and the quotient."""
    return pointwise(2, floating=True)(call)


def foreach_scalar(*, in_place: bool) -> Callable[[Call], int | None]:
    """`_foreach_*` with numbers: on the CPU one ordinary operator per tensor, whose temporaries die in between."""

    def kernel(call: Call) -> int | None:
        tensors, numbers = call.args[0], call.args[1]
        highest = live = 0
        for index, tensor in enumerate(tensors):
            number = numbers[index] if isinstance(numbers, (list, tuple)) else numbers
            kept = 0 if in_place else nbytes(tensor)
            highest = max(highest, live + kept + cast_nbytes(number, torch.result_type(tensor, number)))
            live += kept
        return highest

    return kernel


def native_dropout(call: Call) -> int | None:
    """`native_dropout` (ATen/native/Dropout.cpp): the mask cast to the input's type, then the scale's temporaries."""
    x, probability, train = call.tensor(0, "input"), call.arg(1, "p"), call.arg(2, "train")
    if train is False or probability == 0 or x.numel() == 0:
        return None
    mask_and_out = x.numel() + nbytes(x)
    return mask_and_out + max(nbytes(x), cast_nbytes(1.0, x.dtype))


def native_dropout_backward(call: Call) -> int | None:
    """`native_dropout_backward`: the mask cast while the product is formed, then product, scale and output together."""
    grad = call.tensor(0, "grad_output")
    return 2 * nbytes(grad) + cast_nbytes(1.0, grad.dtype)


def _of(name: str, overload: str) -> Any:
    return getattr(getattr(aten, name), overload, None)


def _scalar_lists() -> dict[Any, Callable[[Call], int | None]]:
    table: dict[Any, Callable[[Call], int | None]] = {}
    for name in ("add", "sub", "mul", "div"):
        for overload in ("Scalar", "ScalarList"):
            table[_of("_foreach_" + name, overload)] = foreach_scalar(in_place=False)
            table[_of("_foreach_" + name + "_", overload)] = foreach_scalar(in_place=True)
    return table


def _build() -> dict[Any, Callable[[Call], int | None]]:
    table: dict[Any, Callable[[Call], int | None]] = {}
    plain = ("add", "sub", "mul", "rsub", "remainder", "fmod", "floor_divide", "bitwise_and", "bitwise_or",
             "bitwise_xor", "eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "logical_and", "logical_or",
             "logical_xor")  # fmt: skip
    for name in plain:
        for overload in ("Tensor", "Scalar", "default"):
            table[_of(name, overload)] = pointwise(2)
            if hasattr(aten, name + "_"):
                table[_of(name + "_", overload)] = pointwise(2, in_place=True)
    for name in ("div", "true_divide", "atan2"):
        for overload in ("Tensor", "Scalar", "default"):
            table[_of(name, overload)] = pointwise(2, floating=True)
            table[_of(name + "_", overload)] = pointwise(2, in_place=True, floating=True)
    for overload in ("Tensor_mode", "Scalar_mode"):
        table[_of("div", overload)] = true_divide_by_mode(in_place=False)
        table[_of("div_", overload)] = true_divide_by_mode(in_place=True)
    for name in ("exp", "sqrt", "rsqrt", "sigmoid", "tanh", "log", "log1p", "sin", "cos", "erf", "reciprocal"):
        table[_of(name, "default")] = pointwise(1, floating=True)
    table[aten.pow.Scalar] = pointwise(2)
    table[aten.pow.Tensor_Tensor] = pointwise(2)
    table[aten.where.self] = pointwise(2, first=1)
    for name in ("addcmul", "addcdiv"):
        table[_of(name, "default")] = pointwise(3)
    table.update(_scalar_lists())
    table[aten.native_dropout.default] = native_dropout
    table[aten.native_dropout_backward.default] = native_dropout_backward
    table.pop(None, None)
    return table


KERNELS: Mapping[Any, Callable[[Call], int | None]] = _build()
