"""A trace as a snapshot of memory that pytorch.org/memory_viz draws, and `torch.cuda._memory_viz` reads.

A trace knows the level of every category at the peak of each action, and not every tensor. So each category is told as
a pile of blocks: where its level rises, a block is laid on it; where it falls, blocks are taken off its top. Frames are
the action and the category. Heights are the trace's own, to the byte. The file is a pickle of dictionaries, lists,
texts and numbers, as the page wants it.
"""

from __future__ import annotations

import pickle
from typing import Any

from pipefit.trace import CATEGORIES, DeviceTrace, Trace

_ROOM = 1 << 44  # addresses for each category


def memory_snapshot(trace: Trace) -> bytes:
    """The file's bytes."""
    return pickle.dumps(snapshot(trace), protocol=4)


def snapshot(trace: Trace) -> dict[str, Any]:
    """The snapshot as plain data: for each device its events, and the segments that are there at the end."""
    traces = [_events(device) for device in trace.devices]
    segments = [segment for number, events in enumerate(traces) for segment in _left(number, events)]
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }


def _events(device: DeviceTrace) -> list[dict[str, Any]]:
    """Allocations and frees in the order of the samples."""
    events: list[dict[str, Any]] = []
    piles: list[list[int]] = [[] for _ in CATEGORIES]  # sizes of blocks, the top last
    for sample in device.memory:
        frames = [{"name": f"{sample.action} of step {sample.step}", "filename": "", "line": 0}]
        moments = []
        for number, level in enumerate(sample.bytes):
            moments += _moved(number, piles[number], level)
        moments.sort(key=lambda moment: moment[0] != "free_completed")  # first down, then up: no peak that never was
        for action, number, below, size in moments:
            category = {"name": CATEGORIES[number].value, "filename": "", "line": 0}
            events.append(
                {
                    "action": action,
                    "addr": (number + 1) * _ROOM + below,
                    "size": size,
                    "stream": 0,
                    "time_us": int(max(sample.seconds, 0.0) * 1e6),
                    "frames": [category, *frames],
                }
            )
    return events


def _moved(number: int, pile: list[int], level: int) -> list[tuple[str, int, int, int]]:
    """What brings a category to a level: blocks taken off, and one laid on."""
    found = []
    while sum(pile) > level:
        size = pile.pop()
        found.append(("free_completed", number, sum(pile), size))
    if level > sum(pile):
        found.append(("alloc", number, sum(pile), level - sum(pile)))
        pile.append(level - sum(pile))
    return found


def _left(device: int, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A segment for each block that is never freed."""
    there: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["action"] == "alloc":
            there[event["addr"]] = event
        else:
            there.pop(event["addr"], None)
    return [_segment(device, event) for event in there.values()]


def _segment(device: int, event: dict[str, Any]) -> dict[str, Any]:
    size = event["size"]
    block = {"address": event["addr"], "size": size, "requested_size": size, "state": "active_allocated"}
    return {
        "device": device,
        "address": event["addr"],
        "total_size": size,
        "allocated_size": size,
        "active_size": size,
        "requested_size": size,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": event["frames"],
        "blocks": [{**block, "frames": event["frames"]}],
    }
