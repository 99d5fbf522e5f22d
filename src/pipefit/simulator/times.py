"""The seconds of steps, by the clock: how long each takes, and how much of the last one every device computes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise

from pipefit.simulator.clock import Clock
from pipefit.simulator.timed_program import TimedProgram


class Times:
    """The times of a program.

    `counts[device]` are the numbers of its actions in every step. The steps of an endless schedule overlap, so that
    they are one program to the clock; of others the program is one step, which repeats.
    """

    def __init__(self, program: TimedProgram, counts: Sequence[Sequence[int]], *, endless: bool) -> None:
        self._program, self._counts, self._endless = program, counts, endless
        self._steps = len(counts[0])

    @cached_property
    def clock(self) -> Clock:
        """When every action and transfer begins and ends."""
        return Clock(self._program, 1 if self._endless else self._steps)

    @cached_property
    def step_seconds(self) -> tuple[float, ...]:
        """Seconds of every step: from the end of the step before to the end of this one, each on the last device."""
        return tuple(end - start for start, end in pairwise((0.0, *self._finished)))

    @cached_property
    def utilisation(self) -> tuple[float, ...]:
        """The share of the last step in which every device computes."""
        length, last = self.step_seconds[-1], [counts[-1] for counts in self._counts]
        busy = [
            sum(one.seconds[-count:]) if count else 0.0 for one, count in zip(self._program.devices, last, strict=True)
        ]
        return tuple(seconds / length if length else 0.0 for seconds in busy)

    def starts(self, device: int) -> list[int]:
        """For every step, and for their end, how many actions of the device come before it."""
        return [0, *accumulate(self._counts[device])]

    @cached_property
    def _finished(self) -> list[float]:
        """When the last device ended every step."""
        if not self._endless:
            return self.clock.finished
        ends = [0.0] * self._steps
        for device in range(len(self._counts)):
            after, starts = self.clock.after[device], self.starts(device)
            for step, stop in enumerate(starts[1:]):
                ends[step] = max(ends[step], after[stop - 1] if stop else 0.0)
        return ends
