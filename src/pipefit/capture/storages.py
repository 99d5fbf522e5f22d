"""Tensors as parts of a storage: the storage as one flat tensor, and views placed in another storage.

Tensors in one storage thus still share one after they are copied, moved or made fake.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from torch import Tensor

from pipefit.schema.layer_costs import Order

# ---- Memory order of dimensions, with which values are contiguous between layers without a copy
#
# A value with other strides, as after a transpose, crosses with its dimensions in memory order, and the next
# layer sees it with its original strides. A value that no order makes dense, such as a slice or an expanded
# tensor, is copied. So is a tensor of a batch whose samples are not one after the other: its microbatches
# would have other strides.

Orders = tuple[Order, ...]  # one for each value; empty if all are in their own order


def orders_of(values: Sequence[Tensor]) -> Orders:
    """Return the orders of dimensions in which `values` leave a layer.

    A contiguous value may have another order too, by the strides of its dimensions of size 1, such as a value
    of one channel or one pixel in channels-last format. Kernels use these strides for the layout of their
    results.
    """
    result = tuple(order if (order := _order(value)) != tuple(range(value.ndim)) else () for value in values)
    return result if any(result) else ()


def _order(value: Tensor) -> Order:
    """Return an order in which a new tensor has the strides of `value`, or in which `value` is contiguous."""
    strides, shape = value.stride(), value.shape
    order = tuple(sorted(range(value.ndim), key=lambda d: (-strides[d], shape[d] == 1, d)))
    if _new_strides([shape[d] for d in order]) == tuple(strides[d] for d in order):
        return order
    return dense_order(value) or tuple(range(value.ndim))


def contiguous(values: Sequence[Tensor], orders: Orders) -> tuple[Tensor, ...]:
    """Return `values` permuted to these orders, each contiguous and with the strides of a new tensor."""
    ordered = (
        values if not orders else tuple(v.permute(o) if o else v for v, o in zip(values, orders, strict=True))
    )
    return tuple(map(as_new, ordered))


def as_new(value: Tensor) -> Tensor:
    """Return `value`, made contiguous, with the strides of a new tensor.

    Dimensions of size 1 may have any strides in a contiguous tensor, and kernels use them: a value of one
    channel may count as channels-last. A received value has the strides of a new tensor.
    """
    value = value.contiguous()
    if 1 not in value.shape and value.numel():  # only one set of strides is contiguous
        return value
    return value if value.stride() == _new_strides(value.shape) else value.view(-1).view(value.shape)


def _new_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new tensor of this shape."""
    behind = (1, *(max(size, 1) for size in shape[:0:-1]))
    return tuple(accumulate(behind[: len(shape)], mul))[::-1]


def laid_out(tensor: Tensor, order: Order) -> Tensor:
    """Return `tensor` with its dimensions in this memory order, or in their own for an empty order; may
    copy.
    """
    if order and dense_order(tensor) == order:
        return tensor
    return as_made(contiguous((tensor,), (order,)), (order,))[0]


def sample_order(tensor: Tensor) -> Order:
    """Return the memory order of a tensor's dimensions if samples are outermost; otherwise empty.

    Parts of such a tensor have the tensor's layout, as for channels-last images.
    """
    order = () if tensor.is_contiguous() else dense_order(tensor) or ()
    return order if order[:1] == (0,) else ()


def as_made(values: tuple[Tensor, ...], orders: Orders) -> tuple[Tensor, ...]:
    """Return `values` as they were before they were permuted to these orders."""
    if not orders:
        return values
    back = (tuple(order.index(dimension) for dimension in range(len(order))) for order in orders)
    return tuple(v.permute(order) if order else v for v, order in zip(values, back, strict=True))


def dense_order(tensor: Tensor) -> Order | None:
    """Return the order of dimensions in which `tensor` is contiguous; None if there is none, as for a
    slice.
    """
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda d: (-strides[d], d))
    expected = 1
    for dimension in reversed(order):
        if tensor.shape[dimension] != 1:
            if strides[dimension] != expected:
                return None
            expected *= tensor.shape[dimension]
    return tuple(range(tensor.ndim)) if tensor.is_contiguous() else tuple(order)


def is_dense(tensor: Tensor, *, of: int) -> bool:
    """Return whether some order of dimensions makes `tensor` contiguous, for any number of samples.

    A part of each of several samples is not dense, while the part of a single sample is one piece of memory.
    So a dimension of size 1 counts with its stride, as if it were larger, unless the tensor fills the `of`
    bytes that it views.
    """
    if dense_order(tensor) is None or tensor.nbytes == of:
        return dense_order(tensor) is not None
    ends = {
        1,
        *(size * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1),
    }
    return all(
        stride in ends for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size == 1
    )


# ---- Storages


def storage_key(tensor: Tensor) -> int:
    """Return a key that is equal for tensors in one storage, as long as the storage exists."""
    key: int = tensor.untyped_storage()._cdata
    return key


def without_memory(tensor: Tensor) -> Tensor:
    """Free the memory of the storage of `tensor`, and return `tensor`."""
    tensor.untyped_storage().resize_(0)
    return tensor


def needed_bytes(tensor: Tensor) -> int:
    """Return the bytes of its storage that `tensor` needs: up to its last element."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + int(last) + 1) * tensor.element_size()


def flat(tensor: Tensor) -> Tensor:
    """Return the whole storage of `tensor` as a one-dimensional tensor."""
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((length,), (1,), 0)


def placed(like: Tensor, storage: Tensor) -> Tensor:
    """Return a tensor in the flat `storage` with the offset and strides of `like` in its own."""
    storage = storage if storage.dtype == like.dtype else storage.view(like.dtype)
    return storage.as_strided(like.shape, like.stride(), like.storage_offset())


def extent(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor begins and ends in its storage, in bytes; equal for an empty tensor."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first, each = int(tensor.storage_offset()), tensor.element_size()
    return first * each, (first + int(last) + 1) * each if tensor.numel() else first * each
