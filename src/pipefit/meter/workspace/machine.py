"""What the kernel formulas need to know of the processor, read once.

oneDNN picks the block of its channel-blocked layouts by the widest vector unit: 16 floats with AVX-512, 8 with AVX2.
ATen has a vector level of its own (`torch.backends.cpu.get_cpu_capability`); it stands for both here, so a process
that limits only one of them (ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA) should pass its own `Cpu`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """The processor, as far as the sizes of hidden buffers depend on it."""

    float_lanes: int  # floats in a vector register, which is the channel block of oneDNN: 16, 8, or 1 if unknown
    onednn: bool  # whether convolutions may go to oneDNN at all


@functools.cache
def this_cpu() -> Cpu:
    """The processor of this process."""
    lanes = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 1)
    return Cpu(float_lanes=lanes, onednn=torch._C._has_mkldnn)
