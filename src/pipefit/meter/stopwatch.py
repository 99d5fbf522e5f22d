"""Seconds of what a GPU computes, from pairs of events on its computing stream.

The host launches kernels ahead of the GPU, so that its own clock tells when they were launched. An event is queued
behind them and keeps the time at which the GPU comes to it. Events cost microseconds each and make nobody wait, until
their times are read: once a step, when the step's result has come and the GPU has passed them all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

Mark = torch.cuda.Event
_MILLISECOND = 1e-3


class HostWatch:
    """A stopwatch for what computes while the host waits: its marks are the host's own seconds."""

    def mark(self) -> float:
        """The present moment."""
        return time.perf_counter()

    def read(self, marks: Sequence[float]) -> list[float]:
        """The seconds of moments."""
        return list(marks)


class Stopwatch:
    """Marks moments on the current stream of `device`, and reads them in seconds of `clock`.

    Args:
        clock: the host's, with which the GPU's is compared once, before the first mark.
        event: makes an event with timing; a `torch.cuda.Event` unless given.
    """

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float],
        event: Callable[[], Mark] | None = None,
    ) -> None:
        self.device, self._clock = device, clock
        self._event = event or partial(torch.cuda.Event, enable_timing=True)
        self._known: tuple[Mark, float] | None = None

    def mark(self) -> Mark:
        """The moment at which the GPU has done what it was given so far."""
        if self._known is None:
            first = self._recorded()
            first.synchronize()
            self._known = first, self._clock()
        return self._recorded()

    def read(self, marks: Sequence[Mark]) -> list[float]:
        """The seconds of moments, in the order in which they were marked. Waits for the last.

        Events tell the time between two of them in milliseconds of 32 bits: so each is counted from the latest that is
        known, and not from the first.
        """
        if self._known is None or not marks:
            return []
        marks[-1].synchronize()
        known, seconds = self._known
        found = [seconds + known.elapsed_time(mark) * _MILLISECOND for mark in marks]
        self._known = marks[-1], found[-1]
        return found

    def has_come_to(self, mark: Mark) -> bool:
        """Whether the GPU is past a moment."""
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def _recorded(self) -> Mark:
        made = self._event()
        made.record(torch.cuda.current_stream(self.device))
        return made
