"""A fork of this process that works for it, and ends with it.

    fork = Fork(lambda writing: os.write(writing, b"found"))
    fork.read(100)                                              # b"found"; then b"", as it has ended
    fork.end()                                                  # 0, its status

A fork has one of this process's threads alone. A lock that another one held at that moment stays locked there, and who
waits for it waits for ever. So whoever reads looks at the fork each second, and gives up one that stands still.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import os
import pickle
import re
import select
import signal
import sys
import time
import warnings
import weakref
from _thread import allocate_lock, stack_size, start_new_thread
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TypeVar

from pipefit.errors import all_lines, no_memory
from pipefit.units import format_bytes

# ----------------------------------------------------------------------------------------------------
# Lets searches run without Python's search for cycles of garbage.
#
# Planners make millions of objects, keep many of them and make no cycles to speak of. The collector looks at
# all of them again and again, which takes as long as the planning itself. What is no longer used is freed all
# the same.


@contextmanager
def uncollected() -> Iterator[None]:
    """Within it the collector does not run; behind it, it does if it did before."""
    runs = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if runs:
            gc.enable()


# ----------------------------------------------------------------------------------------------------
# The signals with which a terminal, a scheduler or a user ends all processes of a group.

_NAMES = "SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"
ENDING = tuple(signal.Signals[name] for name in _NAMES if hasattr(signal, name))  # Windows has the first two


# ----------------------------------------------------------------------------------------------------
# The system's limits on a process, in words, for messages about work that they keep from being done.

if sys.platform != "win32":
    import resource  # now: where a limit is met there may be no way to load it

_STACK_BYTES = 1 << 16
_NO_ROOM = re.compile(
    r".*(failed to map segment|cannot allocate memory|cannot create shared object|memory protections).*", re.IGNORECASE
)


def met(error: BaseException) -> str:
    """The limit that an error has met, in words; empty if it tells of none, or there is none."""
    number, said = getattr(error, "errno", None), all_lines(error)
    if number in (errno.EMFILE, errno.ENFILE) or os.strerror(errno.EMFILE) in said:
        limit = files()
    elif number == errno.EAGAIN or os.strerror(errno.EAGAIN) in said or "can't start new thread" in said:
        limit = processes()
    elif number == errno.ENOMEM or no_memory(error) or no_room_for(error):
        limit = addresses() or "the system has so much memory as free shows"
    else:
        return ""
    return limit or "the system has no more: ulimit -a shows its limits"


def files() -> str:
    """The limit of open files, in words; empty if there is none."""
    most = _soft("RLIMIT_NOFILE")
    return "" if most is None else f"a process may open {most} files here (ulimit -n)"


def processes() -> str:
    """The limits of processes and threads, in words: of this user, and of this process's control groups."""
    of_user, of_groups = _soft("RLIMIT_NPROC"), _of_control_groups()
    found = [] if of_user is None else [f"this user may have {of_user} processes and threads (ulimit -u)"]
    if of_groups:
        found.append(f"this control group may have {min(of_groups)} of them (pids.max)")
    return ", and ".join(found)


def addresses() -> str:
    """The limit of this process's address space, in words; empty if there is none."""
    most = _soft("RLIMIT_AS")
    return "" if most is None else f"this process may have {format_bytes(most)} of addresses (ulimit -v)"


def room_for_threads(count: int) -> bool:
    """Whether so many threads can be started now; they are, for a moment, with small stacks.

    A handler of a signal may ask: no lock is taken that the code which it interrupts could hold.
    """
    usual, gate, ended, started = stack_size(_STACK_BYTES), allocate_lock(), list[bool](), 0

    def wait() -> None:
        with gate:
            ended.append(True)

    with gate:
        try:
            for started in range(1, count + 1):  # noqa: B007 - how many there are
                start_new_thread(wait, ())
            room = True
        except RuntimeError:
            started, room = started - 1, False
        finally:
            stack_size(usual)
    while len(ended) < started:
        time.sleep(0)
    return room


def no_room_for(library: BaseException) -> str:
    """What an import says that failed for want of memory for a library, in one of its lines; empty if it did not."""
    said = _NO_ROOM.search(str(library)) if isinstance(library, ImportError) else None
    return "" if said is None else said[0].strip()


def _soft(name: str) -> int | None:
    """What a limit is at present; None if there is none, or none of that name."""
    if sys.platform == "win32":
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else int(soft)


def _of_control_groups() -> list[int]:
    """How many processes and threads the control groups of this process may have, if they tell."""
    found = []
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    for _, controllers, path in groups:
        if controllers not in ("", "pids"):
            continue
        root = Path("/sys/fs/cgroup") / controllers
        for folder in (root / path.lstrip("/"), root):  # the second, where a container sees its own group alone
            try:
                found.append(int((folder / "pids.max").read_text()))
                break
            except (OSError, ValueError):  # there is none, or it is "max"
                continue
    return found


# ----------------------------------------------------------------------------------------------------

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


# ----------------------------------------------------------------------------------------------------
# Work that a second process does meanwhile, on a core that would be idle: how commands become faster on two
# cores.
#
#     with forking():                                # as commands are; elsewhere work is only put off
#         (later,) = beside(lambda: trace(64))       # a fork of this process begins
#         one = trace(1)
#         other = later()                            # what the work returned
#
# Answers do not tell whether there was a second process. Its result is taken only where the work returned in
# silence and the result can be pickled. Where it raised, wrote a word, warned, stood still or was killed, the
# work is done again in this process, which then raises, writes or warns.
#
# A fork begins with all that this process has imported and made, and takes memory for what it changes. It
# ends with its last result, when nobody can ask for one any more, and with this process, however that ends
# (`pipefit.processes`).

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
