"""Memory meters of a running device, and the memory of CPU kernels.

`cpu.Meter` counts tensors on the CPU, real or fake; `cuda.CudaMeter` reads the statistics of a GPU's
allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from pipefit.measure.cpu import SCALAR_BYTES, Meter, OverCap, Tracked, saving_nothing
from pipefit.measure.cuda import CudaMeter, HostWatch, Mark, Stopwatch
from pipefit.measure.kernels import Kernels, counted_flops, in_layout, layouts_of, this_machine, threads_of
from pipefit.schema.trace import AllocatorPeaks, Category, MemorySample


class MemoryMeter(AbstractContextManager[Any], Protocol):
    """Interface through which a runtime reports the actions of a program on a metered device.

    `allocator` are the peaks of the device's caching allocator; None if it does not have one.
    """

    @property
    def allocator(self) -> AllocatorPeaks | None: ...
    def begin(self, action: str) -> None: ...
    def end(self, step: int, seconds: float, category: Category = ...) -> MemorySample: ...
    def tag(self, tensors: Sequence[Tensor | None], category: Category) -> None: ...
    def reserve(self, nbytes: int) -> None: ...
    def resized(self, storage: torch.UntypedStorage) -> None: ...
    def drop_graph(self) -> None: ...
    def forget_graphs(self) -> None: ...


__all__ = [
    "SCALAR_BYTES",
    "CudaMeter",
    "HostWatch",
    "Kernels",
    "Mark",
    "Meter",
    "OverCap",
    "Stopwatch",
    "Tracked",
    "counted_flops",
    "in_layout",
    "layouts_of",
    "saving_nothing",
    "this_machine",
    "threads_of",
]
