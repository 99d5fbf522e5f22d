"""Worker processes as forks of one process that has imported torch.

Importing torch and what its optimizers need takes seconds per process. Forks pay for it once together and
share the memory. Multiprocessing's fork server forks them; it starts with the first training and ends with
the program. It computes nothing, so none of torch's threads and no CUDA context exists when it forks.

A fork has the environment and the standard error of the start of the server. `Inherited` takes the present
ones along to a worker. Variables that C libraries read when they are loaded, such as OMP_NUM_THREADS, keep
their values from the start, as in the program itself. So the server starts with a tunable of glibc's malloc,
which forks keep: it requests huge pages, which shortens waits for page tables and avoids zeroing of memory
that is freed and allocated again.
"""

from __future__ import annotations

import errno
import multiprocessing as mp
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir
from typing import TYPE_CHECKING, Any

from pipefit.processes import addresses, adopt_orphans, met, room_for_threads

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

_LONGEST_PATH = 107 - len("/pymp-12345678/listener-12345678")  # Linux's limit for sockets
_ENDING_SECONDS, _PAUSE_SECONDS = 60, 0.05
_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"  # other C libraries do not read them
# Modules that the fork server imports; making an optimizer imports the second, and tracing a model the last
_IMPORTED = ["pipefit.runtime.launch.fork_server", "torch._dynamo.config", "torch.export._trace"]
_UNKNOWN = 255  # exit code that multiprocessing reports if the fork server is gone
_LEAST = 4  # processes and threads of a worker: itself, its parent watcher, two of gloo
_FILES, _FILES_EACH = 12, 4  # open files of this process for the first worker's start, and for each worker


def obstacle(error: OSError) -> str:
    """Return what keeps a process from starting, with advice."""
    try:
        os.getcwd()
    except OSError:
        return "the working directory has been removed; change to an existing one (os.chdir)"
    if error.errno in (errno.EROFS, errno.EACCES, errno.ENOENT, errno.ENOSPC):
        return (
            f"{error.strerror}; processes share semaphores in /dev/shm and sockets in the folder for "
            "temporary files: check that both exist, are writable and have free space (df /dev/shm "
            '"$TMPDIR")'
        )
    limit = (
        met(error)
        or "see ulimit -a for limits of open files and processes, free for memory, df for disk space"
    )
    return f"{error.strerror or error}; plan for fewer devices, or raise the limit: {limit}"


def check_room(workers: int) -> None:
    """Check that `workers` workers can probably be started, without starting any.

    At least the number of threads that the workers have as processes and threads is started here, because the
    system counts both equally. With a limited address space threads are not tried: they might not fit,
    although the workers would. As many files are opened as this process needs for the workers: without them,
    a start would fail halfway.

    Raises:
        OSError: the system refuses.
    """
    with ExitStack() as opened:
        for _ in range(_FILES + _FILES_EACH * workers):
            opened.enter_context(open(os.devnull, "rb", buffering=0))
    if addresses():
        return
    if not room_for_threads(_LEAST * workers):
        raise OSError(
            errno.EAGAIN, f"there is no capacity for their {_LEAST * workers} processes and threads"
        )


def forks() -> ForkServerContext:
    """Return the multiprocessing context in which workers start. A running fork server is used unchanged."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def start(process: BaseProcess) -> None:
    """Start a process of the context of `forks`.

    The fork server ends when a request fails halfway, for example without a free file descriptor, or when it
    is killed, for example without memory. While it ends it refuses requests; afterwards the next request
    starts another one.

    Raises:
        OSError: the system refuses.
    """
    _shorten_sockets()
    with _told({_TUNABLES: tunables(os.environ.get(_TUNABLES, ""))}):
        _start(process)


def _shorten_sockets() -> None:
    """Let multiprocessing make its folder below /tmp if the path of TMPDIR is too long for sockets."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) > _LONGEST_PATH:
        tempfile.tempdir = "/tmp"  # noqa: S108 - the folder's name is its own
    try:
        get_temp_dir()
    finally:
        tempfile.tempdir = usual


