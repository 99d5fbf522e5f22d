"""Processes: forks that work in parallel and end with this process, signals, and the system's limits.

    fork = Fork(lambda: [b"first", b"second"])
    fork.receive()                                              # b"first"; None after the last
    fork.end()                                                  # 0, its status

A fork has only one of this process's threads. A lock that another thread held at that moment stays locked in
the fork, and waiting for it never ends. Therefore readers check the fork each second, and give up one that
stands still.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import logging
import os
import pickle
import re
import signal
import sys
import time
import warnings
import weakref
from _thread import allocate_lock, stack_size, start_new_thread
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pipefit.errors import all_lines, no_memory
from pipefit.units import format_bytes

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

# ---- Garbage collection


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable Python's collector of cyclic garbage in the block; restore its state afterwards.

    Planners create millions of objects, keep many of them and create hardly any cycles; collecting takes as
    long as the planning itself. Unused objects are freed nevertheless.
    """
    runs = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if runs:
            gc.enable()


# ---- Signals by which a terminal, a scheduler or a user ends all processes of a group

_NAMES = "SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"
ENDING = tuple(
    signal.Signals[name] for name in _NAMES if hasattr(signal, name)
)  # Windows has only the first two


# ---- The system's limits on a process, in words for error messages

if sys.platform != "win32":
    import resource  # imported now: at a limit, loading it may fail

_STACK_BYTES = 1 << 16
_NO_ROOM = re.compile(
    r".*(failed to map segment|cannot allocate memory|cannot create shared object|memory protections).*",
    re.IGNORECASE,
)


def met(error: BaseException) -> str:
    """Describe the limit that an error has met; empty if it names none, or no limit is set."""
    number, said = getattr(error, "errno", None), all_lines(error)
    if number in (errno.EMFILE, errno.ENFILE) or os.strerror(errno.EMFILE) in said:
        limit = files()
    elif number == errno.EAGAIN or os.strerror(errno.EAGAIN) in said or "can't start new thread" in said:
        limit = processes()
    elif number == errno.ENOMEM or no_memory(error) or no_room_for(error):
        limit = addresses() or "the system has only the memory that free shows"
    else:
        return ""
    return limit or "a limit of the system is reached: see its limits with ulimit -a"


def files() -> str:
    """Describe the limit of open files; empty if there is none."""
    most = _soft("RLIMIT_NOFILE")
    return "" if most is None else f"a process may open {most} files here (ulimit -n)"


def processes() -> str:
    """Describe the limits of processes and threads of this user and of this process's control groups."""
    of_user, of_groups = _soft("RLIMIT_NPROC"), _of_control_groups()
    result = [] if of_user is None else [f"this user may have {of_user} processes and threads (ulimit -u)"]
    if of_groups:
        result.append(f"this control group may have {min(of_groups)} of them (pids.max)")
    return ", and ".join(result)


def addresses() -> str:
    """Describe the limit of this process's address space; empty if there is none."""
    most = _soft("RLIMIT_AS")
    return "" if most is None else f"this process may have {format_bytes(most)} of addresses (ulimit -v)"


def room_for_threads(count: int) -> bool:
    """Return whether `count` threads can be started now, by starting them for a moment with small stacks.

    Signal handlers may call it: it takes no lock that the interrupted code could hold.
    """
    usual, gate, ended, started = stack_size(_STACK_BYTES), allocate_lock(), list[bool](), 0

    def wait() -> None:
        with gate:
            ended.append(True)

    with gate:
        try:
            for started in range(1, count + 1):  # noqa: B007 - counts the threads
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
    """Return the line of an import error that says that memory for a library was lacking; empty for other
    errors.
    """
    said = _NO_ROOM.search(str(library)) if isinstance(library, ImportError) else None
    return "" if said is None else said[0].strip()


def _soft(name: str) -> int | None:
    """Return the current value of a limit; None if it is unlimited or unknown."""
    if sys.platform == "win32":
        return None
    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else int(soft)


