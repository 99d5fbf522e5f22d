"""A trace for Perfetto (ui.perfetto.dev) and chrome://tracing: the Trace Event Format, as JSON.

Every device is a process. Its streams are threads, on which every action is a complete event, and its memory by
category is a counter. Events of one thread may not overlap, so that a stream in which several messages or copies are
under way at once has several threads. Times are microseconds; those of a dry run are positions. (Google, "Trace Event
Format".)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from pipefit.actions import Kind, parse_action
from pipefit.trace import CATEGORIES, DeviceTrace, Event, Stream, Trace

_STREAMS = ("computing", "messages", "copies away", "copies back")
_MICROSECONDS = 1e6


def perfetto(trace: Trace) -> str:
    """The trace as one JSON object."""
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
    """The events of every thread, by its name: each on the first one of its stream that is free."""
    found: dict[str, list[Event]] = {name: [] for name in _STREAMS}
    for event in sorted(events, key=lambda one: one.start_seconds):
        name = _STREAMS[_stream(event)]
        names = (name if not more else f"{name} {more + 1}" for more in count())
        free = next(one for one in names if not found.get(one) or found[one][-1].end_seconds <= event.start_seconds)
        found.setdefault(free, []).append(event)
    return found


def _stream(event: Event) -> int:
    """Copies in both directions run beside each other, and are two streams here."""
    if event.stream is Stream.COPY:
        return 3 if parse_action(event.action).kind is Kind.RELOAD else 2
    return 0 if event.stream is Stream.COMPUTE else 1
