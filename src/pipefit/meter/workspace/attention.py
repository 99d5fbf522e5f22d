"""Attention: `_scaled_dot_product_flash_attention_for_cpu` and its backward.

ATen/native/cpu/FlashAttentionKernel.cpp tiles queries by 32, 64 or 256 (from 192 and from 768 of them) and keys by
512, and gives each thread, in the type of accumulation, one tile of scores, the running maximum and sum of its
queries and its tile of the output; for bfloat16 and half also a tile of scores in that type. The backward keeps two
tiles per thread, one row of inner products (only that of the calling thread is seen by a profiler), and a copy of a
gradient that is not laid out batch, token, head, channel.

Exact for float and double, and for the bfloat16 forward where oneDNN's packed kernels do not apply (no AMX). The
bfloat16 backward runs its products through oneDNN, whose scratch (hundreds of KiB at most: one packed tile) is not
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipefit.meter.workspace.ledger import Call, accumulator_nbytes, nbytes

aten = torch.ops.aten

KEY_TILE = 512


def query_tile(queries: int) -> int:
    """Queries in one tile."""
    return min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32)


def forward(call: Call) -> int | None:
    """One set of tiles per thread."""
    query, key = call.tensor(0, "query"), call.tensor(1, "key")
    rows, columns = query_tile(query.shape[2]), min(KEY_TILE, key.shape[2])
    floats = call.threads * rows * (columns + 2 + query.shape[3])
    reduced = call.threads * rows * columns * query.element_size() if query.element_size() < 4 else 0
    return call.out_nbytes() + floats * accumulator_nbytes(query.dtype) + reduced


def backward(call: Call) -> int | None:
    """Two tiles per thread, a row of inner products, and the gradient in the kernel's order."""
    grad, query, key = call.tensor(0, "grad_out"), call.tensor(1, "query"), call.tensor(2, "key")
    rows, columns = query_tile(query.shape[2]), min(KEY_TILE, key.shape[2])
    tiles = 2 * call.threads * rows * columns
    width = accumulator_nbytes(query.dtype)
    reduced = tiles * query.element_size() if query.element_size() < 4 else 0
    copy = 0 if grad.transpose(1, 2).is_contiguous() else nbytes(grad)
    return call.out_nbytes() + copy + (tiles + rows) * width + reduced


KERNELS: Mapping[Any, Callable[[Call], int | None]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: forward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: backward,
}