def _of_control_groups() -> list[int]:
    """Return the limits of processes and threads of this process's control groups."""
    result = []
    try:
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    for _, controllers, path in groups:
        if controllers not in ("", "pids"):
            continue
        root = Path("/sys/fs/cgroup") / controllers
        for folder in (
            root / path.lstrip("/"),
            root,
        ):  # the second, for a container that sees only its own group
            try:
                result.append(int((folder / "pids.max").read_text()))
                break
            except (OSError, ValueError):  # no such file, or the content is "max"
                continue
    return result


# ---- Orphans

_ADOPT, _ADOPTS = 36, 37  # prctl's PR_SET_CHILD_SUBREAPER and PR_GET_CHILD_SUBREAPER


def adopt_orphans(adopts: bool) -> bool:
    """Set whether orphaned descendants become children of this process; return the previous setting.

    Does nothing if the system is not Linux.
    """
    prctl, before = getattr(ctypes.CDLL(None), "prctl", None), ctypes.c_int(0)
    if prctl is not None:
        prctl(_ADOPTS, ctypes.byref(before), 0, 0, 0)
        prctl(_ADOPT, int(adopts), 0, 0, 0)
    return bool(before.value)


# ---- Forks

LOOKS, LOOK_SECONDS = 60, 1.0  # a fork that has slept through this many consecutive looks stands still
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


