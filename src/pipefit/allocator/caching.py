"""One device's caching allocator, as it is in torch 2.11 to 2.15 (`c10/cuda/CUDACachingAllocator.cpp`).

A request is rounded up, and gets the smallest free block of its pool and stream that is large enough, at the lowest
address among equals. The block is split where enough is left. Without such a block a segment is taken from the driver:
2 MiB for requests of up to 1 MiB, 20 MiB for those below 10 MiB, and its own size in multiples of 2 MiB for larger
ones. What is freed becomes one block with its free neighbours and stays reserved. Only where the driver has no memory
left are segments without a tensor given back; then the request is tried again, and after that the device is out of
memory.

Good for: what a sequence of allocations and frees reserves, to the byte. Costs about two microseconds an event.

What is assumed: the driver hands out segments at rising addresses, which decides between free blocks of equal size;
and no tensor is used on a second stream (`record_stream`), which would delay its free. Settings hold from the first
allocation on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import count

from pipefit.allocator.blocks import Block, Figures, Pool, Segment
from pipefit.allocator.expandable import grown, release_pages, room_for
from pipefit.allocator.settings import MIN_BLOCK, SMALL, SMALL_SEGMENT, AllocatorSettings
from pipefit.allocator.snapshot import SegmentState, segment_states
from pipefit.errors import OutOfMemory, UsageError
from pipefit.units import format_bytes

_FAR_APART = 1 << 48  # between the addresses of two segments, so that they never touch
_ENDLESS = 1 << 46  # bytes of a device of which the memory is not said
_DEFAULT = AllocatorSettings()


class CachingAllocator:
    """The caching allocator of one device, empty at first.

    Args:
        settings: as in `PYTORCH_CUDA_ALLOC_CONF`.
        capacity: the device's memory in bytes; None for as much as is asked for.
        taken: bytes of it that the driver gives to others: contexts, communicators, other processes.
        addresses: where the driver puts one segment after the other; rising, unless given.
    """

    def __init__(
        self,
        settings: AllocatorSettings = _DEFAULT,
        capacity: int | None = None,
        *,
        taken: int = 0,
        addresses: Iterator[int] | None = None,
    ) -> None:
        if capacity is None and settings.memory_fraction < 1:
            raise UsageError("per_process_memory_fraction is a part of the device's memory: say its capacity")
        self.settings, self.capacity, self.taken = settings, capacity, taken
        self._limit = (
            None if settings.memory_fraction == 1 or capacity is None else int(settings.memory_fraction * capacity)
        )
        self.requested = self.allocated = self.reserved = 0
        self.retries = 0  # how often cached segments were given back because the driver had no memory left
        self._peak_requested = self._peak_allocated = self._peak_reserved = 0
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._segments: dict[int, Segment] = {}  # by address
        self._addresses = addresses or count(_FAR_APART, _FAR_APART)

    # ---------------------------------------------------------------- figures

    @property
    def now(self) -> Figures:
        """The three numbers at present."""
        return Figures(requested_bytes=self.requested, allocated_bytes=self.allocated, reserved_bytes=self.reserved)

    @property
    def peak(self) -> Figures:
        """The highest value of each number so far, which are not all of one moment."""
        return Figures(
            requested_bytes=self._peak_requested,
            allocated_bytes=self._peak_allocated,
            reserved_bytes=self._peak_reserved,
        )

    def snapshot(self) -> tuple[SegmentState, ...]:
        """All segments with their blocks, by address."""
        return tuple(state for _, segment in sorted(self._segments.items()) for state in segment_states(segment))

    # ---------------------------------------------------------------- allocating and freeing

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """A block for a tensor of `nbytes` on a stream.

        Raises:
            UsageError: not a positive number of bytes; torch takes no block for an empty tensor.
            OutOfMemory: the device has not enough memory left, whatever is given back.
        """
        if nbytes < 1:
            raise UsageError(f"a block holds at least one byte, not {nbytes}: torch allocates none for empty tensors")
        size = self.settings.rounded(nbytes)
        pool = self._pool(stream, small=size <= SMALL)
        block = self._best_fit(pool, size) or self._new(pool, size)
        if block is None:
            raise OutOfMemory(self._out_of_memory(nbytes))
        if self._splits(pool, block.size - size, size):
            pool.insert(block.cut(size))
        block.allocated, block.requested = True, nbytes
        self.requested += nbytes
        self.allocated += block.size
        self._peak_requested = max(self._peak_requested, self.requested)
        self._peak_allocated = max(self._peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Free a block that `allocate` returned."""
        assert block.allocated, "a block is freed once"
        block.allocated = False
        self.requested -= block.requested
        self.allocated -= block.size
        pool = block.segment.pool
        pool.insert(pool.merged(block))

    def empty_cache(self) -> None:
        """Give back to the driver what no tensor is in: whole segments, or whole pages of expandable ones."""
        for pool in self._pools.values():
            if self.settings.expandable:
                released, empty = release_pages(pool)
                self._reserve(-released)
                for segment in empty:
                    del self._segments[segment.address]
            else:
                for _, _, block in [entry for entry in pool.free if entry[2].whole]:
                    self._release(pool, block)

    # ---------------------------------------------------------------- finding a block

    def _pool(self, stream: int, *, small: bool) -> Pool:
        pool = self._pools.get((stream, small))
        if pool is None:
            page = SMALL_SEGMENT if small else self.settings.large_segment_bytes
            pool = self._pools[stream, small] = Pool(stream, small=small, page=page)
        return pool

    def _best_fit(self, pool: Pool, size: int) -> Block | None:
        """The free block that a request of `size` gets, taken out of its pool (`get_free_block`)."""
        free = pool.free
        place = bisect_left(free, (size,))
        if place == len(free):
            return None
        if self.settings.expandable:  # a block at the end of what is mapped is as large as it can become
            while place + 1 < len(free) and _could_become(free[place + 1][2]) < _could_become(free[place][2]):
                place += 1
        block = free[place][2]
        most = self.settings.max_split_bytes
        if most is not None and (size < most <= block.size or (size >= most and block.size >= size + self._rounding)):
            return None
        del free[place]
        return block

    @property
    def _rounding(self) -> int:
        return self.settings.non_split_rounding_bytes or self.settings.large_segment_bytes

    def _splits(self, pool: Pool, rest: int, size: int) -> bool:
        """Whether a block is split of which `rest` would be left beside a request of `size` (`should_split`)."""
        if pool.small or self.settings.expandable:
            return rest >= MIN_BLOCK
        return rest > SMALL and (self.settings.max_split_bytes is None or size < self.settings.max_split_bytes)

    # ---------------------------------------------------------------- the driver's memory

    def _new(self, pool: Pool, size: int) -> Block | None:
        """A block of memory that is new from the driver, after cached memory is given back if need be."""
        block = self._taken_anew(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._taken_anew(pool, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._taken_anew(pool, size)
        return block

    def _taken_anew(self, pool: Pool, size: int) -> Block | None:
        """A new segment, or an expandable one that has grown; None if there is no room (`alloc_block`)."""
        nbytes = self.settings.segment(size)
        if self._limit is not None and self.reserved + nbytes > self._limit:
            return None
        if self.settings.expandable:
            return self._grown(pool, size)
        if not self._has(nbytes):
            return None
        segment = self._enter(pool, nbytes, mapped=True)
        self._reserve(nbytes)
        return segment.first

    def _grown(self, pool: Pool, size: int) -> Block | None:
        """A block of `size` of an expandable segment, of which as many pages are mapped as that needs."""
        start = room_for(pool, size)
        if start is None:
            start = self._enter(pool, self._address_space(pool), mapped=False).first
            pool.insert(start)
        return grown(pool, start, size, self._map)

    def _map(self, nbytes: int) -> bool:
        """Take so many bytes of pages from the driver, if it has them."""
        if not self._has(nbytes):
            return False
        self._reserve(nbytes)
        return True

    def _enter(self, pool: Pool, nbytes: int, *, mapped: bool) -> Segment:
        address = next(self._addresses)
        self._segments[address] = Segment(pool, address, nbytes, mapped=mapped)
        return self._segments[address]

    def _release(self, pool: Pool, block: Block) -> None:
        """Give back the segment that a free block is all of."""
        pool.remove(block)
        del self._segments[block.address]
        self._reserve(-block.size)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Give back as few blocks that are never split as make room for `size`; whether there were such."""
        most = self.settings.max_split_bytes
        if most is None or self.settings.expandable:
            return False
        needed = max(size, most)
        place = bisect_left(pool.free, (needed,))
        if place < len(pool.free):
            self._release(pool, pool.free[place][2])
            return True
        released = 0
        while released < needed and pool.free and pool.free[-1][0] >= most:
            released += pool.free[-1][0]
            self._release(pool, pool.free[-1][2])
        return released >= needed

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        self._peak_reserved = max(self._peak_reserved, self.reserved)

    def _has(self, nbytes: int) -> bool:
        """Whether the driver has so many bytes left."""
        return self.capacity is None or self.taken + self.reserved + nbytes <= self.capacity

    def _address_space(self, pool: Pool) -> int:
        """The addresses of an expandable segment: an eighth more than the device has memory, in whole pages."""
        total = _ENDLESS if self.capacity is None else self.capacity
        return -(-(total + total // 8) // pool.page) * pool.page

    def _out_of_memory(self, nbytes: int) -> str:
        reserved, capacity = format_bytes(self.reserved - self.allocated), self.capacity or 0
        left = max(0, min(capacity - self.taken, self._limit or capacity) - self.reserved)
        return (
            f"no room for {format_bytes(nbytes)}: {format_bytes(self.allocated)} are allocated and {reserved} more are "
            f"reserved, and of the device's {format_bytes(capacity)} {format_bytes(left)} are left: "
            + ("plan for less" if self.settings.expandable else "try expandable_segments:True, or plan for less")
        )


def _could_become(block: Block) -> int:
    """The size of a free block together with the addresses behind it that have no memory yet."""
    following = block.next
    return block.size if following is None or following.mapped else block.size + following.size
