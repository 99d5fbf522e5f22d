"""The caching allocator in its plainest form: a list of tensors, searched from end to end.

It keeps no free blocks, pools or links: every request computes the gaps between the tensors anew. It is the
oracle for the simulator and shares no code with it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

KIB, MIB = 1 << 10, 1 << 20


def round_up(nbytes: int, step: int) -> int:
    return (nbytes + step - 1) // step * step


@dataclass
class Plain:
    """Segments of fixed sizes, with tensors in them as `(start, end)`."""

    max_split: int = 1 << 60
    large: int = 20 * MIB
    capacity: int = 1 << 60
    taken: int = 0
    segments: list[tuple[int, bool, int]] = field(
        default_factory=list
    )  # size, small, stream; (0, ...) when given back
    tensors: dict[int, tuple[int, int, int, int]] = field(
        default_factory=dict
    )  # by name: segment, start, end, bytes
    peak: int = 0

    @property
    def reserved(self) -> int:
        return sum(size for size, _, _ in self.segments)

    @property
    def allocated(self) -> int:
        return sum(end - start for _, start, end, _ in self.tensors.values())

    @property
    def requested(self) -> int:
        return sum(nbytes for *_, nbytes in self.tensors.values())

    def gaps(self, number: int) -> list[tuple[int, int]]:
        """Return the free ranges of a segment."""
        inside = sorted((start, end) for where, start, end, _ in self.tensors.values() if where == number)
        edges = [0, *(edge for span in inside for edge in span), self.segments[number][0]]
        return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if start < end]

    def allocate(self, name: int, nbytes: int, stream: int) -> None:
        size = max(512, round_up(nbytes, 512))
        small = size <= MIB
        fitting = [
            (end - start, number, start)
            for number, (_, kind, whose) in enumerate(self.segments)
            if (kind, whose) == (small, stream)
            for start, end in self.gaps(number)
            if end - start >= size
        ]
        found = min(fitting, default=None)
        if found is not None and size < self.max_split <= found[0]:
            found = None
        if found is not None and size >= self.max_split and found[0] >= size + self.large:
            found = None
        if found is None:
            wanted = 2 * MIB if small else self.large if size < 10 * MIB else round_up(size, 2 * MIB)
            if self.taken + self.reserved + wanted > self.capacity:
                self.give_back()
            if self.taken + self.reserved + wanted > self.capacity:
                raise MemoryError
            self.segments.append((wanted, small, stream))
            self.peak = max(self.peak, self.reserved)
            found = wanted, len(self.segments) - 1, 0
        gap, number, start = found
        left = gap - size
        splits = left > 0 if small else left > MIB and size < self.max_split
        self.tensors[name] = number, start, start + (size if splits else gap), nbytes

    def free(self, name: int) -> None:
        del self.tensors[name]

    def give_back(self) -> None:
        used = {number for number, *_ in self.tensors.values()}
        self.segments = [s if n in used else (0, s[1], s[2]) for n, s in enumerate(self.segments)]


@dataclass
class Pages:
    """One expandable segment for every kind of request and stream, with memory on some pages."""

    large: int = 20 * MIB
    capacity: int = 1 << 60
    taken: int = 0
    pages: set[tuple[bool, int, int]] = field(default_factory=set)  # small, stream, number
    tensors: dict[int, tuple[bool, int, int, int, int]] = field(
        default_factory=dict
    )  # small, stream, start, end, bytes
    peak: int = 0

    @property
    def reserved(self) -> int:
        return sum(2 * MIB if small else self.large for small, _, _ in self.pages)

    @property
    def allocated(self) -> int:
        return sum(end - start for _, _, start, end, _ in self.tensors.values())

    @property
    def requested(self) -> int:
        return sum(nbytes for *_, nbytes in self.tensors.values())

    def runs(self, small: bool, stream: int) -> list[tuple[int, int, bool]]:
        """Return the free ranges `(start, end, has memory)`, in order, up to the end of the addresses."""
        page = 2 * MIB if small else self.large
        last = round_up(self.capacity + self.capacity // 8, page)
        mine = [
            (start, end)
            for kind, whose, start, end, _ in self.tensors.values()
            if (kind, whose) == (small, stream)
        ]
        known = {number * page for kind, whose, number in self.pages if (kind, whose) == (small, stream)}
        edges = sorted(
            {0, last, *known, *(k + page for k in known), *(edge for span in mine for edge in span)}
        )
        found: list[tuple[int, int, bool]] = []
        for start, stop in itertools.pairwise(edges):
            if any(a <= start < b for a, b in mine):
                continue
            has = start // page * page in known
            if found and found[-1][1] == start and found[-1][2] == has:
                found[-1] = found[-1][0], stop, has
            else:
                found.append((start, stop, has))
        return found

    def allocate(self, name: int, nbytes: int, stream: int) -> None:
        size = max(512, round_up(nbytes, 512))
        small = size <= MIB
        runs = self.runs(small, stream)
        behind = {start: end - start for start, end, has in runs if not has}
        fitting = sorted((end - start, start, end) for start, end, has in runs if has and end - start >= size)
        if fitting:
            place = 0
            reach = [length + behind.get(end, 0) for length, _, end in fitting]
            while place + 1 < len(fitting) and reach[place + 1] < reach[place]:
                place += 1
            start = fitting[place][1]
        else:
            try:
                start = self.mapped(small, stream, size)
            except MemoryError:
                self.give_back()
                start = self.mapped(small, stream, size)
        self.tensors[name] = small, stream, start, start + size, nbytes

    def mapped(self, small: bool, stream: int, size: int) -> int:
        """Return the lowest address with room for `size`, and map all its pages."""
        page = 2 * MIB if small else self.large
        start = self.lowest(self.runs(small, stream), size)
        wanted = {
            (small, stream, n) for n in range(start // page, (start + size - 1) // page + 1)
        } - self.pages
        if self.taken + self.reserved + len(wanted) * page > self.capacity:
            raise MemoryError
        self.pages |= wanted
        self.peak = max(self.peak, self.reserved)
        return start

    @staticmethod
    def lowest(runs: list[tuple[int, int, bool]], size: int) -> int:
        """Return the lowest address with `size` free bytes that begin without memory, or directly before such
        bytes.
        """
        for place, (_, _, has) in enumerate(runs):
            if has:
                continue
            first = place - 1 if place and runs[place - 1][1] == runs[place][0] else place
            last = first
            while (
                runs[last][1] - runs[first][0] < size
                and last + 1 < len(runs)
                and runs[last][1] == runs[last + 1][0]
            ):
                last += 1
            if runs[last][1] - runs[first][0] >= size:
                return runs[first][0]
        raise AssertionError

    def free(self, name: int) -> None:
        del self.tensors[name]

    def give_back(self) -> None:
        used = set()
        for small, stream, start, end, _ in self.tensors.values():
            page = 2 * MIB if small else self.large
            used |= {(small, stream, n) for n in range(start // page, (end - 1) // page + 1)}
        self.pages &= used
