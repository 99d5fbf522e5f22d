"""CUDA's caching allocator, simulated: what torch reserves on a GPU for the tensors that a program allocates.

Three numbers, never mixed. *Requested* bytes are those of the tensors. *Allocated* bytes are those of the blocks that
hold them, which are rounded. *Reserved* bytes are those of the segments that the allocator has from the driver, and
they are what a GPU runs out of.

`CachingAllocator` simulates one device. It needs no torch and no GPU, and takes about two microseconds an event.
"""

from __future__ import annotations

from pipefit.memory.cuda_allocator.caching import Block, BlockState, CachingAllocator, Figures, SegmentState, describe
from pipefit.memory.cuda_allocator.history import Replay, replay
from pipefit.memory.cuda_allocator.settings import ENVIRONMENT, AllocatorSettings

__all__ = [
    "ENVIRONMENT",
    "AllocatorSettings",
    "Block",
    "BlockState",
    "CachingAllocator",
    "Figures",
    "Replay",
    "SegmentState",
    "describe",
    "replay",
]
