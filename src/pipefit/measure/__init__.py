"""Memory meters of a running device, and the memory of CPU kernels.

`cpu.Meter` counts tensors on the CPU, real or fake; `cuda.CudaMeter` reads the statistics of a GPU's
allocator.
"""

from __future__ import annotations

from pipefit.measure.cpu import SCALAR_BYTES, Meter, Number, OverCap, Tracked, saving_nothing
from pipefit.measure.cuda import CudaMeter, HostWatch, Mark, Stopwatch
from pipefit.measure.kernels import Kernels, counted_flops, in_layout, layouts_of, this_machine, threads_of

MemoryMeter = Meter | CudaMeter  # through which a runtime reports the actions of a program

__all__ = [
    "SCALAR_BYTES",
    "CudaMeter",
    "HostWatch",
    "Kernels",
    "Mark",
    "MemoryMeter",
    "Meter",
    "Number",
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
