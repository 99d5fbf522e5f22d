"""Traces in the Trace Event Format."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from dataclasses import replace

from pipefit.export.traces import perfetto
from pipefit.schema.trace import Stream, Trace
from pipefit.simulator import simulate
from support.pipelines import equal_profile, make_cluster, make_plan, offload_all


def traced() -> Trace:
    """Return a pipeline of three stages with messages long enough for several to be in flight."""
    plan = make_plan(
        equal_profile(6), (2, 2, 2), cluster=make_cluster(3, bytes_per_second=4.0), microbatches=6
    )
    return simulate(plan, program=offload_all(plan))


def test_every_action_and_every_byte_is_there() -> None:
    """Complete events are the trace's, in microseconds; the counter's values add up to the bytes of each
    sample.
    """
    trace = traced()
    events = json.loads(perfetto(trace))["traceEvents"]
    for device in trace.devices:
        own = [event for event in events if event["pid"] == device.device]
        told = sorted((one["name"], one["ts"], one["dur"]) for one in own if one["ph"] == "X")
        assert told == sorted(
            (one.action, one.start_seconds * 1e6, (one.end_seconds - one.start_seconds) * 1e6)
            for one in device.events
        )
        counted = [sum(one["args"].values()) for one in own if one["ph"] == "C"]
        assert counted == [sample.total_bytes for sample in device.memory]


def test_events_of_a_thread_do_not_overlap() -> None:
    """Events on a thread are consecutive, as the format demands, though those of a stream overlap."""
    trace = traced()
    threads, streams = defaultdict(list), defaultdict(list)
    for one in json.loads(perfetto(trace))["traceEvents"]:
        if one["ph"] == "X":
            threads[one["pid"], one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
            streams[one["pid"], one["cat"]].append((one["ts"], one["ts"] + one["dur"]))
    assert not any(map(overlap, threads.values()))
    assert any(overlap(streams[n, Stream.COMMUNICATION.value]) for n in range(3))


def overlap(spans: list[tuple[float, float]]) -> bool:
    """Return whether two of the spans share more than their ends."""
    return any(end > start + 1e-3 for (_, end), (start, _) in itertools.pairwise(sorted(spans)))


def test_positions_of_a_dry_run_are_no_seconds() -> None:
    """A trace without a clock keeps its positions unchanged."""
    trace = replace(traced(), source="dry run")
    first = next(one for one in json.loads(perfetto(trace))["traceEvents"] if one["ph"] == "X" and one["ts"])
    assert first["ts"] in {event.start_seconds for device in trace.devices for event in device.events}
