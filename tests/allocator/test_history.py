"""Replays of histories in torch's recorded form, made with the plain allocator."""

from __future__ import annotations

from itertools import groupby
from random import Random
from typing import Any

import pytest

from pipefit.errors import UsageError
from pipefit.memory.cuda_allocator import AllocatorSettings, replay
from support.plain_caching_allocator import Pages, Plain

MIB = 1 << 20
Entry = dict[str, Any]


def entry(action: str, addr: int, size: int, stream: int = 0) -> Entry:
    return {"action": action, "addr": addr, "size": size, "stream": stream, "frames": [], "time_us": 0}


def base_of(number: int) -> int:
    """Return the driver's address of a segment."""
    return 0x7F00_0000_0000 + number * (1 << 36)


def grown(before: Plain | Pages, model: Plain | Pages) -> list[Entry]:
    """Return the segments taken from the driver or given back since `before`, as entries."""
    if isinstance(model, Plain):
        pairs = enumerate(zip([*before.segments, *[(0, False, 0)] * 9], model.segments, strict=False))
        return [
            entry(
                "segment_alloc" if old[0] == 0 else "segment_free",
                base_of(number),
                max(old[0], new[0]),
                new[2],
            )
            for number, (old, new) in pairs
            if old[0] != new[0]
        ]
    found = []
    for action, pages in (
        ("segment_map", model.pages - before.pages),
        ("segment_unmap", before.pages - model.pages),
    ):
        for (small, stream), own in groupby(sorted(pages), key=lambda page: page[:2]):
            page = 2 * MIB if small else model.large
            numbers = [number for _, _, number in own]
            for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
                first, *others = [number for _, number in run]
                where = base_of(2 * stream + small) + first * page
                found.append(entry(action, where, page * (1 + len(others)), stream))
    return found


def copy_of(model: Plain | Pages) -> Plain | Pages:
    if isinstance(model, Plain):
        return Plain(segments=list(model.segments), tensors=dict(model.tensors))
    return Pages(pages=set(model.pages), tensors=dict(model.tensors))


def address(model: Plain | Pages, name: int) -> int:
    if isinstance(model, Plain):
        number, start, _, _ = model.tensors[name]
        return base_of(number) + start
    small, stream, start, _, _ = model.tensors[name]
    return base_of(2 * stream + small) + start


def recorded(seed: int, model: Plain | Pages) -> list[Entry]:
    """Record a history of 300 random events on two streams, with the cache emptied now and then."""
    rng, entries, live = Random(seed), list[Entry](), {}
    for name in range(300):
        before = copy_of(model)
        if rng.random() < 0.02:
            model.give_back()
            entries += grown(before, model)
        elif live and rng.random() < 0.5:
            gone, where = (
                live.popitem()
                if rng.random() < 0.5
                else (name_of := rng.choice(list(live)), live.pop(name_of))
            )
            model.free(gone)
            entries += [entry("free_requested", where, 0), entry("free_completed", where, 0)]
        else:
            nbytes, stream = int(2 ** rng.uniform(6, 26)), int(rng.random() < 0.2)
            model.allocate(name, nbytes, stream)
            live[name] = address(model, name)
            entries += [*grown(before, model), entry("alloc", live[name], nbytes, stream)]
    return entries


@pytest.mark.parametrize("text", ["", "expandable_segments:True"])
@pytest.mark.parametrize("seed", range(5))
def test_a_history_is_followed_block_by_block(text: str, seed: int) -> None:
    """Every block is at its recorded address, and reserved bytes match after every allocation."""
    history = recorded(seed, Pages() if text else Plain())
    found = replay(history, AllocatorSettings.parse(text))
    assert found.differences == ()
    assert found.allocations == sum(one["action"] == "alloc" for one in history)
    assert found.peak.reserved_bytes == found.recorded_reserved_bytes
    assert "every block is at its recorded address" in str(found)


def test_settings_that_were_others_show() -> None:
    """A history with fixed segments differs when replayed with expandable ones; the first differences are
    reported.
    """
    found = replay(recorded(0, Plain()), AllocatorSettings(expandable=True))
    assert 0 < len(found.differences) <= 10
    assert "differences:\nentry " in str(found)


def test_the_driver_decides_between_equal_blocks() -> None:
    """Of two free blocks of one size the one at the lower address is taken, though its segment came later."""
    low, high = 0x1000_0000, 0x9000_0000
    first = [entry("segment_alloc", high, 30 * MIB), entry("alloc", high, 30 * MIB)]
    second = [entry("segment_alloc", low, 30 * MIB), entry("alloc", low, 30 * MIB)]
    freed = [entry("free_completed", high, 30 * MIB), entry("free_completed", low, 30 * MIB)]
    assert replay([*first, *second, *freed, entry("alloc", low, 30 * MIB)]).differences == ()
    (told,) = replay([*first, *second, *freed, entry("alloc", high, 30 * MIB)]).differences
    assert told == "entry 6: the block of 30.00 MiB is at 0x10000000, recorded at 0x90000000"


def test_a_history_that_begins_in_the_middle_is_refused() -> None:
    """A free without its allocation is named, with the way to record from the beginning."""
    with pytest.raises(
        UsageError, match="entry 0 frees 0x5, which the history does not allocate: record it from"
    ):
        replay([entry("free_completed", 5, 1)])
