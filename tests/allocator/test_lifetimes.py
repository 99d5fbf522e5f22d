"""Replays that skip repeated turns, the least memory, and planned addresses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, permutations
from random import Random

import pytest

from pipefit.errors import OutOfMemory
from pipefit.memory.cuda_allocator import (
    AllocatorSettings,
    CachingAllocator,
    Excerpt,
    Lifetimes,
    NamedExcerpt,
    SegmentPart,
    planned_bytes,
    with_enough,
)

MIB = 1 << 20
SETTINGS = "", "expandable_segments:True", "max_split_size_mb:32"

Events = list[tuple[int, int]]


class Pipeline:
    """The events of a random stage under 1F1B, and the starts of its microbatches."""

    def __init__(self, rng: Random) -> None:
        self.events, self.turns, self._count = Events(), list[int](), 0
        self._blocks, self._kept = rng.randint(1, 5), rng.randrange(8)
        self._sizes = [int(2 ** rng.uniform(8, 26)) for _ in range(rng.randint(2, 8))]
        for _ in range(rng.randint(1, 8)):
            self._born(rng.randint(1, 60) * MIB)
        for _ in range(2):
            self._step(rng.choice([3, 9, 30, 60]), rng.randint(1, 5))

    def _step(self, microbatches: int, ahead: int) -> None:
        gradients, begun = list[int](), [self._forward() for _ in range(min(ahead, microbatches))]
        for microbatch in range(microbatches):
            self._backward(begun.pop(0), gradients)
            if microbatch + ahead < microbatches:
                begun.append(self._forward())
        self.events.extend((gradient, 0) for gradient in gradients)

    def _born(self, nbytes: int) -> int:
        self._count += 1
        self.events.append((self._count, nbytes))
        return self._count

    def _forward(self) -> list[int]:
        self.turns.append(len(self.events))
        saved = []
        for _ in range(self._blocks):
            names = [self._born(size) for size in self._sizes]
            saved.append(names.pop(self._kept % len(names)))
            self.events.extend((name, 0) for name in names)
        return saved

    def _backward(self, saved: list[int], gradients: list[int]) -> None:
        for block in range(self._blocks):
            if len(gradients) == block:
                gradients.append(self._born(self._sizes[block % len(self._sizes)] + block))
            working = self._born(2 * self._sizes[-1])
            self.events.extend([(saved.pop(), 0), (working, 0)])


def fits(events: Events, allocator: CachingAllocator) -> bool:
    blocks = dict[int, SegmentPart]()
    try:
        for name, nbytes in events:
            if nbytes:
                blocks[name] = allocator.allocate(nbytes)
            else:
                allocator.free(blocks.pop(name))
    except OutOfMemory:
        return False
    return True


def bisected(events: Events, settings: AllocatorSettings, memory: int, taken: int) -> CachingAllocator:
    result = CachingAllocator(settings, taken=taken)
    assert fits(events, result)
    low, high = memory, taken + result.peak.reserved_bytes
    while high - low > settings.large_segment_bytes:
        tried = CachingAllocator(settings, (low + high) // 2, taken=taken)
        if fits(events, tried):
            result, high = tried, taken + tried.peak.reserved_bytes
        else:
            low = (low + high) // 2
    return result


@pytest.mark.parametrize("text", SETTINGS)
def test_repeated_turns_and_failing_capacities_are_skipped_without_a_trace(text: str) -> None:
    """All figures equal those of a replay of every event, with any memory, and so does the least memory."""
    rng, settings = Random(text), AllocatorSettings.parse(text)
    for _ in range(8):
        pipeline = Pipeline(rng)
        events, lifetimes = pipeline.events, Lifetimes(pipeline.events, pipeline.turns)
        most = lifetimes.most_bytes(settings)
        memory, taken = int(most * rng.uniform(0.3, 1.1)), rng.choice([0, 10 * MIB])
        for capacity in (None, memory, int(most * 1.02) + taken):
            own, plain = (CachingAllocator(settings, capacity, taken=taken) for _ in range(2))
            room = fits(events, plain)
            assert lifetimes.have_room(own) is room and own.peak == plain.peak
            assert not room or (own.now, own.retries) == (plain.now, plain.retries)
        least, plain = (
            with_enough(lifetimes, settings, memory, taken),
            bisected(events, settings, memory, taken),
        )
        assert least is not None
        assert (least.capacity, least.peak, least.retries) == (plain.capacity, plain.peak, plain.retries)


def test_a_long_pipeline_costs_a_few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 400 equal turns in a step, a replay allocates for less than a tenth."""
    events, turns = Events(), list[int]()
    for name in range(0, 1200, 3):
        turns.append(len(events))
        events += [(name, 30 * MIB), (name + 1, 7 * MIB), (name + 1, 0), (name + 2, 40 * MIB), (name + 2, 0)]
        events += [(name - 3, 0)] if name else []
    allocator, asked = CachingAllocator(), list[int]()
    allocate = allocator.allocate
    monkeypatch.setattr(allocator, "allocate", lambda nbytes: asked.append(nbytes) or allocate(nbytes))
    assert Lifetimes(events, turns).have_room(allocator)
    assert len(asked) < 120
    plain = CachingAllocator()
    assert fits(events, plain) and plain.peak == allocator.peak and plain.now == allocator.now