def tunables(given: str) -> str:
    """Return the given glibc tunables with a request for huge pages, unless they decide about it."""
    return given if _HUGE_PAGES in given else ":".join(filter(None, (given, f"{_HUGE_PAGES}=1")))


def _start(process: BaseProcess) -> None:
    lost = False
    for _ in range(round(_ENDING_SECONDS / _PAUSE_SECONDS)):
        try:
            process.start()
        except ConnectionRefusedError:
            time.sleep(_PAUSE_SECONDS)
        except (EOFError, ConnectionError) as error:  # it was there, and ended during the request
            if lost:
                what = (
                    "the process that forks workers ended twice, for example because memory or processes "
                    "ran out"
                )
                raise OSError(errno.EAGAIN, what) from error
            lost = True
        else:
            return
    process.start()


@contextmanager
def orphans_adopted() -> Iterator[None]:
    """Adopt processes whose fork server is killed in the context, so that this process can wait for them."""
    before = adopt_orphans(True)
    try:
        yield
    finally:
        adopt_orphans(before)


class Started:
    """A process that `start` has started in a context of `orphans_adopted`, with its exit code.

    The fork server reports the exit code. If the server is gone, multiprocessing considers the process ended
    with code 255, although it may still run; then the system is queried.
    """

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self._code: int | None = None

    def exit_code(self, seconds: float = 0.0) -> int | None:
        """Return the exit code, negative for a signal; None if the process still runs after `seconds`."""
        if self._code is None:
            self._process.join(seconds)
            code = self._process.exitcode
            self._code = self._of_orphan(seconds) if code == _UNKNOWN else code
        return self._code

    def kill(self) -> None:
        """Kill the process if it still runs."""
        if self.exit_code() is None:
            with suppress(ProcessLookupError):
                os.kill(self._number, signal.SIGKILL)

    @property
    def _number(self) -> int:
        number = self._process.pid
        assert number is not None
        return number

    def _of_orphan(self, seconds: float) -> int | None:
        """Return the exit code from the system.

        The process becomes a child of this one a moment after the server's end.
        """
        until = time.monotonic() + seconds
        while True:
            try:
                ended, status = os.waitpid(self._number, os.WNOHANG)
            except ChildProcessError:
                if not os.path.exists(f"/proc/{self._number}"):
                    return _UNKNOWN
            else:
                if ended:
                    return os.waitstatus_to_exitcode(status)
            if time.monotonic() >= until:
                return None
            time.sleep(_PAUSE_SECONDS)


@contextmanager
def _told(words: dict[str, str]) -> Iterator[None]:
    """Set environment variables in the context, for processes that start there."""
    before = {word: os.environ.get(word) for word in words}
    os.environ.update(words)
    try:
        yield
    finally:
        for word, value in before.items():
            if value is None:
                del os.environ[word]
            else:
                os.environ[word] = value


@dataclass(frozen=True, slots=True)
class Passed:
    """A file descriptor, which pickling as an argument passes to a process that starts."""

    number: int

    def __reduce__(self) -> tuple[Callable[..., Passed], tuple[Any, ...]]:
        from multiprocessing.reduction import DupFd  # not on Windows

        return _arrived, (DupFd(self.number),)


def _arrived(file: Any) -> Passed:
    return Passed(file.detach())


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """A process's environment and the descriptor of its standard error, if that is open."""

    environment: dict[str, str]
    stderr: Passed | None

    @classmethod
    def here(cls) -> Inherited:
        """Return environment and standard error of this process."""
        stderr = None
        with suppress(OSError):
            os.fstat(2)
            stderr = Passed(2)
        return cls(environment=dict(os.environ), stderr=stderr)

    def take_over(self) -> None:
        """Make this environment and standard error those of this process."""
        os.environ.clear()
        os.environ.update(self.environment)
        if self.stderr is not None:
            os.dup2(self.stderr.number, 2)
            os.close(self.stderr.number)
