"""A trace as compact data for the page's script: events by lane and memory by category.

Times are whole ticks, ten million of them in the shown steps, and rows of numbers are stored as differences,
so that 100,000 events take a few hundred kilobytes compressed. Bytes are exact. Of a longer trace, only the
last steps are shown.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from pipefit.errors import UsageError
from pipefit.report.page.markup import scale
from pipefit.schema.actions import RECEIVES, SENDS, Action, Kind, parse_action
from pipefit.schema.cluster import Cluster
from pipefit.schema.trace import CATEGORIES, DeviceTrace, Event, MemorySample, Stream, Trace
from pipefit.texts import shortened

_TICKS = 10_000_000
MOST = 100_000  # events, and equally many memory samples
_MESSAGE, _COPY = "messages", "copies"
_KINDS = {
    Kind.FORWARD: "forward",
    Kind.FORWARD_ONLY: "forward",
    Kind.RECOMPUTE: "recompute",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRADIENTS: "backward",
    Kind.WEIGHT_GRADIENTS: "backward",
    Kind.STEP: "update",
    Kind.OFFLOAD: "offload",
    Kind.RELOAD: "reload",
}
KINDS = (*dict.fromkeys(_KINDS.values()), "send", "receive", "collective")
_NUMBERED = re.compile(r"([0-9]+[A-Z_]+)(-?[0-9]+)?(.*)")  # stage and kind, microbatch, rest
_OTHER = KINDS.index("collective")


def packed(scenes: Sequence[dict[str, Any]]) -> str:
    """Compress the scenes to text for a page: gzipped JSON in base64. Equal scenes give equal texts."""
    text = json.dumps(scenes, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def scene(trace: Trace, name: str, cluster: Cluster | None = None, *, most: int = MOST) -> dict[str, Any]:
    """Return the data to draw a trace; given its cluster, devices are named by their kinds.

    With more than `most` events or samples, the first steps are omitted, but never the last.
    """
    first = _first_shown(trace, most)
    begin = sum(trace.step_seconds[:first]) if trace.has_clock else _begin(trace, first)
    end = max(
        (event.end_seconds for device in trace.devices for event in _shown(device.events, first)),
        default=begin,
    )
    words = _Words()
    clock = _Ticks(begin, (end - begin) / _TICKS or 1.0)
    devices = [_device(device, first, clock, words, cluster) for device in trace.devices]
    starts = [clock.ticks(sum(trace.step_seconds[:step])) for step in range(first, trace.steps)]
    return {
        "name": name,
        "clock": trace.has_clock,
        "tick": clock.tick,
        "steps": starts if trace.has_clock else [0],
        "first": first,
        "kinds": KINDS,
        "categories": [category.value for category in CATEGORIES],
        "words": words.texts,
        "wordKinds": words.kinds,
        "devices": devices,
        "scale": scale(trace),
    }


class _Ticks:
    """Conversion of seconds to whole ticks since the first shown moment."""

    def __init__(self, begin: float, tick: float) -> None:
        self.begin, self.tick = begin, tick

    def ticks(self, seconds: float) -> int:
        return round((seconds - self.begin) / self.tick)


class _Words:
    """Distinct actions without their microbatch, such as `2F*`, and the kind of each."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.kinds: list[int] = []
        self._numbers: dict[str, int] = {}

    def of(self, action: str) -> tuple[int, int]:
        """Return the number of an action's word, and its microbatch; -1 without one."""
        match = _NUMBERED.fullmatch(action)
        if match is None:
            raise UsageError(f"{shortened(repr(action))} is not an action: the trace was not made by pipefit")
        head, microbatch, tail = match.groups()
        word = f"{head}*{tail}" if microbatch else action
        if word not in self._numbers:
            self._numbers[word] = len(self.texts)
            self.texts.append(word)
            self.kinds.append(_kind(parse_action(action)))
        return self._numbers[word], int(microbatch or -1)


def _kind(action: Action) -> int:
    if action.kind in SENDS:
        return KINDS.index("send")
    if action.kind in RECEIVES:
        return KINDS.index("receive")
    return KINDS.index(_KINDS[action.kind]) if action.kind in _KINDS else _OTHER


def _first_shown(trace: Trace, most: int) -> int:
    """Return the first of the last steps that have at most `most` events and samples.

    If the last step has more, returns the last step.

    Steps numbered beyond the last one count with it.
    """
    last = trace.steps - 1
    events = Counter(min(event.step, last) for device in trace.devices for event in device.events)
    samples = Counter(min(sample.step, last) for device in trace.devices for sample in device.memory)
    first, shown_events, shown_samples = max(last, 0), events[last], samples[last]
    while first:
        shown_events, shown_samples = shown_events + events[first - 1], shown_samples + samples[first - 1]
        if max(shown_events, shown_samples) > most:
            break
        first -= 1
    return first


def _begin(trace: Trace, step: int) -> float:
    """Return the start of a step in a trace whose times are positions."""
    return min(
        (event.start_seconds for device in trace.devices for event in _shown(device.events, step)),
        default=0.0,
    )


def _shown(events: Iterable[Event], first: int) -> Iterable[Event]:
    return (event for event in events if event.step >= first)


def _device(
    device: DeviceTrace, first: int, clock: _Ticks, words: _Words, cluster: Cluster | None
) -> dict[str, Any]:
    lanes: dict[str, list[Event]] = {"computing": []}
    for event in _shown(device.events, first):
        lanes.setdefault(_lane(event), []).append(event)
    peak = device.peak
    return {
        "number": device.device,
        "name": cluster.devices[device.device].kind.name if cluster else "",
        "budget": device.budget_bytes,
        "peak": device.peak_bytes,
        "peakTick": clock.ticks(peak.seconds) if peak else 0,
        "lanes": [_lane_data(name, events, clock, words) for name, events in lanes.items()],
        "memory": _memory([sample for sample in device.memory if sample.step >= first], clock, words),
    }


def _lane(event: Event) -> str:
    if event.stream is Stream.COMPUTE:
        return "computing"
    if event.stream is Stream.COMMUNICATION:
        return _MESSAGE
    return _COPY if parse_action(event.action).kind is not Kind.RELOAD else "copies back"


def _lane_data(name: str, events: list[Event], clock: _Ticks, words: _Words) -> dict[str, Any]:
    rows = sorted(
        (clock.ticks(e.start_seconds), clock.ticks(e.end_seconds), *words.of(e.action)) for e in events
    )
    return {
        "name": name,
        "starts": _differences([row[0] for row in rows]),
        "lengths": [row[1] - row[0] for row in rows],
        "words": [row[2] for row in rows],
        "microbatches": [row[3] for row in rows],
    }


def _memory(samples: list[MemorySample], clock: _Ticks, words: _Words) -> dict[str, Any]:
    said = [words.of(sample.action) for sample in samples]
    return {
        "times": _differences([clock.ticks(sample.seconds) for sample in samples]),
        "words": [word for word, _ in said],
        "microbatches": [microbatch for _, microbatch in said],
        "bytes": [_differences([sample.bytes[n] for sample in samples]) for n in range(len(CATEGORIES))],
    }


def _differences(numbers: list[int]) -> list[int]:
    """Return the first number, then the difference of each number from the previous one."""
    return [*numbers[:1], *(after - before for before, after in pairwise(numbers))]
