"""Work that a second process does meanwhile, on a core that would be idle: how commands become faster on two cores.

    with forking():                                # as commands are; elsewhere work is only put off
        (later,) = beside(lambda: trace(64))       # a fork of this process begins
        one = trace(1)
        other = later()                            # what the work returned

Answers do not tell whether there was a second process. Its result is taken only where the work returned in silence and
the result can be pickled. Where it raised, wrote a word, warned, stood still or was killed, the work is done again in
this process, which then raises, writes or warns.

A fork begins with all that this process has imported and made, and takes memory for what it changes. It ends with
its last result, when nobody can ask for one any more, and with this process, however that ends (`pipefit.forks`).
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from typing import TypeVar

from pipefit.forks import Fork

T = TypeVar("T")

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


def forks_left() -> int:
    """For how many more forks there is a core, while this process waits for them; none outside of `forking`."""
    running, cores = _forks.get(), len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    return 0 if running is None or cores == 1 else max(0, cores - len(running))


def beside(
    *works: Callable[[], T], forks: bool = True, check: Callable[[], object] | None = None
) -> tuple[Callable[[], T], ...]:
    """Begin all `works`, one after the other, in another process: functions that wait for what each returned.

    Where there is no core or process for them, or outside of `forking`, each is done when its result is asked for. So
    it is with `forks` False, and where `check`, which is called in the fork before, raises anything: for works that not
    every process can do, and that might take what is in their way for another failure.
    """
    running = _forks.get() if forks else None
    fork = None
    if running is not None and len(running) < len(os.sched_getaffinity(0)) > 1:
        with suppress(OSError):  # no process is to be had, or no file for it, as under ulimit or in a container
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
        self._results = results = os.memfd_create("pipefit-results")
        weakref.finalize(self, os.close, results)
        self._ends, self._count = [0], len(works)  # where results end

        def serve(telling: int) -> None:
            _be_unseen()
            if check is not None:
                check()
            _serve(works, results, telling)

        self._fork = Fork(serve)

    def result(self, number: int) -> bytes | None:
        """What a work returned, as a pickle; None where it did not come to its end in silence."""
        while len(self._ends) <= number + 1:
            try:
                told = self._fork.read(_LENGTH)
            except TimeoutError:
                told = b""
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
        self._fork.end()
        if (running := _forks.get()) is not None:
            running.discard(self)


def _be_unseen() -> None:
    """Make this process a fork of which nothing is seen. Streams, and locks that a thread may hold, stay alone."""
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
