"""CUDA's caching allocator, simulated: what torch reserves on a GPU for the tensors that a program allocates.

Three numbers, never mixed. *Requested* bytes are those of the tensors. *Allocated* bytes are those of the blocks that
hold them, which are rounded. *Reserved* bytes are those of the segments that the allocator has from the driver, and
they are what a GPU runs out of.

`CachingAllocator` simulates one device. It needs no torch and no GPU, and takes about two microseconds an event.
"""

from __future__ import annotations

from pipefit.allocator.blocks import Block, Figures
from pipefit.allocator.caching import CachingAllocator
from pipefit.allocator.history import Replay, replay
from pipefit.allocator.settings import ENVIRONMENT, AllocatorSettings
from pipefit.allocator.snapshot import BlockState, SegmentState, describe

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