class Fork:
    """A process, forked from this one on Linux, that sends the `answers`.

    It ends silently after the last, even if `answers` raises. It also ends with this process, and when this
    object is garbage-collected. It waits with more than 64 KiB until they are received.

    Raises:
        OSError: the system has no process or pipe for it.
    """

    def __init__(self, answers: Callable[[], Iterable[bytes]]) -> None:
        from multiprocessing.connection import Pipe  # takes ten milliseconds

        self._receiving, sending = Pipe(duplex=False)
        self._parent = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads: see `receive`
            self._process = os.fork()
        if self._process == 0:
            try:
                ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
                for number in ENDING:
                    signal.signal(number, signal.SIG_DFL)
                for answer in answers():
                    sending.send_bytes(answer)
            finally:
                os._exit(0)
        sending.close()
        self._ending = weakref.finalize(self, _end, self._process, self._parent, self._receiving)

    def receive(self) -> bytes | None:
        """Return the next answer, as soon as it exists; None after the last, and in another fork.

        Raises:
            TimeoutError: the fork stands still.
        """
        if not self._ending.alive or os.getpid() != self._parent:
            return None
        before, left = 0.0, LOOKS
        while not self._receiving.poll(LOOK_SECONDS):
            now = time.clock_gettime(~self._process << 3 | 2)  # as `clock_getcpuclockid`; of all threads
            left = left - 1 if now == before and self._sleeps() else LOOKS
            before = now
            if not left:
                raise TimeoutError(f"process {self._process} did not run for {LOOKS * LOOK_SECONDS:.0f} s")
        try:
            return self._receiving.recv_bytes()
        except EOFError:
            return None

    def has_more(self) -> bool:
        """Return whether `receive` would return at once."""
        return not self._ending.alive or os.getpid() != self._parent or self._receiving.poll()

    def end(self) -> int:
        """End the fork; return its status as `os.waitpid` does, or 0 if it was ended before."""
        return self._ending() or 0

    def _sleeps(self) -> bool:
        """Return whether the fork waits for something other than a processor or a disk, and is not
        stopped.
        """
        return Path(f"/proc/{self._process}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def _end(process: int, parent: int, receiving: Connection) -> int:
    """End a fork of `parent`, if that is this process; return its exit status."""
    receiving.close()
    if os.getpid() != parent:
        return 0
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    try:
        return os.waitpid(process, 0)[1]
    except ChildProcessError:
        return 0


# ---- Parallel work: a fork computes on another core, so that commands are faster on two cores
#
#     with forking():                                # as commands do; otherwise work is only deferred
#         (later,) = beside(lambda: trace(64))       # a fork of this process begins
#         one = trace(1)
#         other = later()                            # the result of the work
#
# Results do not depend on whether a fork was used. A fork's result is taken only if the work returned
# silently and the result can be pickled. If it raised, printed, warned, stood still or was killed, this
# process repeats the work, and then raises, prints or warns. A fork ends with its last result, when its
# results are no longer referenced, and with this process.

T = TypeVar("T")

_forks: ContextVar[weakref.WeakSet[_Works[Any]] | None] = ContextVar("_forks", default=None)  # that run


@contextmanager
def forking() -> Iterator[None]:
    """Let `beside` fork this process in the block: on Linux with several cores, at most one fork per core.

    Use it only in processes that are pipefit's alone, because a fork has only one of its threads.
    """
    before = _forks.set(weakref.WeakSet() if sys.platform == "linux" else None)
    try:
        yield
    finally:
        _forks.reset(before)


def forks_left() -> int:
    """Return the number of further forks that have a core while this process waits for them; 0 outside of
    `forking`.
    """
    running = _forks.get()
    if running is None:
        return 0
    for works in tuple(running):
        works.collect()
    cores = len(os.sched_getaffinity(0))
    return max(0, cores - len(running)) if cores > 1 else 0


def beside(
    *works: Callable[[], T], forks: bool = True, check: Callable[[], object] | None = None
) -> tuple[Callable[[], T], ...]:
    """Start all `works`, one after the other, in another process.

    Returns functions that wait for their results.

    Without a core or process for them, or outside of `forking`, each runs in this process when its result is
    requested; so too with `forks` False, or if `check`, which the fork calls first, raises. `check` is for
    works that some processes cannot do, and that might misinterpret the obstacle as another failure.
    """
    if forks and forks_left():
        with suppress(OSError):  # no process or file available, as under ulimit or in a container
            shared = _Works(works, check)
            return tuple(cache(partial(shared.result, number)) for number in range(len(works)))
    return tuple(map(cache, works))


class _Works(Generic[T]):
    """Works that a fork does, and their results so far."""

    def __init__(self, works: Sequence[Callable[[], T]], check: Callable[[], object] | None) -> None:
        self._works, self._answers = works, list[bytes]()
        self._fork: Fork | None = Fork(partial(_silent_answers, works, check))
        if (running := _forks.get()) is not None:
            running.add(self)

    def result(self, number: int) -> T:
        """Return the result of a work; do it here if the fork has not done it silently."""
        while self._fork is not None and len(self._answers) <= number:
            self._receive(self._fork)
        if number >= len(self._answers):
            return self._works[number]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of other packages' classes as they are unpickled
            result: T = pickle.loads(self._answers[number])  # noqa: S301 - our own fork wrote it
        return result

    def collect(self) -> None:
        """Take the results that the fork has ready; a fork that has finished needs no core."""
        while self._fork is not None and self._fork.has_more():
            self._receive(self._fork)

    def _receive(self, fork: Fork) -> None:
        """Wait for the next answer; end the fork after the last."""
        answer = None
        with suppress(TimeoutError):
            answer = fork.receive()
        if answer is not None:
            self._answers.append(answer)
        if answer is None or len(self._answers) == len(self._works):
            fork.end()
            self._fork = None
            if (running := _forks.get()) is not None:
                running.discard(self)


def _silent_answers(
    works: Sequence[Callable[[], object]], check: Callable[[], object] | None
) -> Iterator[bytes]:
    """Yield the pickled results until a work prints or warns.

    The fork's streams are replaced, because another thread may have held their locks.
    """
    _forks.set(None)
    logging.disable()
    said = os.memfd_create("pipefit-said")
    for stream in (1, 2):
        os.dup2(said, stream)
    sys.stdout = sys.stderr = os.fdopen(said, "w", buffering=1, encoding="utf-8", closefd=False)
    if check is not None:
        check()
    for work in works:
        with warnings.catch_warnings(record=True) as warned:
            answer = pickle.dumps(work())
        if warned or os.fstat(said).st_size:
            return
        yield answer
