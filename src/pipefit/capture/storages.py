"""Tensors that are parts of a storage: the storage as one flat tensor, and tensors laid out in another one alike.

So tensors that lie in one storage still do so after they have been copied, moved or made fake.
"""

from __future__ import annotations

from torch import Tensor


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
