"""A simulation of CUDA's caching allocator: the bytes that torch reserves on a GPU for a program's tensors.

*Requested* bytes are those of the tensors. *Allocated* bytes are those of the blocks that hold them, which
are rounded. *Reserved* bytes are those of the segments that the allocator has from the driver; a GPU runs out
of these. `CachingAllocator` simulates one device, without torch and without a GPU.
"""

from __future__ import annotations

from pipefit.memory.cuda_allocator.caching import (
    BlockState,
    CachingAllocator,
    Figures,
    Replay,
    SegmentPart,
    SegmentState,
    describe,
    replay,
)
from pipefit.memory.cuda_allocator.lifetimes import (
    Excerpt,
    Lifetimes,
    NamedExcerpt,
    planned_bytes,
    with_enough,
)
from pipefit.memory.cuda_allocator.settings import ENVIRONMENT, AllocatorSettings

__all__ = [
    "ENVIRONMENT",
    "AllocatorSettings",
    "BlockState",
    "CachingAllocator",
    "Excerpt",
    "Figures",
    "Lifetimes",
    "NamedExcerpt",
    "Replay",
    "SegmentPart",
    "SegmentState",
    "describe",
    "planned_bytes",
    "replay",
    "with_enough",
]
