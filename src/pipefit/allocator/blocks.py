"""Segments, the blocks that they are cut into, and the free blocks of a pool in the order in which it is searched."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The three numbers of a device, in bytes: of the tensors, of the blocks that hold them, and of all segments."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


class Segment:
    """Memory of the driver, or the addresses of an expandable segment, and the first of its blocks."""

    __slots__ = ("address", "first", "pool", "size")

    def __init__(self, pool: Pool, address: int, size: int, *, mapped: bool) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.first = Block(self, address, size, mapped=mapped)

    def __iter__(self) -> Iterator[Block]:
        """Its blocks by address."""
        block: Block | None = self.first
        while block is not None:
            yield block
            block = block.next


class Block:
    """A part of a segment: in use, free, or addresses without memory.

    `size` is in bytes, and `requested` those of the tensor in it.
    """

    __slots__ = ("address", "allocated", "mapped", "next", "previous", "requested", "segment", "size")

    def __init__(self, segment: Segment, address: int, size: int, *, mapped: bool = True) -> None:
        self.segment, self.address, self.size, self.mapped = segment, address, size, mapped
        self.allocated, self.requested = False, 0
        self.previous: Block | None = None
        self.next: Block | None = None

    @property
    def whole(self) -> bool:
        """Whether it is all of its segment."""
        return self.previous is None and self.next is None

    def cut(self, size: int) -> Block:
        """Keep the first `size` bytes; the rest is a new block behind this one."""
        rest = Block(self.segment, self.address + size, self.size - size, mapped=self.mapped)
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next, self.size = rest, size
        return rest

    def absorb_next(self) -> None:
        """Become one block with the next one."""
        other = self.next
        assert other is not None
        self.size, self.next = self.size + other.size, other.next
        if other.next is not None:
            other.next.previous = self


class Pool:
    """The free blocks of one kind of request on one stream.

    `free` are those with memory, by size and then address, which is the order of the search for the best fit.
    `unmapped` are those without, by address.
    """

    __slots__ = ("free", "page", "small", "stream", "unmapped")

    def __init__(self, stream: int, *, small: bool, page: int) -> None:
        self.stream, self.small, self.page = stream, small, page
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def insert(self, block: Block) -> None:
        """Enter a free block, with memory or without."""
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        """Take a free block out, whose size and address are as they were when it was entered."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def merged(self, block: Block) -> Block:
        """The block that `block`, which is in neither list, becomes together with the free ones beside it."""
        following, previous = block.next, block.previous
        if following is not None and not following.allocated and following.mapped == block.mapped:
            self.remove(following)
            block.absorb_next()
        if previous is not None and not previous.allocated and previous.mapped == block.mapped:
            self.remove(previous)
            previous.absorb_next()
            return previous
        return block
