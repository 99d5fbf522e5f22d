"""Reserved bytes of torchgpipe's copies between stages, which are allocated on streams of their own.

Every copy of a microbatch has a stream of its device (`_ensure_copy_streams`), of 32 that torch has, and the caching
allocator gives a block only to the stream that its segment belongs to. So received tensors, and gradients that come
back, fill segments of up to 32 streams, each of at least 2 or 20 MiB. Skips go directly to the stage that reads them
(`torchgpipe.skip`), where pipefit passes them on from stage to stage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from pipefit import Plan
from pipefit.memory import CachingAllocator
from pipefit.schema.layer_costs import LayerCost

STREAMS = 32  # `kStreamsPerPool` of c10/cuda/CUDAStream.cpp


def copies(plan: Plan) -> tuple[Mapping[int, list[int]], Mapping[int, list[int]]]:
    """Return the bytes of the tensors that a microbatch brings to every stage, and of the gradients that return."""
    costs = plan.profile.at(plan.training.microbatch_size).costs
    received, returned = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    crossing: dict[int, int] = {}  # the stage that made each input of the next stage
    for number, stage in enumerate(plan.stages):
        layers = costs[stage.start : stage.stop]
        passed = {
            place: origin
            for place in range(len(layers[-1].outputs))
            if (origin := _input(layers, place)) is not None
        }
        last = number + 1 == len(plan.stages)
        for place, value in enumerate(layers[0].inputs):
            if number and (last or place not in passed.values()):
                received[number].append(value.nbytes)
                returned[crossing[place]].append(value.nbytes)
        crossing = {
            place: crossing.get(passed[place], number) if place in passed else number
            for place in range(len(layers[-1].outputs))
        }
    return received, returned


def _input(layers: Sequence[LayerCost], place: int) -> int | None:
    """Return the input of a stage that it passes on as this output; None if it made the output."""
    for cost in reversed(layers):
        origin = cost.output_origins[place]
        if origin.kind != "input":
            return None
        place = origin.index
    return place


def reserved_bytes(received: Sequence[int], returned: Sequence[int], microbatches: int) -> int:
    """Return the bytes of a device's segments for copies, in a step of GPipe whose stages keep what they received."""
    allocator = CachingAllocator()
    streams = [1 + number % STREAMS for number in range(microbatches)]
    kept = [[allocator.allocate(size, stream) for size in received] for stream in streams]
    for stream, blocks in reversed(list(zip(streams, kept, strict=True))):
        for block in [*(allocator.allocate(size, stream) for size in returned), *blocks]:
            allocator.free(block)
    return allocator.peak.reserved_bytes
