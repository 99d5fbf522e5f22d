"""What counts the memory of a device while it runs: `cpu.Meter` for tensors of the CPU, real or fake, `cuda.CudaMeter`
for a GPU, whose allocator counts by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from pipefit.trace import Category, MemorySample


class MemoryMeter(AbstractContextManager[Any], Protocol):
    """What counts a device's memory: `Meter` for tensors on the CPU, real or fake; `CudaMeter` reads the allocator."""

    def begin(self, action: str) -> None: ...
    def end(self, step: int, seconds: float, category: Category = ...) -> MemorySample: ...
    def tag(self, tensors: Sequence[Tensor | None], category: Category) -> None: ...
    def forget_graphs(self) -> None: ...
