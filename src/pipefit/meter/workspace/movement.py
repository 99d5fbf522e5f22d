"""Copies, indexing, sorting and matrix products: operands that a kernel must first lay out or widen.

A transposing copy goes through a 60x60 tile (ATen/native/Copy.cpp); BLAS needs unit stride in one dimension, and
anything else is copied first (ATen/native/LinearAlgebra.cpp, `addmm_impl_cpu_`); sorting keeps one row of indices
(ATen/native/cpu/SortingKernel.cpp); a mask used as an index becomes positions (ATen/native/TensorAdvancedIndexing.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipefit.meter.workspace.ledger import Call, contiguous_copy_nbytes, nbytes

aten = torch.ops.aten

TILE = 60
LOW_PRECISION = (torch.bfloat16, torch.float16)


def transpose_tile(destination: torch.Tensor, source: torch.Tensor) -> int:
    """Bytes of the tile of a copy that transposes a matrix of at least one tile; zero for other copies."""
    transposes = (
        source.dim() == 2
        and destination.dim() == 2
        and source.dtype == destination.dtype
        and source.shape == destination.shape
        and source.numel() >= TILE * TILE
        and source.stride(0) == 1
        and source.stride(1) == source.shape[0]
        and destination.is_contiguous()
    )
    return TILE * TILE * source.element_size() if transposes else 0


def copy_(call: Call) -> int | None:
    """`copy_`: the tile of a transposing copy."""
    return transpose_tile(call.args[0], call.args[1]) or None


def clone(call: Call) -> int | None:
    """`clone` into another order: the tile of a transposing copy."""
    out = call.tensors_out()[0]
    tile = transpose_tile(out, call.args[0])
    return nbytes(out) + tile if tile else None


def _blas_copy(matrix: torch.Tensor) -> int:
    """Bytes of the copy of a matrix that BLAS cannot address: neither rows nor columns are contiguous."""
    rows, columns = matrix.shape[-2:]
    row, column = matrix.stride()[-2:]
    addressable = (column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows))
    return 0 if addressable else rows * columns * matrix.element_size()


def product(first: int) -> Callable[[Call], int | None]:
    """The formula of a matrix product whose left operand is argument `first`: copies of what BLAS cannot address."""

    def kernel(call: Call) -> int | None:
        left, right = call.args[first], call.args[first + 1]
        copies = _blas_copy(left) + _blas_copy(right)
        return call.out_nbytes() + copies if copies and left.numel() and right.numel() else None

    return kernel


def sort(call: Call) -> int | None:
    """`sort`: the positions of one row."""
    x, out = call.tensor(0, "self"), call.out_nbytes()
    dim = call.kwargs.get("dim", call.args[1] if len(call.args) > 1 and isinstance(call.args[1], int) else -1)
    return out + 8 * x.shape[dim] if x.dim() and x.shape[dim] > 1 else None


def index(call: Call) -> int | None:
    """`index` by a mask: the positions of what it selects, as many as the output has."""
    masks = [m for m in call.args[1] if m is not None and m.dtype in (torch.bool, torch.uint8)]
    if len(masks) != 1:
        return None
    before = next(i for i, m in enumerate(call.args[1]) if m is masks[0])
    out, dims = call.tensors_out()[0], int(masks[0].dim())
    return nbytes(out) + out.shape[before] * dims * 8


def embedding_backward(call: Call) -> int | None:
    """`embedding_dense_backward`: contiguous copies of gradient and indices (ATen/native/Embedding.cpp)."""
    copies = contiguous_copy_nbytes(call.tensor(0, "grad_output")) + contiguous_copy_nbytes(call.tensor(1, "indices"))
    return call.out_nbytes() + copies if copies else None


def roll(call: Call) -> int | None:
    """`roll` along several dimensions: one at a time, the previous result kept."""
    return 2 * call.out_nbytes() if len(call.args[1]) > 1 else None


def scatter(call: Call) -> int | None:
    """`scatter` and its like into bfloat16 or half: the destination widened to float."""
    x = call.tensor(0, "self")
    return call.out_nbytes() + 4 * x.numel() if x.dtype in LOW_PRECISION else None


def gather(call: Call) -> int | None:
    """`gather` from bfloat16 or half: the result widened to float."""
    out = call.tensors_out()[0]
    return nbytes(out) + 4 * out.numel() if out.dtype in LOW_PRECISION else None


def fused_optimizer(call: Call) -> int | None:
    """Fused optimizers (ATen/native/FusedAdam.cpp): a contiguous copy of each parameter that is not, one at a time."""
    return max((contiguous_copy_nbytes(t) for t in call.args[0]), default=0) or None


KERNELS: Mapping[Any, Callable[[Call], int | None]] = {
    aten.copy_.default: copy_,
    aten.clone.default: clone,
    aten._to_copy.default: clone,
    aten.mm.default: product(0),
    aten.addmm.default: product(1),
    aten.sort.default: sort,
    aten.sort.stable: sort,
    aten.index.Tensor: index,
    aten.embedding_dense_backward.default: embedding_backward,
    aten.roll.default: roll,
    aten.scatter.src: scatter,
    aten.scatter.value: scatter,
    aten.scatter_add.default: scatter,
    aten.gather.default: gather,
    aten._fused_adam_.default: fused_optimizer,
    aten._fused_adamw_.default: fused_optimizer,
}
