"""Traces for other viewers: the Trace Event Format for Perfetto and chrome://tracing, and memory snapshots.

In the Trace Event Format (JSON), every device is a process. Its streams are threads, on which every action is
a complete event, and its memory by category is a counter. Events of one thread may not overlap, so a stream
with concurrent messages or copies has several threads. Times are microseconds; those of a dry run are
positions. (Google, "Trace Event Format".)
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from pipefit.schema.actions import Kind, parse_action
from pipefit.schema.trace import CATEGORIES, DeviceTrace, Event, Stream, Trace

# ---- Memory snapshots for pytorch.org/memory_viz and `torch.cuda._memory_viz`
#
# A trace has the level of every category at the peak of each action, not every tensor. So each category is a
# pile of blocks: if its level rises, a block is added; if it falls, blocks are removed from the top. Frames
# are the action and the category. Levels are exact to the byte. The file is a pickle of dictionaries, lists,
# texts and numbers, as the viewer requires.

_ROOM = 1 << 44  # addresses per category


def memory_snapshot(trace: Trace) -> bytes:
    """Return the file's bytes."""
    return pickle.dumps(snapshot(trace), protocol=4)


def snapshot(trace: Trace) -> dict[str, Any]:
    """Return the snapshot as plain data: the events of each device, and the segments at the end."""
    traces = [_events(device) for device in trace.devices]
    segments = [segment for number, events in enumerate(traces) for segment in _left(number, events)]
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }


def _events(device: DeviceTrace) -> list[dict[str, Any]]:
    """Return allocations and frees in the order of the samples."""
    events: list[dict[str, Any]] = []
    piles: list[list[int]] = [[] for _ in CATEGORIES]  # sizes of blocks, the top last
    for sample in device.memory:
        frames = [{"name": f"{sample.action} of step {sample.step}", "filename": "", "line": 0}]
        moments = []
        for number, level in enumerate(sample.bytes):
            moments += _moved(number, piles[number], level)
        moments.sort(
            key=lambda moment: moment[0] != "free_completed"
        )  # frees first, so that no false peak appears
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
    """Return the events that bring a category to a level: removed blocks, and an added one."""
    result = []
    while sum(pile) > level:
        size = pile.pop()
        result.append(("free_completed", number, sum(pile), size))
    if level > sum(pile):
        result.append(("alloc", number, sum(pile), level - sum(pile)))
        pile.append(level - sum(pile))
    return result


def _left(device: int, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a segment for each block that is never freed."""
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


# ---- Trace Event Format

_STREAMS = ("computing", "messages", "copies away", "copies back")
_MICROSECONDS = 1e6


def perfetto(trace: Trace) -> str:
    """Return the trace as one JSON object."""
    events = [one for device in trace.devices for one in _device(trace, device)]
    shown = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"source": trace.source}}
    return json.dumps(shown, separators=(",", ":"), allow_nan=False)


def _device(trace: Trace, device: DeviceTrace) -> Iterator[dict[str, Any]]:
    unit = _MICROSECONDS if trace.has_clock else 1.0
    number = device.device
    yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": f"device {number}"}}
    threads = _threads(device.events)
    for thread, name in enumerate(threads):
        yield {"ph": "M", "pid": number, "tid": thread, "name": "thread_name", "args": {"name": name}}
        for event in threads[name]:
            yield {
                "ph": "X",
                "pid": number,
                "tid": thread,
                "name": event.action,
                "cat": event.stream.value,
                "ts": event.start_seconds * unit,
                "dur": (event.end_seconds - event.start_seconds) * unit,
                "args": {"step": event.step},
            }
    used = [n for n in range(len(CATEGORIES)) if any(sample.bytes[n] for sample in device.memory)]
    for sample in device.memory:
        held = {CATEGORIES[n].value: sample.bytes[n] for n in used}
        yield {"ph": "C", "pid": number, "name": "memory", "ts": sample.seconds * unit, "args": held}


def _threads(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Return the events of every thread, by its name: each event is on the first idle thread of its
    stream.
    """
    result: dict[str, list[Event]] = {name: [] for name in _STREAMS}
    for event in sorted(events, key=lambda one: one.start_seconds):
        name = _STREAMS[_stream(event)]
        names = (name if not more else f"{name} {more + 1}" for more in count())
        free = next(
            one for one in names if not result.get(one) or result[one][-1].end_seconds <= event.start_seconds
        )
        result.setdefault(free, []).append(event)
    return result


def _stream(event: Event) -> int:
    """Return the thread group of an event; copies in opposite directions overlap, and have separate ones."""
    if event.stream is Stream.COPY:
        return 3 if parse_action(event.action).kind is Kind.RELOAD else 2
    return 0 if event.stream is Stream.COMPUTE else 1
