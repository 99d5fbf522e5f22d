"""One device's caching allocator, as in torch 2.11 to 2.15 (`c10/cuda/CUDACachingAllocator.cpp`).

A request is rounded up, and gets the smallest free block of its pool and stream that is large enough, at the
lowest address among equals. The block is split if enough is left. Without such a block a segment is taken
from the driver: 2 MiB for requests of up to 1 MiB, 20 MiB for requests below 10 MiB, and multiples of 2 MiB
for larger ones. A freed block is merged with its free neighbours and stays reserved. Only if the driver has
no memory left are segments without a tensor released; then the request is tried again, and after that the
device is out of memory.

Assumptions: the driver hands out segments at rising addresses, which decides between free blocks of equal
size; no tensor is used on a second stream (`record_stream`), which would delay its free; settings hold from
the first allocation on. Reserved bytes are then exact.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby
from typing import Any

from pipefit.errors import OutOfMemory, UsageError
from pipefit.memory.cuda_allocator.settings import MIN_BLOCK, SMALL, SMALL_SEGMENT, AllocatorSettings
from pipefit.texts import counted
from pipefit.units import format_bytes

# ---- Segments, blocks and pools


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The three figures of a device, in bytes: of tensors, of the blocks that hold them, and of all
    segments.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


class Segment:
    """Memory of the driver, or the addresses of an expandable segment, and the first of its blocks."""

    __slots__ = ("address", "first", "pool", "size")

    def __init__(self, pool: Pool, address: int, size: int, *, mapped: bool) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.first = SegmentPart(self, address, size, mapped=mapped)

    def __iter__(self) -> Iterator[SegmentPart]:
        """Yield the blocks by address."""
        block: SegmentPart | None = self.first
        while block is not None:
            yield block
            block = block.next


class SegmentPart:
    """A part of a segment: in use, free, or addresses without memory.

    `size` is in bytes; `requested` is the size of the tensor in it.
    """

    __slots__ = ("address", "allocated", "mapped", "next", "previous", "requested", "segment", "size")

    def __init__(self, segment: Segment, address: int, size: int, *, mapped: bool = True) -> None:
        self.segment, self.address, self.size, self.mapped = segment, address, size, mapped
        self.allocated, self.requested = False, 0
        self.previous: SegmentPart | None = None
        self.next: SegmentPart | None = None

    @property
    def whole(self) -> bool:
        """True if the block fills its segment."""
        return self.previous is None and self.next is None

    def cut(self, size: int) -> SegmentPart:
        """Keep the first `size` bytes; return the rest as a new block after this one."""
        rest = SegmentPart(self.segment, self.address + size, self.size - size, mapped=self.mapped)
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next, self.size = rest, size
        return rest

    def absorb_next(self) -> None:
        """Merge with the next block."""
        other = self.next
        assert other is not None
        self.size, self.next = self.size + other.size, other.next
        if other.next is not None:
            other.next.previous = self


class Pool:
    """The free blocks of one kind of request on one stream.

    `free` are the blocks with memory, by size and then address, which is the order of the search for the best
    fit. `unmapped` are the blocks without memory, by address.
    """

    __slots__ = ("free", "page", "small", "stream", "unmapped")

    def __init__(self, stream: int, *, small: bool, page: int) -> None:
        self.stream, self.small, self.page = stream, small, page
        self.free: list[tuple[int, int, SegmentPart]] = []
        self.unmapped: list[tuple[int, SegmentPart]] = []

    def insert(self, block: SegmentPart) -> None:
        """Insert a free block, with memory or without."""
        if block.mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: SegmentPart) -> None:
        """Remove a free block whose size and address have not changed since it was inserted."""
        if block.mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def merged(self, block: SegmentPart) -> SegmentPart:
        """Merge `block`, which is in neither list, with its free neighbours; return the result."""
        following, previous = block.next, block.previous
        if following is not None and not following.allocated and following.mapped == block.mapped:
            self.remove(following)
            block.absorb_next()
        if previous is not None and not previous.allocated and previous.mapped == block.mapped:
            self.remove(previous)
            previous.absorb_next()
            return previous
        return block


# ---- Expandable segments: addresses for the whole device's memory, whose pages get memory as they are needed
#
# A segment belongs to one pool and stream. Free blocks in it are found as in any segment. If none is large
# enough, the lowest free addresses with room are taken, and the pages among them without memory are mapped:
# of 2 MiB in the small pool, of `large_segment_bytes` in the large one (note "Expandable Segments" in
# CUDACachingAllocator.cpp).


def room_for(pool: Pool, size: int) -> SegmentPart | None:
    """Return the first of neighbouring free blocks, not all with memory, that together have `size` bytes.

    Returns None without room (`find_expandable_block`).
    """
    for _, block in pool.unmapped:
        previous = block.previous
        start = previous if previous is not None and not previous.allocated else block
        if _has_room(start, size):
            return start
    return None


def _has_room(start: SegmentPart, size: int) -> bool:
    block: SegmentPart | None = start
    while block is not None and not block.allocated and size > 0:
        size -= block.size
        block = block.next
    return size <= 0


def grown(pool: Pool, start: SegmentPart, size: int, take: Callable[[int], bool]) -> SegmentPart | None:
    """Return a free block of at least `size` from `start` on, removed from its pool.

    This is `try_allocate_expandable_block`.

    `take` gets memory from the driver, if it has enough. None if not; pages mapped before stay mapped.
    """
    block: SegmentPart | None = start if start.mapped else _mapped(pool, start, min(start.size, size), take)
    while block is not None and block.size < size:
        following = block.next
        assert following is not None
        block = _mapped(pool, following, min(size - block.size, following.size), take)
    if block is not None:
        pool.remove(block)
    return block


def _mapped(pool: Pool, block: SegmentPart, size: int, take: Callable[[int], bool]) -> SegmentPart | None:
    """Map whole pages at the beginning of `block`.

    Returns the free block that contains them, or None without memory.
    """
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
    """Unmap all pages without a tensor (`unmap_block`); return their bytes, and the segments left empty."""
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


def _pages(block: SegmentPart, page: int) -> tuple[int, int]:
    """Return the start and end address of the whole pages in a block."""
    base = block.segment.address
    first, end = block.address - base, block.address - base + block.size
    return base - (-first // page) * page, base + end // page * page


def _unmapped(pool: Pool, block: SegmentPart, first: int, end: int) -> SegmentPart:
    """Unmap a free block from `first` to `end`; return the block without memory that contains them."""
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


# ---- Snapshots, as `torch.cuda.memory._snapshot()` gives for a real allocator


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockState:
    """A block of `nbytes`, with a tensor of `requested_bytes` in it if `allocated`, else free."""

    nbytes: int
    requested_bytes: int
    allocated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentState:
    """Neighbouring blocks with memory: a segment, or a part of an expandable one."""

    address: int
    stream: int
    small: bool
    blocks: tuple[BlockState, ...]

    @property
    def nbytes(self) -> int:
        """The bytes that it takes of the device."""
        return sum(block.nbytes for block in self.blocks)

    @property
    def allocated_bytes(self) -> int:
        """The bytes of its blocks with tensors."""
        return sum(block.nbytes for block in self.blocks if block.allocated)

    def __str__(self) -> str:
        """Return one line: `20.00 MiB, large pool: 4.00 MiB in use, 16.00 MiB free`."""
        pool = f"{'small' if self.small else 'large'} pool" + (
            f", stream {self.stream}" if self.stream else ""
        )
        return f"{format_bytes(self.nbytes)}, {pool}: {', '.join(map(_words, self.blocks))}"


def segment_states(segment: Segment) -> Iterator[SegmentState]:
    """Yield the parts of a segment that have memory."""
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
    """Describe all segments, one per line, after a line with their sum."""
    reserved, allocated = (
        sum(sizes) for sizes in ([s.nbytes for s in segments], [s.allocated_bytes for s in segments])
    )
    head = (
        f"{counted(len(segments), 'segment')}, {format_bytes(reserved)} reserved, {format_bytes(allocated)} "
        "allocated"
    )
    return "\n".join([head, *map(str, segments)])


def _state(block: SegmentPart) -> BlockState:
    return BlockState(
        nbytes=block.size,
        requested_bytes=block.requested if block.allocated else 0,
        allocated=block.allocated,
    )


def _words(block: BlockState) -> str:
    return f"{format_bytes(block.nbytes)} {'in use' if block.allocated else 'free'}"


# ---- The allocator

_FAR_APART = 1 << 48  # distance between the addresses of two segments, so that they never touch
_ENDLESS = 1 << 46  # bytes of a device of unspecified memory
_DEFAULT = AllocatorSettings()


class CachingAllocator:
    """The caching allocator of one device, empty at first.

    Args:
        settings: as in `PYTORCH_CUDA_ALLOC_CONF`.
        capacity: the device's memory in bytes; None for unlimited memory.
        taken: bytes of it that the driver gives to others: contexts, communicators, other processes.
        addresses: the addresses of successive segments; rising by default.
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
            raise UsageError(
                "per_process_memory_fraction is a fraction of the device's memory: give the device's capacity"
            )
        self.settings, self.capacity, self.taken = settings, capacity, taken
        self._limit = (
            None
            if settings.memory_fraction == 1 or capacity is None
            else int(settings.memory_fraction * capacity)
        )
        self.requested = self.allocated = self.reserved = 0
        self.retries = 0  # times that cached segments were released because the driver had no memory left
        self.least_refused: int | None = (
            None  # the least capacity with which a refused request had been granted
        )
        self._peak_requested = self._peak_allocated = self._peak_reserved = 0
        self._sizes: dict[int, int] = {}  # rounded, by requested bytes
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._segments: dict[int, Segment] = {}  # by address
        self._addresses = addresses or count(_FAR_APART, _FAR_APART)

    # ---- Figures

    @property
    def now(self) -> Figures:
        """The current figures."""
        return Figures(
            requested_bytes=self.requested, allocated_bytes=self.allocated, reserved_bytes=self.reserved
        )

    @property
    def peak(self) -> Figures:
        """The highest value of each figure so far, not all at one moment."""
        return Figures(
            requested_bytes=self._peak_requested,
            allocated_bytes=self._peak_allocated,
            reserved_bytes=self._peak_reserved,
        )

    def snapshot(self) -> tuple[SegmentState, ...]:
        """Return all segments with their blocks, by address."""
        return tuple(
            state for _, segment in sorted(self._segments.items()) for state in segment_states(segment)
        )

    def state(self, names: Mapping[SegmentPart, Hashable]) -> Hashable:
        """Return all that decides about later requests, the addresses of segments by order only.

        Blocks with tensors are called by these names.
        """
        return tuple(
            (
                segment.pool.stream,
                segment.pool.small,
                *(
                    (block.size, block.requested, names[block])
                    if block.allocated
                    else (block.size, block.mapped)
                    for block in segment
                ),
            )
            for _, segment in sorted(self._segments.items())
        )

    # ---- Allocating and freeing

    def allocate(self, nbytes: int, stream: int = 0) -> SegmentPart:
        """Allocate a block for a tensor of `nbytes` on a stream.

        Raises:
            UsageError: not a positive number of bytes; torch allocates no block for an empty tensor.
            OutOfMemory: the device has not enough memory left, even after releasing cached memory.
        """
        if nbytes < 1:
            raise UsageError(
                f"a block must hold at least one byte, not {nbytes}: torch does not allocate memory for "
                "empty tensors"
            )
        size = self._sizes.get(nbytes) or self._sizes.setdefault(nbytes, self.settings.rounded(nbytes))
        pool = self._pools.get((stream, size <= SMALL)) or self._pool(stream, small=size <= SMALL)
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

    def free(self, block: SegmentPart) -> None:
        """Free a block that `allocate` returned."""
        assert block.allocated, "a block is freed once"
        block.allocated = False
        self.requested -= block.requested
        self.allocated -= block.size
        pool = block.segment.pool
        pool.insert(pool.merged(block))

    def empty_cache(self) -> None:
        """Release memory without tensors to the driver: whole segments, or whole pages of expandable ones."""
        for pool in self._pools.values():
            if self.settings.expandable:
                released, empty = release_pages(pool)
                self._reserve(-released)
                for segment in empty:
                    del self._segments[segment.address]
            else:
                for _, _, block in [entry for entry in pool.free if entry[2].whole]:
                    self._release(pool, block)

    # ---- Finding a block

    def _pool(self, stream: int, *, small: bool) -> Pool:
        pool = self._pools.get((stream, small))
        if pool is None:
            page = SMALL_SEGMENT if small else self.settings.large_segment_bytes
            pool = self._pools[stream, small] = Pool(stream, small=small, page=page)
        return pool

    def _best_fit(self, pool: Pool, size: int) -> SegmentPart | None:
        """Return the free block for a request of `size`, removed from its pool (`get_free_block`)."""
        free = pool.free
        place = bisect_left(free, (size,))
        if place == len(free):
            return None
        if self.settings.expandable:  # a block at the end of the mapped pages is as large as it can become
            while place + 1 < len(free) and _could_become(free[place + 1][2]) < _could_become(free[place][2]):
                place += 1
        block = free[place][2]
        most = self.settings.max_split_bytes
        if most is not None and (
            size < most <= block.size or (size >= most and block.size >= size + self._rounding)
        ):
            return None
        del free[place]
        return block

    @property
    def _rounding(self) -> int:
        return self.settings.non_split_rounding_bytes or self.settings.large_segment_bytes

    def _splits(self, pool: Pool, rest: int, size: int) -> bool:
        """Return whether a block is split if `rest` bytes would be left after a request of `size`
        (`should_split`).
        """
        if pool.small or self.settings.expandable:
            return rest >= MIN_BLOCK
        return rest > SMALL and (
            self.settings.max_split_bytes is None or size < self.settings.max_split_bytes
        )

    # ---- The driver's memory

    def _new(self, pool: Pool, size: int) -> SegmentPart | None:
        """Return a block of new memory from the driver, after releasing cached memory if necessary."""
        block = self._taken_anew(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._taken_anew(pool, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._taken_anew(pool, size)
        return block

    def _taken_anew(self, pool: Pool, size: int) -> SegmentPart | None:
        """Return a new segment's block, or that of an expandable segment that has grown.

        Returns None without room (`alloc_block`).
        """
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

    def _grown(self, pool: Pool, size: int) -> SegmentPart | None:
        """Return a block of `size` of an expandable segment, after mapping the necessary pages."""
        start = room_for(pool, size)
        if start is None:
            start = self._enter(pool, self._address_space(pool), mapped=False).first
            pool.insert(start)
        return grown(pool, start, size, self._map)

    def _map(self, nbytes: int) -> bool:
        """Take `nbytes` of pages from the driver; return whether it has them."""
        if not self._has(nbytes):
            return False
        self._reserve(nbytes)
        return True

    def _enter(self, pool: Pool, nbytes: int, *, mapped: bool) -> Segment:
        address = next(self._addresses)
        self._segments[address] = Segment(pool, address, nbytes, mapped=mapped)
        return self._segments[address]

    def _release(self, pool: Pool, block: SegmentPart) -> None:
        """Release the segment that a free block fills."""
        pool.remove(block)
        del self._segments[block.address]
        self._reserve(-block.size)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Release as few of the blocks that are never split as make room for `size`; return whether they
        do.
        """
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
        """Return whether the driver has `nbytes` left."""
        if self.capacity is None:
            return True
        needed = self.taken + self.reserved + nbytes
        if needed > self.capacity and (self.least_refused is None or needed < self.least_refused):
            self.least_refused = needed
        return needed <= self.capacity

    def _address_space(self, pool: Pool) -> int:
        """Return the size of an expandable segment's address space.

        It is 9/8 of the device's memory, in whole pages.
        """
        total = _ENDLESS if self.capacity is None else self.capacity
        return -(-(total + total // 8) // pool.page) * pool.page

    def _out_of_memory(self, nbytes: int) -> str:
        reserved, capacity = format_bytes(self.reserved - self.allocated), self.capacity or 0
        left = max(0, min(capacity - self.taken, self._limit or capacity) - self.reserved)
        return (
            f"no room for {format_bytes(nbytes)}: {format_bytes(self.allocated)} are allocated and "
            f"{reserved} more are "
            f"reserved, and of the device's {format_bytes(capacity)} {format_bytes(left)} are left: "
            + (
                "plan for less memory"
                if self.settings.expandable
                else "try expandable_segments:True, or plan for less memory"
            )
        )


def _could_become(block: SegmentPart) -> int:
    """Return the size of a free block together with the following addresses that have no memory yet."""
    following = block.next
    return block.size if following is None or following.mapped else block.size + following.size


_SHOWN = 10  # differences that are reported; later ones mostly follow from them
_ELSEWHERE = 1 << 60  # addresses of segments that the real allocator did not take


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The comparison of a history with its replay: allocations, peaks, and the first differences in words."""

    allocations: int
    peak: Figures
    recorded_reserved_bytes: int
    differences: tuple[str, ...]

    def __str__(self) -> str:
        """Return the compared figures, and the differences."""
        reserved = (
            f"{format_bytes(self.peak.reserved_bytes)} reserved, recorded "
            f"{format_bytes(self.recorded_reserved_bytes)}"
        )
        verdict = "every block is at its recorded address" if not self.differences else "differences:"
        return "\n".join([f"{self.allocations} allocations, {reserved}: {verdict}", *self.differences])


def replay(history: Iterable[Mapping[str, Any]], settings: AllocatorSettings = _DEFAULT) -> Replay:
    """Replay the recorded history of one device from its beginning.

    `history` is an entry of `torch.cuda.memory._snapshot()["device_traces"]`.

    Raises:
        UsageError: it begins in the middle: it frees a block whose allocation is not recorded.
    """
    return _Replayed(settings).of(history)


class _Replayed:
    """A replay in progress: the simulated allocator, and the recorded state at the same moment."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self._given: deque[int] = deque()  # addresses of segments that the real driver has just handed out
        self._allocator = CachingAllocator(settings, addresses=self._addresses())
        self._blocks: dict[int, SegmentPart] = {}  # by recorded address
        self._reserved = self._highest = self._count = 0
        self._emptied = False
        self._differences: list[str] = []

    def _addresses(self) -> Iterator[int]:
        for address in count(_ELSEWHERE, 1 << 48):
            yield self._given.popleft() if self._given else address

    def of(self, history: Iterable[Mapping[str, Any]]) -> Replay:
        """Replay the whole history, entry by entry."""
        for position, entry in enumerate(history):
            action = entry["action"]
            if action in ("segment_alloc", "segment_map"):
                self._take(entry["addr"], entry["size"])
            elif action in ("segment_free", "segment_unmap"):
                self._give_back(entry["size"])
            elif action == "alloc":
                self._allocate(position, entry["addr"], entry["size"], entry.get("stream", 0))
            elif action == "free_completed":
                self._free(position, entry["addr"])
        return Replay(
            allocations=self._count,
            peak=self._allocator.peak,
            recorded_reserved_bytes=self._highest,
            differences=tuple(self._differences[:_SHOWN]),
        )

    def _take(self, address: int, nbytes: int) -> None:
        self._given.append(address)
        self._reserved += nbytes
        self._highest = max(self._highest, self._reserved)

    def _give_back(self, nbytes: int) -> None:
        if not self._emptied:
            self._allocator.empty_cache()
        self._emptied = True
        self._reserved -= nbytes

    def _allocate(self, position: int, address: int, nbytes: int, stream: int) -> None:
        self._emptied = False
        self._count += 1
        block = self._blocks[address] = self._allocator.allocate(nbytes, stream)
        self._given.clear()
        if block.address != address:
            self._differ(position, nbytes, f"is at {block.address:#x}, recorded at {address:#x}")
        if self._allocator.reserved != self._reserved:
            result, recorded = format_bytes(self._allocator.reserved), format_bytes(self._reserved)
            self._differ(position, nbytes, f"leaves {result} reserved, recorded {recorded}")

    def _free(self, position: int, address: int) -> None:
        self._emptied = False
        if address not in self._blocks:
            raise UsageError(
                f"entry {position} frees {address:#x}, which the history does not allocate: record it from "
                "the beginning, before the first tensor is on the GPU, and with a large enough max_entries"
            )
        self._allocator.free(self._blocks.pop(address))

    def _differ(self, position: int, nbytes: int, how: str) -> None:
        self._differences.append(f"entry {position}: the block of {format_bytes(nbytes)} {how}")
