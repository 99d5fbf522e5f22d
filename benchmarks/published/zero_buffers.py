"""Buffers of DeepSpeed 0.5's ZeRO 1 that live while no activation does, so they do not count for the allocated peak.

The caching allocator keeps them, and `nvidia-smi` shows them: they are flat, and what activations left behind is in
pieces of a tensor each. (DeepSpeed's `stage_1_and_2.py` and `bf16_optimizer.py` of February to April 2022.)
"""

from __future__ import annotations

from pipefit.memory import CachingAllocator

BUCKET = 500_000_000  # elements of a reduced or gathered bucket, by default


def flat_bytes(parameters: int, largest: int, replicas: int, *, wide: bool) -> int:
    """Return the bytes that a step's flat buffers reserve beside activations and model state.

    Args:
        parameters: elements of a rank's parameters.
        largest: elements of its largest parameter.
        replicas: ranks that divide the optimizer state.
        wide: whether gradients are accumulated in a flat float32 buffer of the model state.
    """
    allocator = CachingAllocator()

    def once(*sizes: int) -> None:
        for block in [allocator.allocate(size) for size in sizes if size]:
            allocator.free(block)

    if wide:
        once(4 * largest)  # a gradient in float32, added to the buffer
    else:
        part = -(-parameters // replicas)
        once(2 * min(parameters, BUCKET))  # reduced together
        once(4 * largest)  # in float32, tested for infinity
        once(8 * largest)  # in float64, for the norm
        once(2 * part, 4 * part)  # a replica's part, flat, and in float32
    if replicas > 1:
        once(2 * parameters // max(1, parameters // BUCKET))  # parameters gathered from all replicas
    return allocator.peak.reserved_bytes
