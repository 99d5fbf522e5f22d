"""Peaks from allocation sequences: the arithmetic shared by every kernel formula.

A kernel's allocations are written down as a sequence of signed byte counts, in the order in which the kernel makes
them, positive to allocate and negative to free; the peak is the largest running sum. Everything here is integer
arithmetic on shapes, dtypes and strides, so it works on real, fake and meta tensors and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from pipefit.meter.workspace.machine import Cpu

GRAIN_NUMEL = 32768  # elements below which ATen's element-wise loops and reductions stay on one thread


@dataclass(frozen=True, slots=True)
class Call:
    """One dispatched operator call: what a kernel formula may look at."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    out: object
    threads: int
    cpu: Cpu

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """The argument at `position`, or by `name`, or `default` when it was left out."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def tensor(self, position: int, name: str) -> torch.Tensor:
        """The tensor argument at `position`, or by `name`."""
        return cast(torch.Tensor, self.arg(position, name))

    def tensors_out(self) -> list[torch.Tensor]:
        """The output tensors, flattened one level, without the undefined ones."""
        if isinstance(self.out, torch.Tensor):
            return [self.out]
        if isinstance(self.out, (tuple, list)):
            return [t for t in self.out if isinstance(t, torch.Tensor)]
        return []

    def out_nbytes(self) -> int:
        """Bytes of the output tensors, for operators whose outputs are all new and dense."""
        return sum(nbytes(t) for t in self.tensors_out())


def peak(*deltas: int) -> int:
    """The largest running sum of `deltas`, at least zero."""
    live = highest = 0
    for delta in deltas:
        live += delta
        highest = max(highest, live)
    return highest


def nbytes(tensor: torch.Tensor | None) -> int:
    """Bytes of a dense tensor of this shape and dtype; zero for none."""
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def accumulator_nbytes(dtype: torch.dtype) -> int:
    """Bytes of one element of the type in which CPU kernels accumulate `dtype`: float, or double for double."""
    return 8 if dtype in (torch.float64, torch.complex64) else 4


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def ceil_div(value: int, divisor: int) -> int:
    """`value / divisor`, rounded up."""
    return -(-value // divisor)


def contiguous_copy_nbytes(tensor: torch.Tensor | None, *, channels_last: bool = False) -> int:
    """Bytes that `tensor.contiguous(...)` allocates: none when it is already laid out that way."""
    if tensor is None or is_laid_out(tensor, channels_last=channels_last):
        return 0
    return nbytes(tensor)


def is_laid_out(tensor: torch.Tensor, *, channels_last: bool) -> bool:
    """Whether `tensor` is contiguous, in the channels-last order (NHWC or NDHWC) if `channels_last`."""
    if not channels_last or tensor.dim() not in (4, 5):
        return tensor.is_contiguous()
    order = torch.channels_last if tensor.dim() == 4 else torch.channels_last_3d
    return tensor.is_contiguous(memory_format=order)


def suggests_channels_last(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether ATen takes a 4-D tensor for channels-last: strides that increase in the order C, W, H, N.

    The ambiguous shapes (one channel, or one pixel) count as contiguous, as in `c10/core/MemoryFormat.h`.
    """
    if len(sizes) != 4 or strides[1] == 0:
        return False
    smallest = 0
    for dim in (1, 3, 2, 0):
        if sizes[dim] == 0 or strides[dim] < smallest or (dim == 0 and smallest == strides[1]):
            return False
        smallest = strides[dim] * max(sizes[dim], 1)
    return True


def prefers_channels_last(tensor: torch.Tensor) -> bool:
    """`suggests_channels_last` of a tensor."""
    return suggests_channels_last(tensor.shape, tensor.stride())
