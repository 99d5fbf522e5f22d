"""Who is to blame when training fails or stands still: the worker that failed by itself, or the one that hangs.

When one worker fails, others fail soon after it, because their connections break; while one hangs, others wait for it
in silence. Both are told apart from the culprit by what the parent sees of every worker.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipefit.errors import PeerLost, PipefitError, WorkerFailed
from pipefit.limits import addresses, processes


class ProcessDied(WorkerFailed):
    """A process that ended without a report."""


class Aborted(ProcessDied):
    """A process on a GPU that was aborted, as NCCL's watchdog does to one that waits in vain for another."""


def died(code: int | None, *, starting: bool, building: bool = False, on_gpu: bool = False) -> ProcessDied:
    """The error for a worker whose pipe ended without a report; `code` is its exit code, None if it still runs.

    `building` says that it was before its first step, where libraries start their threads.
    """
    if on_gpu and code == -signal.SIGABRT:
        return Aborted("aborted (signal 6), as NCCL does where another worker is gone or hangs; its output says why")
    if code is None:
        return ProcessDied("it closed its pipe without a report, and did not end")
    if code == -signal.SIGKILL:
        return ProcessDied(
            "killed by signal 9 (SIGKILL), as the system does when memory runs out: dmesg tells so, and the limit of a "
            "control group is in its memory.max"
        )
    if code == -signal.SIGABRT and building:
        limits = ", ".join(filter(None, (processes(), addresses())))
        return ProcessDied(
            f"aborted (signal 6), as libraries do that can start no thread; {limits or 'see its output'}"
        )
    if code < 0:
        return ProcessDied(f"killed by signal {-code} ({signal.strsignal(-code)})")
    if code == 1 and starting:
        return ProcessDied(
            'it could not be started, and has printed why; a script must call train under `if __name__ == "__main__":`'
        )
    return ProcessDied(f"its process exited with code {code}")


def root_cause(failures: Mapping[int, tuple[PipefitError, float]]) -> int:
    """The rank whose failure caused the others, of `failures`: error and time by rank.

    A process that died comes before a worker's own error, that before one that was aborted on a GPU, and that before
    one that only lost its peer; among several of a kind, the earliest.
    """

    def order(rank: int) -> tuple[int, float]:
        error, when = failures[rank]
        return _order(error), when

    return min(failures, key=order)


def _order(error: PipefitError) -> int:
    """By what failures are sorted: causes first, then those that follow from others."""
    match error:
        case Aborted():
            return 2
        case ProcessDied():
            return 0
        case PeerLost():
            return 3
    return 1


class Watch:
    """A clock of the time in which this process looks on: from one look to the next it goes on by `longest` seconds.

    A program that was stopped, as Ctrl-Z stops it together with its workers, or that got no processor, knows nothing of
    the silence of others meanwhile.
    """

    def __init__(self, longest: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest, self._clock = longest, clock
        self._seconds, self._before = 0.0, clock()

    def now(self) -> float:
        """Seconds since it began; whoever asks looks on."""
        now = self._clock()
        self._seconds += min(now - self._before, self._longest)
        self._before = now
        return self._seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What the parent sees of an unfinished worker: since when it is silent, and how long it may be where it is.

    `waits` says that it is where it waits for others, so that its silence says nothing about itself.
    """

    rank: int
    silent_seconds: float
    limit_seconds: float
    waits: bool


def hanging(unfinished: Sequence[Sighting]) -> int | None:
    """The rank that hangs, of all workers that have not finished; None if they may still come on.

    It is silent for longer than it may be, and does not wait for others. Where all are silent for too long and all
    wait, it is the one that has done so for the longest.
    """
    silent = [worker for worker in unfinished if worker.silent_seconds > worker.limit_seconds]
    blamed = [worker for worker in silent if not worker.waits]
    if not blamed and len(silent) == len(unfinished):
        blamed = silent
    longest = max(blamed, key=lambda worker: worker.silent_seconds, default=None)
    return None if longest is None else longest.rank
