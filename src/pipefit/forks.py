"""A fork of this process that works for it, and ends with it.

    fork = Fork(lambda writing: os.write(writing, b"found"))
    fork.read(100)                                              # b"found"; then b"", as it has ended
    fork.end()                                                  # 0, its status

A fork has one of this process's threads alone. A lock that another one held at that moment stays locked there, and who
waits for it waits for ever. So whoever reads looks at the fork each second, and gives up one that stands still.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pipefit.signals import ENDING

LOOKS, LOOK_SECONDS = 60, 1.0  # a fork stands still that has slept through so many looks, one after the other
_DIE_WITH_PARENT, _ADOPT, _ADOPTS = 1, 36, 37  # prctl's PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER and PR_GET_...


class Fork:
    """A process, forked from this one on Linux, that calls `work` with the descriptor of a pipe, and then ends in
    silence, whatever `work` raises. It ends, too, with this process, and as nobody holds this object any more.

    Raises:
        OSError: the system has no process for it, or no pipe.
    """

    def __init__(self, work: Callable[[int], object]) -> None:
        self._reading, writing = os.pipe()
        self._parent = parent = os.getpid()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads: `read` gives up
                self._process = os.fork()
        except OSError:
            os.close(self._reading)
            os.close(writing)
            raise
        if self._process == 0:
            try:
                os.close(self._reading)
                _end_with(parent)
                work(writing)
            finally:
                os._exit(0)
        os.close(writing)
        self._ending = weakref.finalize(self, _end, self._process, parent, self._reading)

    def read(self, most: int) -> bytes:
        """What the fork has written, up to `most` bytes, as soon as there is something; nothing once it has ended, and
        in a process that is a fork itself.

        Raises:
            TimeoutError: it stands still.
        """
        if not self._ending.alive or os.getpid() != self._parent:
            return b""
        poll = select.poll()
        poll.register(self._reading)
        before, left = 0.0, LOOKS
        while not poll.poll(LOOK_SECONDS * 1000):
            now = time.clock_gettime(~self._process << 3 | 2)  # as `clock_getcpuclockid` says it; of all its threads
            left = left - 1 if now == before and self._sleeps() else LOOKS
            before = now
            if not left:
                raise TimeoutError(f"process {self._process} has stood still for {LOOKS * LOOK_SECONDS:.0f} s")
        return os.read(self._reading, most)

    def end(self) -> int:
        """End it now; the status with which it has ended, as `os.waitpid` says it, or 0 if it was ended before."""
        return self._ending() or 0

    def _sleeps(self) -> bool:
        """Whether it waits for something else than a processor or a disk, and is not stopped."""
        return Path(f"/proc/{self._process}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def _end(process: int, parent: int, reading: int) -> int:
    """End a fork of `parent`, if that is this process: the status with which it has ended."""
    os.close(reading)
    status = 0
    if os.getpid() == parent:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        with suppress(ChildProcessError):
            _, status = os.waitpid(process, 0)
    return status


def adopt_orphans(adopts: bool) -> bool:
    """Whether descendants whose parent ends become children of this process from now on; whether they did before.

    Nothing changes where the system is not Linux.
    """
    prctl, before = getattr(ctypes.CDLL(None), "prctl", None), ctypes.c_int(0)
    if prctl is not None:
        prctl(_ADOPTS, ctypes.byref(before), 0, 0, 0)
        prctl(_ADOPT, int(adopts), 0, 0, 0)
    return bool(before.value)


def _end_with(parent: int) -> None:
    """Make this fork of `parent` end with it, and at a signal."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        raise ProcessLookupError(parent)
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
