"""Lifetimes of a device's tensors, replayed in an allocator, and the least memory in which they have room.

A tensor is known by the position of its birth, and a death is encoded as the distance to the birth. So the
turns of a pipeline, which repeat for every microbatch, are equal numbers. A turn may leave the allocator in a
state in which an earlier turn of the same run has left it: blocks of the same sizes in the same order, with
tensors of the same age. Since the allocator is deterministic, the following turns repeat too, and are
skipped.

Since all births and deaths are known before the run, addresses can also be planned (`planned_bytes`).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property
from hashlib import sha256
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipefit.errors import OutOfMemory
from pipefit.memory.cuda_allocator.caching import CachingAllocator, SegmentPart
from pipefit.memory.cuda_allocator.settings import AllocatorSettings

Event = tuple[Hashable, int]  # a tensor, and its bytes at birth or 0 at death

_STATES = 32  # states to compare in a run of equal turns


class _Turn(NamedTuple):
    """Positions `start` to `stop - 1`; `repeats` equal turns begin here, and the run stops at `run_stop`."""

    start: int
    stop: int
    repeats: int
    run_stop: int


class Excerpt:
    """Consecutive births and deaths of tensors, encoded once for devices and microbatches that repeat them.

    In `code` a birth is its bytes, and a death the distance to the birth, 0 if that is earlier. `ends` are
    the positions and names of such deaths. `left` are those of births whose tensors stay, and `names` their
    names alone.
    """

    __slots__ = ("code", "ends", "events", "left", "names")

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = tuple(events)
        self.code, living, ends = array("q"), dict[Hashable, int](), list[tuple[int, Hashable]]()
        for position, (name, nbytes) in enumerate(self.events):
            if not nbytes and name not in living:
                ends.append((position, name))
                self.code.append(0)
            elif nbytes:
                living[name] = position
                self.code.append(nbytes)
            else:
                self.code.append(living.pop(name) - position)
        self.ends = tuple(ends)
        self.left = tuple((position, name) for name, position in living.items())
        self.names = frozenset(living)


class NamedExcerpt(NamedTuple):
    """An excerpt in which the names `own` of tensors that stay are prefixes of names that end with `tag`."""

    excerpt: Excerpt
    own: Collection[Hashable] = ()
    tag: tuple[Hashable, ...] = ()

    def name(self, name: Hashable) -> Hashable:
        """Return the name of a tensor here."""
        return (name, *self.tag) if name in self.own else name

    @property
    def events(self) -> Iterator[Event]:
        """The births and deaths with their names here."""
        return ((self.name(name), nbytes) for name, nbytes in self.excerpt.events)


class Lifetimes:
    """Births and deaths of one device's tensors in order: `events`, and then `excerpts`.

    `turns` are positions at which turns may begin. `living` are the names of tensors that are never freed.
    """

    def __init__(
        self,
        events: Iterable[Event] = (),
        turns: Sequence[int] = (),
        *,
        excerpts: Iterable[NamedExcerpt] = (),
    ) -> None:
        self._events, born = array("q"), dict[Hashable, int]()
        for named in (NamedExcerpt(Excerpt(events)), *excerpts):
            first = len(self._events)
            self._events.extend(named.excerpt.code)
            for position, name in named.excerpt.ends:
                self._events[first + position] = born.pop(named.name(name)) - first - position
            for position, name in named.excerpt.left:
                born[named.name(name)] = first + position
        self.living = frozenset(born)
        self._turns = self._in_runs([0, *turns, len(self._events)])

    def __len__(self) -> int:
        """Return the number of births and deaths."""
        return len(self._events)

    def tensors(self, alignment: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the positions of all births and deaths, and the sizes, rounded up to `alignment`."""
        events = np.array(self._events, np.int64)
        births = np.flatnonzero(events > 0)
        deaths = np.array(self._deaths, np.int64)[births]
        return births, deaths, -(-events[births] // alignment) * alignment

    def __iter__(self) -> Iterator[Event]:
        """Yield all births and deaths, with births' positions as names."""
        for position, event in enumerate(self._events):
            yield (position, event) if event > 0 else (position + event, 0)

    @cached_property
    def digest(self) -> bytes:
        """A digest of all sizes, and of the birth of every death, independent of names."""
        return sha256(self._events.tobytes()).digest()

    @cached_property
    def _deaths(self) -> array[int]:
        """The positions of deaths by those of births; the end for tensors that are never freed."""
        result = array("q", [len(self._events)]) * len(self._events)
        for position, event in enumerate(self._events):
            if event < 0:
                result[position + event] = position
        return result

    def _in_runs(self, edges: Sequence[int]) -> list[_Turn]:
        """Return the turns between these positions, each with the number of equal ones from it on."""
        result, after = list[_Turn](), None
        for start, stop in reversed([*pairwise(edges)]):
            like = after is not None and self._events[start:stop] == self._events[after.start : after.stop]
            repeats, run_stop = (
                (after.repeats + 1, after.run_stop) if after is not None and like else (1, stop)
            )
            after = _Turn(start, stop, repeats, run_stop)
            result.append(after)
        return result[::-1]

    def have_room(self, allocator: CachingAllocator) -> bool:
        """Replay all births and deaths in an empty allocator; return whether it has room for them."""
        blocks, seen = dict[int, SegmentPart](), dict[Hashable, tuple[int, int]]()
        number, run_stop = 0, 0
        try:
            while number < len(self._turns):
                turn = self._turns[number]
                if turn.run_stop != run_stop:
                    seen, run_stop = {}, turn.run_stop
                if turn.repeats > 1 and len(seen) < _STATES:
                    state = self._state(allocator, blocks, turn)
                    if state in seen:
                        before, retries = seen[state]
                        cycles = turn.repeats // (number - before)
                        allocator.retries += cycles * (allocator.retries - retries)
                        skipped, seen = cycles * (number - before), {}
                        blocks = self._later(blocks, turn, skipped)
                        number += skipped
                        continue
                    seen[state] = number, allocator.retries
                self._replay(turn, allocator, blocks)
                number += 1
        except OutOfMemory:
            return False
        return True

    def _later(self, blocks: dict[int, SegmentPart], turn: _Turn, turns: int) -> dict[int, SegmentPart]:
        """Return the blocks at the start of a turn as those of this many turns later."""
        by = turns * (turn.stop - turn.start)
        return {
            birth + (by if self._deaths[birth] < turn.run_stop else 0): block
            for birth, block in blocks.items()
        }

    def _replay(self, turn: _Turn, allocator: CachingAllocator, blocks: dict[int, SegmentPart]) -> None:
        allocate, free, position = allocator.allocate, allocator.free, turn.start
        for event in self._events[turn.start : turn.stop]:
            if event > 0:
                blocks[position] = allocate(event)
            else:
                free(blocks.pop(position + event))
            position += 1

    def _state(self, allocator: CachingAllocator, blocks: dict[int, SegmentPart], turn: _Turn) -> Hashable:
        """Return the allocator's state at the start of a turn.

        Tensors that die in the run are known by their age, and others by their birth.
        """
        names = {
            block: (True, turn.start - birth) if self._deaths[birth] < turn.run_stop else (False, birth)
            for birth, block in blocks.items()
        }
        return allocator.state(names)

    def most_bytes(self, settings: AllocatorSettings) -> int:
        """Return the highest sum of rounded bytes; blocks that are not split take more."""
        now, most, rounded = 0, 0, cache(settings.rounded)
        for position, event in enumerate(self._events):
            now += rounded(event) if event > 0 else -rounded(self._events[position + event])
            most = max(most, now)
        return most


# ---- Planned addresses
# Every tensor gets an address in one arena for its whole life: the largest first, each in the smallest gap
# that suffices among the tensors that live at the same time. Tensors that live long may go first, since they
# divide the arena for many others. (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net
# Inference", 2020, place by size.)

_ALIGNMENT = 512  # bytes, as in CUDA's caching allocator
_LONG = 1.0, 0.05, 0.02  # parts of the run: tensors that live longer are placed first
_CLOSE = 1.005  # times the highest sum of bytes, up to which no other order is tried
_UNLIMITED = np.iinfo(np.int64).max
_MOST_PLANNED = 20_000  # tensors, which take a second for each order


def planned_bytes(lifetimes: Lifetimes) -> int:
    """Return the size of an arena in which all tensors have planned addresses; 0 if they are too many.

    The least size found in a few orders, and at least the highest sum of the tensors' bytes.
    """
    births, deaths, sizes = lifetimes.tensors(_ALIGNMENT)
    if not 0 < len(births) <= _MOST_PLANNED:
        return 0
    changes = np.zeros(len(lifetimes) + 1, np.int64)
    np.add.at(changes, births, sizes)
    np.add.at(changes, deaths, -sizes)
    close, result = _CLOSE * int(np.cumsum(changes).max()), 0
    for part in _LONG:
        short = deaths - births <= part * len(lifetimes)
        order = np.lexsort((births, -sizes, short))
        found = _packed(births[order], deaths[order], sizes[order])
        result = min(result or found, found)
        if result <= close:
            break
    return result


def _packed(births: NDArray[np.int64], deaths: NDArray[np.int64], sizes: NDArray[np.int64]) -> int:
    """Return the size of an arena in which tensors are placed in this order.

    Costs a pass over all placed tensors for each tensor.
    """
    placed = np.zeros((4, len(births)), np.int64)  # births, deaths, addresses and ends, by address
    size = 0
    for count, (birth, death, nbytes) in enumerate(zip(births, deaths, sizes, strict=True)):
        known = placed[:, :count]
        _, _, addresses, ends = known[:, (known[0] < death) & (known[1] > birth)]
        starts = np.concatenate(([0], np.maximum.accumulate(ends)))
        gaps = np.append(addresses, _UNLIMITED) - starts
        address = starts[np.where(gaps >= nbytes, gaps, _UNLIMITED).argmin()]
        place = np.searchsorted(known[2], address)
        placed[:, place + 1 : count + 1] = placed[:, place:count].copy()
        placed[:, place] = birth, death, address, address + nbytes
        size = max(size, int(address + nbytes))
    return size


def with_enough(
    lifetimes: Lifetimes, settings: AllocatorSettings, memory: int, taken: int
) -> CachingAllocator | None:
    """Return the allocator of a device with just enough memory, to a segment, if `memory` is too little.

    `taken` are the bytes that others take of it. Return None if no memory suffices. An allocator that runs
    out of memory releases its unused segments and retries: with unlimited memory it would reserve more than
    it needs.

    Bisection, which replays only capacities whose answer is not known. The highest sum of rounded bytes needs
    that much. A replay that fails also fails with more memory, as long as the driver refuses the same
    requests; except with expandable segments, whose addresses depend on the capacity.
    """
    whole = replace(settings, memory_fraction=1.0)
    result = CachingAllocator(whole, taken=taken)
    if not lifetimes.have_room(result):
        return None
    low, high = int(memory * settings.memory_fraction), taken + result.peak.reserved_bytes
    least = taken + lifetimes.most_bytes(settings)
    while high - low > settings.large_segment_bytes:
        middle = (low + high) // 2
        tried = CachingAllocator(whole, middle, taken=taken)
        if middle >= least and lifetimes.have_room(tried):
            result, high = tried, taken + tried.peak.reserved_bytes
        else:
            low = middle
            if tried.least_refused is not None and not settings.expandable:
                least = max(least, tried.least_refused)
    return result
