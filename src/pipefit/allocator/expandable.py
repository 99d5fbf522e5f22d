"""Expandable segments: addresses for the whole device's memory, of which pages get memory as they are needed.

A segment belongs to one pool and stream. Free blocks in it are found as in any segment. Where none is large enough, the
lowest free addresses are taken that have room, and the pages among them that have no memory are mapped: of 2 MiB in the
small pool, of `large_segment_bytes` in the large one (note "Expandable Segments" in CUDACachingAllocator.cpp).
"""

from __future__ import annotations

from collections.abc import Callable

from pipefit.allocator.blocks import Block, Pool, Segment


def room_for(pool: Pool, size: int) -> Block | None:
    """The first of neighbouring free blocks, not all with memory, that together have `size` (`find_expandable_block`).

    None if no segment has room.
    """
    for _, block in pool.unmapped:
        previous = block.previous
        start = previous if previous is not None and not previous.allocated else block
        if _has_room(start, size):
            return start
    return None


def _has_room(start: Block, size: int) -> bool:
    block: Block | None = start
    while block is not None and not block.allocated and size > 0:
        size -= block.size
        block = block.next
    return size <= 0


def grown(pool: Pool, start: Block, size: int, take: Callable[[int], bool]) -> Block | None:
    """A free block of at least `size` from `start` on, taken out of its pool (`try_allocate_expandable_block`).

    `take` gets memory from the driver, if it has so much. None if it has not: what was mapped before stays.
    """
    block: Block | None = start if start.mapped else _mapped(pool, start, min(start.size, size), take)
    while block is not None and block.size < size:
        following = block.next
        assert following is not None
        block = _mapped(pool, following, min(size - block.size, following.size), take)
    if block is not None:
        pool.remove(block)
    return block


def _mapped(pool: Pool, block: Block, size: int, take: Callable[[int], bool]) -> Block | None:
    """Give memory to whole pages at the beginning of `block`. Returns the free block that they are in then."""
    size = -(-size // pool.page) * pool.page
    if not take(size):
        return None
    pool.remove(block)
    if size < block.size:
        pool.insert(block.cut(size))
    block.mapped = True
    block = pool.merged(block)
    pool.insert(block)
    return block


def release_pages(pool: Pool) -> tuple[int, list[Segment]]:
    """Take the memory from all pages without a tensor (`unmap_block`). Returns its bytes, and segments left empty."""
    released, empty = 0, []
    for _, _, block in list(pool.free):
        first, end = _pages(block, pool.page)
        if first < end:
            released += end - first
            bare = _unmapped(pool, block, first, end)
            if bare.whole:
                pool.remove(bare)
                empty.append(bare.segment)
    return released, empty


def _pages(block: Block, page: int) -> tuple[int, int]:
    """The addresses between which whole pages lie in a block."""
    base = block.segment.address
    first, end = block.address - base, block.address - base + block.size
    return base - (-first // page) * page, base + end // page * page


def _unmapped(pool: Pool, block: Block, first: int, end: int) -> Block:
    """Take the memory of a free block from `first` to `end`. Returns the block without memory that they are in then."""
    pool.remove(block)
    if block.address < first:
        front, block = block, block.cut(first - block.address)
        pool.insert(front)
    if end < block.address + block.size:
        pool.insert(block.cut(end - block.address))
    block.mapped = False
    block = pool.merged(block)
    pool.insert(block)
    return block
