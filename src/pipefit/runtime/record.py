"""What a device did and held in its first and latest steps, from which its trace is made.

Times are the host's, and those of a GPU where there is a stopwatch for it. They are read when the next step begins, by
which time the step's result has come, so that nobody waits for them; under an endless schedule the GPU may not be there
yet, and they are read later.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import NamedTuple

from pipefit.meter.stopwatch import Mark, Stopwatch
from pipefit.runtime.out_of_memory import Moment
from pipefit.trace import AllocatorPeaks, DeviceTrace, Event, MemorySample

_REMEMBERED = 100  # steps whose events and memory a trace holds, besides the first two


class _Marked(NamedTuple):
    """An event and a sample, by their numbers, whose times on the GPU have not been read."""

    event: int | None
    sample: int | None
    began: Mark
    ended: Mark


@dataclass(slots=True)
class Record:
    """Events and memory samples of the first two steps and the latest ones, and how many steps there were."""

    stopwatch: Stopwatch | None = None
    steps: int = 0
    events: list[Event] = field(default_factory=list)
    samples: list[MemorySample] = field(default_factory=list)
    ran_out: Moment | None = None  # where the action that failed last ran out of memory
    _marked: list[_Marked] = field(default_factory=list)

    @property
    def step_peak_bytes(self) -> int:
        """The peak of the last step; 0 without a meter."""
        last = self.steps - 1
        of_last = takewhile(lambda sample: sample.step == last, reversed(self.samples))
        return max((sample.total_bytes for sample in of_last), default=0)

    def mark(self) -> Mark | None:
        """A moment on the GPU; None where there is none."""
        return None if self.stopwatch is None else self.stopwatch.mark()

    def add(self, sample: MemorySample | None, event: Event | None, began: Mark | None) -> None:
        """What an action took, and what it did, with the host's times; it began at that moment, and ends now."""
        self.samples += [sample] if sample is not None else []
        self.events += [event] if event is not None else []
        if began is not None and (ended := self.mark()) is not None:
            own = None if event is None else len(self.events) - 1
            self._marked.append(_Marked(own, None if sample is None else len(self.samples) - 1, began, ended))

    def read(self, *, wait: bool) -> None:
        """Take over the GPU's times, if it has come to the last, or if that is to be waited for."""
        if self.stopwatch is None or not self._marked:
            return
        if not wait and not self.stopwatch.has_come_to(self._marked[-1].ended):
            return
        times = self.stopwatch.read([mark for one in self._marked for mark in (one.began, one.ended)])
        for one, began, ended in zip(self._marked, times[::2], times[1::2], strict=True):
            if one.event is not None:
                self.events[one.event] = replace(self.events[one.event], start_seconds=began, end_seconds=ended)
            if one.sample is not None:
                self.samples[one.sample] = replace(self.samples[one.sample], seconds=began)
        self._marked.clear()

    def forget(self) -> None:
        """The times of a step that has failed stay the host's."""
        self._marked.clear()

    def next_step(self) -> None:
        """Begin the next step. Every so many steps, those that are neither first nor latest are dropped."""
        self.steps += 1
        if self.steps > 2 * _REMEMBERED and self.steps % _REMEMBERED == 0:
            self.read(wait=True)  # dropping changes their numbers
            kept = self.steps - _REMEMBERED
            self.events = [event for event in self.events if event.step < 2 or event.step >= kept]
            self.samples = [sample for sample in self.samples if sample.step < 2 or sample.step >= kept]

    def go_on(self) -> None:
        """What comes next belongs to the step before, until the next `next_step`: it ends what that left in flight."""
        self.steps = max(0, self.steps - 1)

    def trace(self, device: int, budget_bytes: int, allocator: AllocatorPeaks | None = None) -> DeviceTrace:
        """The trace of this device, with the peaks of its `allocator` if it has one."""
        self.read(wait=True)
        return DeviceTrace(
            device=device,
            budget_bytes=budget_bytes,
            events=tuple(self.events),
            memory=tuple(self.samples),
            allocator=allocator,
        )