def test_excerpts_under_names_are_single_births_and_deaths() -> None:
    """Excerpts that repeat under other names are the events they stand for, cut anywhere."""
    rng = Random(3)
    for _ in range(20):
        events = Pipeline(rng).events
        cuts = sorted({0, len(events), *rng.sample(range(len(events)), min(5, len(events)))})
        parts = [NamedExcerpt(Excerpt(events[a:b])) for a, b in pairwise(cuts)]
        assert Lifetimes(excerpts=parts).digest == Lifetimes(events).digest
        own, excerpt = frozenset(name for name, _ in events), Excerpt(events)
        twice = Lifetimes(excerpts=[NamedExcerpt(excerpt, own, (n,)) for n in range(2)])
        again = [(-name, nbytes) for name, nbytes in events]
        assert twice.digest == Lifetimes([*events, *again]).digest
        assert [nbytes for _, nbytes in twice] == [nbytes for _, nbytes in [*events, *again]]
        assert len(twice.living) == 2 * len(Lifetimes(events).living)


# ---- Planned addresses


def lives(rng: Random, count: int) -> list[tuple[int, int]]:
    """Return the births and deaths of some tensors in random order; some are never freed."""
    result, living = list[tuple[int, int]](), list[int]()
    for number in range(count):
        while living and rng.random() < 0.5:
            result.append((living.pop(rng.randrange(len(living))), 0))
        result.append((number, 512 * rng.randint(1, 9)))
        living.append(number)
    rng.shuffle(living)
    return [*result, *((number, 0) for number in living[: rng.randint(0, len(living))])]


def least_arena(events: Sequence[tuple[int, int]]) -> int:
    """Return the least arena, by trying all orders: in one of them every tensor's lowest free address is best."""
    sizes = {name: nbytes for name, nbytes in events if nbytes}
    alive, together = set[int](), set[tuple[int, int]]()
    for name, nbytes in events:
        (alive.add if nbytes else alive.discard)(name)
        together |= {(one, name) for one in alive if nbytes} | {(name, one) for one in alive if nbytes}
    best = sum(sizes.values())
    for order in permutations(sizes):
        at = dict[int, int]()
        for name in order:
            taken = sorted((at[one], at[one] + sizes[one]) for one in at if (one, name) in together)
            address = 0
            for start, end in taken:
                if start - address >= sizes[name]:
                    break
                address = max(address, end)
            at[name] = address
        best = min(best, max(at[name] + sizes[name] for name in at))
    return best


def test_planned_addresses_are_near_the_best() -> None:
    """An arena is never smaller than the best one of all orders, and seldom larger."""
    rng, larger = Random(0), 0
    for _ in range(60):
        events = lives(rng, 6)
        found, best = planned_bytes(Lifetimes(events)), least_arena(events)
        assert best <= found <= 1.5 * best
        larger += found > best
    assert larger <= 6


def test_planned_addresses_of_stacks() -> None:
    """Tensors that die in the reverse order of their births need no more than the most that live together."""
    rng = Random(1)
    sizes = [rng.randint(1, 4000) for _ in range(200)]
    events = [*enumerate(sizes), *((number, 0) for number in reversed(range(200)))]
    again = [(name + 200, nbytes) for name, nbytes in events]
    assert planned_bytes(Lifetimes([*events, *again])) == sum(-(-size // 512) * 512 for size in sizes)
