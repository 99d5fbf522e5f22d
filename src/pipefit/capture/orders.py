"""In which order the dimensions of values lie in memory, so that between layers each can be contiguous without a copy.

A value that is laid out otherwise, as after a transpose, crosses with its dimensions in the order of memory, and the
next layer sees it as it was made. One that no order makes dense, as a slice or an expanded one, is copied.
"""

from __future__ import annotations

from torch import Tensor

from pipefit.capture.structure import Values
from pipefit.layer_costs import Order

Orders = tuple[Order, ...]  # of several values; empty where each has the order of its dimensions


def orders_of(values: Values) -> Orders:
    """The orders in which `values` leave a layer."""
    found = tuple(() if value.is_contiguous() else dense_order(value) or () for value in values)
    return found if any(found) else ()


def contiguous(values: Values, orders: Orders) -> Values:
    """`values` with their dimensions in these orders, each contiguous."""
    ordered = values if not orders else tuple(v.permute(o) if o else v for v, o in zip(values, orders, strict=True))
    return tuple(value.contiguous() for value in ordered)


def as_made(values: Values, orders: Orders) -> Values:
    """`values` as they were before their dimensions were put in these orders."""
    if not orders:
        return values
    back = (tuple(order.index(dimension) for dimension in range(len(order))) for order in orders)
    return tuple(v.permute(order) if order else v for v, order in zip(values, back, strict=True))


def dense_order(tensor: Tensor) -> Order | None:
    """The order of dimensions in which `tensor` is contiguous; None where none is, as in a slice."""
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda d: (-strides[d], d))
    expected = 1
    for dimension in reversed(order):
        if tensor.shape[dimension] != 1:
            if strides[dimension] != expected:
                return None
            expected *= tensor.shape[dimension]
    return tuple(range(tensor.ndim)) if tensor.is_contiguous() else tuple(order)
