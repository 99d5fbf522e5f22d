"""What an allocator holds, as data and in words; what `torch.cuda.memory._snapshot()` tells of a real one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from pipefit.allocator.blocks import Block, Segment
from pipefit.texts import counted
from pipefit.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockState:
    """A block of `nbytes`, with a tensor of `requested_bytes` in it; without one it is free."""

    nbytes: int
    requested_bytes: int
    allocated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentState:
    """Neighbouring blocks that have memory: a segment, or a part of an expandable one between pages without memory."""

    address: int
    stream: int
    small: bool
    blocks: tuple[BlockState, ...]

    @property
    def nbytes(self) -> int:
        """What it takes of the device."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of its blocks with tensors."""
        return sum(block.nbytes for block in self.blocks if block.allocated)

    def __str__(self) -> str:
        """One line: `20.00 MiB, large pool: 4.00 MiB in use, 16.00 MiB free`."""
        pool = f"{'small' if self.small else 'large'} pool" + (f", stream {self.stream}" if self.stream else "")
        return f"{format_bytes(self.nbytes)}, {pool}: {', '.join(map(_words, self.blocks))}"


def segment_states(segment: Segment) -> Iterator[SegmentState]:
    """The parts of a segment that have memory."""
    for mapped, run in groupby(segment, key=lambda block: block.mapped):
        blocks = list(run)
        if mapped:
            yield SegmentState(
                address=blocks[0].address,
                stream=segment.pool.stream,
                small=segment.pool.small,
                blocks=tuple(map(_state, blocks)),
            )


def describe(segments: Sequence[SegmentState]) -> str:
    """All segments in words, a line for each, and their sum in the first."""
    reserved, allocated = (
        sum(sizes) for sizes in ([s.nbytes for s in segments], [s.allocated_bytes for s in segments])
    )
    head = (
        f"{counted(len(segments), 'segment')}, {format_bytes(reserved)} reserved, {format_bytes(allocated)} allocated"
    )
    return "\n".join([head, *map(str, segments)])


def _state(block: Block) -> BlockState:
    return BlockState(
        nbytes=block.size, requested_bytes=block.requested if block.allocated else 0, allocated=block.allocated
    )


def _words(block: BlockState) -> str:
    return f"{format_bytes(block.nbytes)} {'in use' if block.allocated else 'free'}"
