"""Tensors that are parts of a storage: the storage as one flat tensor, and tensors laid out in another one alike.

So tensors that lie in one storage still do so after they have been copied, moved or made fake.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from torch import Tensor

from pipefit.schema.layer_costs import Order

# ----------------------------------------------------------------------------------------------------
# In which order the dimensions of values lie in memory, so that between layers each can be contiguous without
# a copy.
#
# A value that is laid out otherwise, as after a transpose, crosses with its dimensions in the order of
# memory, and the next layer sees it as it was made. One that no order makes dense, as a slice or an expanded
# one, is copied. So is a tensor of a batch whose samples do not follow each other, since microbatches of it
# would be laid out otherwise than it.

Orders = tuple[Order, ...]  # of several values; empty where each has the order of its dimensions


def orders_of(values: Sequence[Tensor]) -> Orders:
    """The orders in which `values` leave a layer.

    A contiguous one may have another order too, by the strides of its dimensions of size 1, as a value of one channel,
    or of one pixel, whose channels are last. Kernels go by these, and lay out what they make accordingly.
    """
    found = tuple(order if (order := _order(value)) != tuple(range(value.ndim)) else () for value in values)
    return found if any(found) else ()


def _order(value: Tensor) -> Order:
    """The order of dimensions in which a new tensor has the strides of `value`; else one in which it is contiguous."""
    strides, shape = value.stride(), value.shape
    order = tuple(sorted(range(value.ndim), key=lambda d: (-strides[d], shape[d] == 1, d)))
    if _new_strides([shape[d] for d in order]) == tuple(strides[d] for d in order):
        return order
    return dense_order(value) or tuple(range(value.ndim))


def contiguous(values: Sequence[Tensor], orders: Orders) -> tuple[Tensor, ...]:
    """`values` with their dimensions in these orders, each contiguous and with the strides of a new tensor."""
    ordered = values if not orders else tuple(v.permute(o) if o else v for v, o in zip(values, orders, strict=True))
    return tuple(map(_as_new, ordered))


def _as_new(value: Tensor) -> Tensor:
    """`value`, contiguous, with the strides of a new tensor.

    The strides of dimensions of size 1 may be any in a contiguous tensor, and kernels go by them: a value of one
    channel may count as one whose channels are last. A value that is received has those of a new tensor.
    """
    value = value.contiguous()
    if 1 not in value.shape and value.numel():  # there is one way to be contiguous
        return value
    return value if value.stride() == _new_strides(value.shape) else value.view(-1).view(value.shape)


def _new_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a new tensor of this shape."""
    behind = (1, *(max(size, 1) for size in shape[:0:-1]))
    return tuple(accumulate(behind[: len(shape)], mul))[::-1]


def laid_out(tensor: Tensor, order: Order) -> Tensor:
    """`tensor` with its dimensions in this order in memory, or in their own without one; a copy if need be."""
    if order and dense_order(tensor) == order:
        return tensor
    return as_made(contiguous((tensor,), (order,)), (order,))[0]


def sample_order(tensor: Tensor) -> Order:
    """The order of a tensor's dimensions in memory if its samples are one behind the other there; else their own.

    Parts of such a tensor are laid out as it is, as those of pictures whose channels are last.
    """
    order = () if tensor.is_contiguous() else dense_order(tensor) or ()
    return order if order[:1] == (0,) else ()


def as_made(values: tuple[Tensor, ...], orders: Orders) -> tuple[Tensor, ...]:
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


def is_dense(tensor: Tensor, *, of: int) -> bool:
    """Whether some order of dimensions makes `tensor` contiguous, and would if it were of more samples.

    A part of each of several samples is not dense, and that of a single one lies in one piece. So a dimension of size 1
    counts with its stride, as if more could follow, unless the tensor is all of the `of` bytes that it looks at.
    """
    if dense_order(tensor) is None or tensor.nbytes == of:
        return dense_order(tensor) is not None
    ends = {1, *(size * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)}
    return all(stride in ends for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size == 1)


# ----------------------------------------------------------------------------------------------------


def storage_key(tensor: Tensor) -> int:
    """Equal for tensors in one storage, as long as it exists."""
    key: int = tensor.untyped_storage()._cdata
    return key


def without_memory(tensor: Tensor) -> Tensor:
    """`tensor`, whose storage has lost its memory."""
    tensor.untyped_storage().resize_(0)
    return tensor


def needed_bytes(tensor: Tensor) -> int:
    """Bytes that the storage of `tensor` has at least: those up to its last number."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(tensor.storage_offset()) + int(last) + 1) * tensor.element_size()


def flat(tensor: Tensor) -> Tensor:
    """The whole storage of `tensor`, as one tensor of one dimension."""
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((length,), (1,), 0)


def placed(like: Tensor, storage: Tensor) -> Tensor:
    """A tensor laid out in a flat `storage` as `like` is in its own."""
    storage = storage if storage.dtype == like.dtype else storage.view(like.dtype)
    return storage.as_strided(like.shape, like.stride(), like.storage_offset())


def extent(tensor: Tensor) -> tuple[int, int]:
    """Where a tensor begins in its storage, and where it ends, in bytes; it ends where it begins if it is empty."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first, each = int(tensor.storage_offset()), tensor.element_size()
    return first * each, (first + int(last) + 1) * each if tensor.numel() else first * each
