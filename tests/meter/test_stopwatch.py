"""Seconds of a GPU that lags behind the host, by simulated torch events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

from pipefit.measure.cuda import Stopwatch
from pipefit.runtime.engine.runner import RunRecord
from pipefit.schema.trace import Event, MemorySample, Stream

GPU = torch.device("cuda", 0)


@dataclass
class Twin:
    """A GPU that runs its kernels one after the other, and a host that launches each in a hundredth of a
    second.

    `busy` is the end of the GPU's queue, `seen` the time up to which the host has waited for it.
    """

    host: float = 50.0
    busy: float = 50.0
    waits: list[float] = field(default_factory=list)

    def launch(self, seconds: float) -> None:
        """Launch a kernel of `seconds` seconds on the host."""
        self.host += 0.01
        self.busy = max(self.busy, self.host) + seconds

    def clock(self) -> float:
        """Return the host's seconds."""
        return self.host


@dataclass
class TwinEvent:
    """An event of a `Twin`, which raises before the GPU has reached it, as torch's does."""

    gpu: Twin
    at: float = float("nan")

    def record(self, stream: object) -> None:
        """Record after the GPU's queue."""
        self.at = max(self.gpu.busy, self.gpu.host)

    def query(self) -> bool:
        """Return whether the GPU has passed the event."""
        return self.gpu.host >= self.at

    def synchronize(self) -> None:
        """Let the host wait."""
        self.gpu.waits.append(self.at)
        self.gpu.host = max(self.gpu.host, self.at)

    def elapsed_time(self, end: TwinEvent) -> float:
        """Return 32-bit milliseconds."""
        assert self.query()
        assert end.query()
        return torch.tensor((end.at - self.at) * 1e3, dtype=torch.float32).item()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Twin:
    """Return a GPU with one stream."""
    monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock())
    return Twin()


def stopwatch(gpu: Twin) -> Any:
    """Return a stopwatch of a twin."""
    return Stopwatch(GPU, gpu.clock, lambda: TwinEvent(gpu))  # type: ignore[arg-type,return-value]


def test_times_are_when_the_gpu_computed(gpu: Twin) -> None:
    """Three kernels of a second each, launched at once, have consecutive times in the host's seconds."""
    watch = stopwatch(gpu)
    marks = [watch.mark()]
    for _ in range(3):
        gpu.launch(1.0)
        marks.append(watch.mark())
    assert gpu.host < 51
    assert watch.read(marks) == pytest.approx([50.0, 51.01, 52.01, 53.01])


def test_times_stay_exact_over_days(gpu: Twin) -> None:
    """A microsecond is exact after a week, though events count 32-bit milliseconds."""
    watch = stopwatch(gpu)
    for _ in range(7 * 24):
        watch.mark()
        gpu.launch(3600.0)
        watch.read([watch.mark()])
    began = watch.mark()
    gpu.launch(1e-6)
    times = watch.read([began, watch.mark()])
    assert times[1] - times[0] == pytest.approx(0.01 + 1e-6, abs=2e-7)


def recorded(record: RunRecord, gpu: Twin, seconds: float) -> None:
    """Record an action that launches a kernel, as a runner does."""
    began, mark = gpu.clock(), record.mark()
    gpu.launch(seconds)
    sample = MemorySample(step=record.steps, action="0F0", seconds=began, bytes=(0,) * 10)  # type: ignore[arg-type]
    event = Event(
        step=record.steps, action="0F0", stream=Stream.COMPUTE, start_seconds=began, end_seconds=gpu.clock()
    )
    record.add(sample, event, mark)


def test_a_record_waits_for_no_gpu_within_a_step(gpu: Twin) -> None:
    """A record within a step does not wait for the GPU: the times of a step are read together after its last
    mark.
    """
    record = RunRecord(stopwatch(gpu))
    for _ in range(2):
        recorded(record, gpu, 1.0)
    before = list(gpu.waits)
    record.read(wait=False)
    assert gpu.waits == before
    assert record.events[1].end_seconds < 51
    gpu.host = 60.0  # as after the step's result
    record.read(wait=False)
    assert len(gpu.waits) == len(before) + 1
    assert [event.start_seconds for event in record.events] == pytest.approx([50.0, 51.01])
    assert [event.end_seconds for event in record.events] == pytest.approx([51.01, 52.01])
    assert [sample.seconds for sample in record.samples] == pytest.approx([50.0, 51.01])


def test_a_trace_has_the_times_of_all_steps(gpu: Twin) -> None:
    """A trace waits for the GPU and has the times of all steps; skipped times shift no others."""
    record = RunRecord(stopwatch(gpu))
    for _ in range(300):
        recorded(record, gpu, 1.0)
        record.next_step()
    events = record.trace(0, 1).events
    assert {event.step for event in events} == {0, 1, *range(200, 300)}
    for event in events:
        assert event.start_seconds == pytest.approx(50 + event.step, abs=0.02)
        assert event.end_seconds == pytest.approx(51.01 + event.step, abs=0.01)
