"""Work that a second process does meanwhile, on a core that would be idle: how commands become faster on two cores.

    with forking():                                # as commands are; elsewhere work is only put off
        (later,) = beside(lambda: trace(64))       # a fork of this process begins
        one = trace(1)
        other = later()                            # what the work returned

Answers do not tell whether there was a second process. Its result is taken only where the work returned in silence and
the result can be pickled. Where it raised, wrote a word, warned or was killed, the work is done again in this process,
which then raises, writes or warns.

A fork begins with all that this process has imported and made, and takes memory for what it changes. It ends with
its last result, when nobody can ask for one any more, and with this process, however that ends.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import TypeVar

from pipefit.signals import ENDING

T = TypeVar("T")

_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
_LENGTH = 8  # bytes in which the fork tells how long a result is

_forks: ContextVar[weakref.WeakSet[_Fork] | None] = ContextVar("_forks", default=None)  # that run; None outside


@contextmanager
def forking() -> Iterator[None]:
    """Inside, `beside` forks this process where it may: on Linux with several cores, for each of them at most.

    It is for a process that is ours alone: a fork has only one of its threads.
    """
    before = _forks.set(weakref.WeakSet() if sys.platform == "linux" else None)
    try:
        yield
    finally:
        _forks.reset(before)


def beside(
    *works: Callable[[], T], forks: bool = True, check: Callable[[], object] | None = None
) -> tuple[Callable[[], T], ...]:
    """Begin all `works`, one after the other, in another process: functions that wait for what each returned.

    Where there is no core for them, or outside of `forking`, each is done when its result is asked for. So it is with
    `forks` False, and where `check`, which is called in the fork before, raises anything: for works that not every
    process can do, and that might take what is in their way for another failure.
    """
    running = _forks.get() if forks else None
    fork = None
    if running is not None and len(running) < len(os.sched_getaffinity(0)) > 1:
        fork = _Fork(works, check)
        running.add(fork)
    return tuple(_later(fork, number, work) for number, work in enumerate(works))


def _later(fork: _Fork | None, number: int, work: Callable[[], T]) -> Callable[[], T]:
    @cache
    def found() -> T:
        told = None if fork is None else fork.result(number)
        if told is None:
            return work()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what classes of other packages say as they are made again
            taken: T = pickle.loads(told)  # noqa: S301 - our own fork wrote it
        return taken

    return found


class _Fork:
    """A process that works, tells of each result how long it is, and has written it to memory before."""

    def __init__(self, works: Sequence[Callable[[], object]], check: Callable[[], object] | None) -> None:
        self._results, (self._told, telling) = os.memfd_create("pipefit-results"), os.pipe()
        self._ends, self._count = [0], len(works)  # where results end
        self._parent = parent = os.getpid()  # in a fork of it this is no fork of ours
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads: they hold nothing of ours
            process = os.fork()
        if process == 0:
            try:
                _begin(parent)
                if check is not None:
                    check()
                _serve(works, self._results, telling)
            finally:
                os._exit(0)
        os.close(telling)
        weakref.finalize(self, os.close, self._results)
        self._end = weakref.finalize(self, _ended, process, parent, self._told)

    def result(self, number: int) -> bytes | None:
        """What a work returned, as a pickle; None where it did not come to its end in silence."""
        while len(self._ends) <= number + 1:
            told = os.read(self._told, _LENGTH) if self._end.alive and os.getpid() == self._parent else b""
            if not told:
                self._stop()
                return None
            self._ends.append(self._ends[-1] + int.from_bytes(told, "little"))
        start, end = self._ends[number : number + 2]
        found = os.pread(self._results, end - start, start)
        if len(self._ends) > self._count:
            self._stop()
        return found

    def _stop(self) -> None:
        self._end()
        if (running := _forks.get()) is not None:
            running.discard(self)


def _ended(process: int, parent: int, told: int) -> None:
    """End a fork of `parent`, if that is this process."""
    os.close(told)
    if os.getpid() == parent:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(process, 0)


def _begin(parent: int) -> None:
    """Make this process a fork of which nothing is seen. Streams, and locks that a thread may hold, stay alone."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        raise ProcessLookupError(parent)
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
    _forks.set(None)
    logging.disable()
    said = os.memfd_create("pipefit-said")
    for stream in (1, 2):
        os.dup2(said, stream)
    sys.stdout = sys.stderr = os.fdopen(said, "w", buffering=1, encoding="utf-8", closefd=False)


def _serve(works: Sequence[Callable[[], object]], results: int, telling: int) -> None:
    """Work until a work is not silent, and hand over what was found until then."""
    for work in works:
        with warnings.catch_warnings(record=True) as warned:
            found = pickle.dumps(work())
        if warned or os.fstat(1).st_size:
            return
        with open(results, "wb", closefd=False) as file:
            file.write(found)
        os.write(telling, len(found).to_bytes(_LENGTH, "little"))
