"""Hidden buffers of CPU kernels: the bytes that an operator allocates besides the outputs it returns.

    kernel_peak_bytes(func, args, kwargs, out, threads=torch.get_num_threads())

is the most by which the allocations inside one dispatched ATen operator exceed what was live before it, its outputs
included, or `None` for an operator that allocates nothing else. It looks only at shapes, dtypes, strides and devices,
so real, fake and meta tensors give the same answer, and costs one dictionary look-up for an operator without a
formula. The formulas are those of the kernels in PyTorch 2.13; each family is a module, whose docstring names the
sources and says what is exact.

Not predicted, so too small by the kernel's scratch:
- bfloat16 and half: matrix products (oneDNN packs its operands: up to several times the output where the operands
  are larger), the scratch of convolutions, the products inside the attention backward;
- oneDNN's LSTM (`mkldnn_rnn_layer` and its backward): packed weights and gates, as large as its outputs;
- three-dimensional convolutions, and the backward of transposed ones in double;
- batch norm of an input that is neither contiguous nor channels-last: up to a float copy of it;
- a few bytes of `repeat`, `randperm`, `multinomial`; the temporaries of `cdist`, `unique`, antialiased interpolation,
  integer `clamp` and `index_add` in bfloat16.

A profiler sees only what the calling thread allocates, so what pool threads allocate inside a parallel region (a row
per thread in the attention backward, in sorting and in bfloat16 products) is outside this account as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pipefit.meter.workspace import (
    attention,
    convolution,
    elementwise,
    movement,
    normalization,
    reductions,
    spatial,
)
from pipefit.meter.workspace.ledger import Call
from pipefit.meter.workspace.machine import Cpu, this_cpu

__all__ = ["Cpu", "kernel_peak_bytes", "this_cpu"]

KERNELS: Mapping[Any, Callable[[Call], int | None]] = {
    **elementwise.KERNELS,
    **reductions.KERNELS,
    **normalization.KERNELS,
    **attention.KERNELS,
    **convolution.KERNELS,
    **spatial.KERNELS,
    **movement.KERNELS,
}


def kernel_peak_bytes(
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    out: object,
    *,
    threads: int,
    cpu: Cpu | None = None,
) -> int | None:
    """Most bytes live inside one operator call over those live before it, or `None` if they are its outputs' alone.

    Args:
        func: the operator as a `TorchDispatchMode` below autograd sees it.
        args: its positional arguments.
        kwargs: its keyword arguments.
        out: what it returned.
        threads: threads of the intra-operator pool, `torch.get_num_threads()`.
        cpu: the processor; this one by default.
    """
    kernel = KERNELS.get(func)
    if kernel is None:
        return None
    return kernel(Call(args, kwargs, out, threads, cpu or this_cpu()))
