"""Traces in the Trace Event Format."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict

from pipefit.cluster import Cluster
from pipefit.export.perfetto import perfetto
from pipefit.planner import plan
from pipefit.simulator import simulate
from pipefit.trace import Trace
from pipelines import random_profile


def traced() -> Trace:
    """A pipeline of three stages."""
    return simulate(plan(random_profile(6), Cluster.emulated((3, 1 << 30)), microbatches=4, planner="exact"))


def test_every_action_and_every_byte_is_there() -> None:
    """Complete events are the trace's, in microseconds; the counter's values add up to the bytes of each sample."""
    trace = traced()
    events = json.loads(perfetto(trace))["traceEvents"]
    for device in trace.devices:
        own = [event for event in events if event["pid"] == device.device]
        told = [(one["name"], one["ts"], one["dur"]) for one in own if one["ph"] == "X"]
        assert told == [
            (one.action, one.start_seconds * 1e6, (one.end_seconds - one.start_seconds) * 1e6) for one in device.events
        ]
        counted = [sum(one["args"].values()) for one in own if one["ph"] == "C"]
        assert counted == [sample.total_bytes for sample in device.memory]


def test_events_of_a_thread_do_not_overlap() -> None:
    """What one stream of a device computes comes one after the other, as the format demands of a thread."""
    threads = defaultdict(list)
    for one in json.loads(perfetto(traced()))["traceEvents"]:
        if one["ph"] == "X" and one["cat"] == "compute":
            threads[one["pid"], one["tid"]].append((one["ts"], one["ts"] + one["dur"]))
    for spans in threads.values():
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(sorted(spans)))
