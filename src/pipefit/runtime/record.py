"""What a device did and held in its first and latest steps, from which its trace is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

from pipefit.trace import DeviceTrace, Event, MemorySample

_REMEMBERED = 100  # steps whose events and memory a trace holds, besides the first two


@dataclass(slots=True)
class Record:
    """Events and memory samples of the first two steps and the latest ones, and how many steps there were."""

    steps: int = 0
    events: list[Event] = field(default_factory=list)
    samples: list[MemorySample] = field(default_factory=list)

    @property
    def step_peak_bytes(self) -> int:
        """The peak of the last step; 0 without a meter."""
        last = self.steps - 1
        of_last = takewhile(lambda sample: sample.step == last, reversed(self.samples))
        return max((sample.total_bytes for sample in of_last), default=0)

    def next_step(self) -> None:
        """Begin the next step. Every so many steps, those that are neither first nor latest are dropped."""
        self.steps += 1
        if self.steps > 2 * _REMEMBERED and self.steps % _REMEMBERED == 0:
            kept = self.steps - _REMEMBERED
            self.events = [event for event in self.events if event.step < 2 or event.step >= kept]
            self.samples = [sample for sample in self.samples if sample.step < 2 or sample.step >= kept]

    def go_on(self) -> None:
        """What comes next belongs to the step before, until the next `next_step`: it ends what that left in flight."""
        self.steps = max(0, self.steps - 1)

    def trace(self, device: int, budget_bytes: int) -> DeviceTrace:
        """The trace of this device."""
        return DeviceTrace(
            device=device, budget_bytes=budget_bytes, events=tuple(self.events), memory=tuple(self.samples)
        )
