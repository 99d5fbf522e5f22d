"""Where worker processes come from: each is a fork of one process that has imported torch.

Importing torch and what its optimizers need takes three seconds of processor time, and ending an interpreter that has
imported them takes one more. Processes that start from nothing would pay that once each. Forks pay it once together,
share the memory, and start in a tenth of a second. What forks them is multiprocessing's fork server, which starts
with the first training and ends with the program. It computes nothing, so none of torch's threads and no context of a
GPU exists when it forks.

A fork has the environment and the standard error of the moment at which the server started. `Inherited` takes the
present ones along to a worker. What C libraries read when they are loaded, such as OMP_NUM_THREADS, stays as it was
then, as it does in the program itself. So the server starts with a word to glibc's malloc, which forks keep: ask for
huge pages, which Linux gives to those who ask. Kernels then wait less for page tables, and memory that is freed and
taken again need not be zeroed: a training step of a GPT of 9 M parameters takes 8 % less of a core's time.
"""

from __future__ import annotations

import errno
import multiprocessing as mp
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.process import BaseProcess
from multiprocessing.spawn import get_executable
from multiprocessing.util import Finalize, get_temp_dir
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from pipefit.processes import addresses, adopt_orphans, met, room_for_threads

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

# ----------------------------------------------------------------------------------------------------
# The folder of multiprocessing's sockets, which is gone however the program ends.
#
# multiprocessing makes a folder `pymp-...` for the socket of the process that forks workers, and removes it
# as the program ends; a program that is killed cannot. So the folder lies in one of ours, and before that is
# made, a small process waits for the end of a pipe that only this one holds. The pipe ends when the program
# does, however that happens, and then the process removes the folder. It has a session of its own: signals to
# all of a terminal do not reach it.

_NAME = "pipefit-12345678"
_LONGEST_PATH = 107 - len(f"/{_NAME}/pymp-12345678/listener-12345678")  # Linux allows 107 bytes in the path of a socket
_WAITS_AND_REMOVES = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], True)"
_AFTER_MULTIPROCESSING = -101  # its own folder, in ours, goes at -100


def make_sockets_folder() -> None:
    """Have multiprocessing make its folder where it will be removed; if it has made one already, that stays its own.

    The folder is below TMPDIR, and below /tmp if the path of TMPDIR is too long for sockets.

    Raises:
        OSError: the system does not let us.
    """
    usual = tempfile.tempdir
    try:
        tempfile.tempdir = _removed_at_the_end_of(os.getpid())
        get_temp_dir()
    finally:
        tempfile.tempdir = usual


@cache
def _removed_at_the_end_of(process: int) -> str:
    """A new folder of this process, which is removed when it has ended."""
    usual = tempfile.gettempdir()
    below = "/tmp" if len(os.fsencode(usual)) > _LONGEST_PATH else usual  # noqa: S108 - the folder's name is its own
    folder = os.path.join(below, _NAME[:-8] + token_hex(4))
    _remove_when_we_end(folder)
    os.mkdir(folder, 0o700)
    Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=_AFTER_MULTIPROCESSING)
    return folder


def _remove_when_we_end(folder: str) -> None:
    """Start what waits and removes. Programs that this process starts do not hold the pipe; Python sees to that."""
    waits, _ = os.pipe()  # the other end stays open until this process has ended
    streams = [(os.POSIX_SPAWN_DUP2, waits, 0), *((os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_WRONLY, 0) for n in (1, 2))]
    python = os.fsdecode(get_executable())
    command = [python, "-I", "-S", "-c", _WAITS_AND_REMOVES, folder]
    try:
        os.posix_spawn(python, command, os.environ, file_actions=streams, setsid=True)
    finally:
        os.close(waits)


# ----------------------------------------------------------------------------------------------------

_ENDING_SECONDS, _PAUSE_SECONDS = 60, 0.05
_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"  # other C libraries do not read them
# What the fork server imports; making an optimizer imports the last
_IMPORTED = ["pipefit.runtime.launch.launching", "torch._dynamo.config"]
_UNKNOWN = 255  # what multiprocessing says of a process whose fork server is gone; or its exit code
_LEAST = 4  # processes and threads of a worker: itself, the one that watches its parent, and two of gloo


def obstacle(error: OSError) -> str:
    """What keeps a process from starting, and what to try."""
    try:
        os.getcwd()
    except OSError:
        return "the working directory has been removed; change to one that exists (os.chdir)"
    if error.errno in (errno.EROFS, errno.EACCES, errno.ENOENT, errno.ENOSPC):
        return (
            f"{error.strerror}; processes share semaphores in /dev/shm and sockets in the folder of temporary files: "
            'both must be there, writable and with room (df /dev/shm "$TMPDIR")'
        )
    limit = met(error) or "ulimit -a shows those of open files and processes; free, memory; df, free disk space"
    return f"{error.strerror or error}; plan for fewer devices, or raise the limit: {limit}"


def check_room(workers: int) -> None:
    """Check that so many workers can be started, as far as one can know without starting any.

    As many threads as they have processes and threads at least are started here, since the system counts both alike.
    A process whose address space is limited cannot have them, although its workers might.

    Raises:
        OSError: the system does not let us.
    """
    if addresses():
        return
    if not room_for_threads(_LEAST * workers):
        raise OSError(errno.EAGAIN, f"there is no room for their {_LEAST * workers} processes and threads")


def forks() -> ForkServerContext:
    """The context of multiprocessing in which workers start. If a fork server runs already, it is used as it is."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


def start(process: BaseProcess) -> None:
    """Start a process of the context.

    The fork server ends when a request fails halfway, as for want of a file descriptor, or when it is killed, as for
    want of memory. While it is ending it refuses requests; once it is gone, another one starts by itself.

    Raises:
        OSError: the system does not let us.
    """
    make_sockets_folder()
    with _told({_TUNABLES: tunables(os.environ.get(_TUNABLES, ""))}):
        _start(process)


def tunables(given: str) -> str:
    """What glibc is told: what it is told here, and to ask for huge pages, unless this says whether it shall."""
    return given if _HUGE_PAGES in given else ":".join(filter(None, (given, f"{_HUGE_PAGES}=1")))


def _start(process: BaseProcess) -> None:
    lost = False
    for _ in range(round(_ENDING_SECONDS / _PAUSE_SECONDS)):
        try:
            process.start()
        except ConnectionRefusedError:
            time.sleep(_PAUSE_SECONDS)
        except (EOFError, ConnectionError) as error:  # it was there, and ended with our request
            if lost:
                what = "the process that forks workers was ended twice, as by lack of memory or of processes"
                raise OSError(errno.EAGAIN, what) from error
            lost = True
        else:
            return
    process.start()


@contextmanager
def orphans_adopted() -> Iterator[None]:
    """Inside, processes whose fork server is killed become children of this one, which can wait for them."""
    before = adopt_orphans(True)
    try:
        yield
    finally:
        adopt_orphans(before)


class Started:
    """A process that `start` has started inside `orphans_adopted`, and how it ends.

    The fork server tells that, and nobody does where the fork server is gone: then multiprocessing takes the process
    for ended, with code 255, although it may still run.
    """

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self._code: int | None = None

    def exit_code(self, seconds: float = 0.0) -> int | None:
        """Its exit code, negative if a signal has ended it, None if it still runs after so many seconds."""
        if self._code is None:
            self._process.join(seconds)
            code = self._process.exitcode
            self._code = self._of_orphan(seconds) if code == _UNKNOWN else code
        return self._code

    def kill(self) -> None:
        """End it if it still runs."""
        if self.exit_code() is None:
            with suppress(ProcessLookupError):
                os.kill(self._number, signal.SIGKILL)

    @property
    def _number(self) -> int:
        number = self._process.pid
        assert number is not None
        return number

    def _of_orphan(self, seconds: float) -> int | None:
        """The exit code as the system tells it to a parent; it becomes ours a moment after the fork server is gone."""
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
    """Inside, processes start with these words in their environment too."""
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
    """A file descriptor. Pickled as an argument of a process that starts, it becomes one of that process."""

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
        """Those of this process."""
        stderr = None
        with suppress(OSError):
            os.fstat(2)
            stderr = Passed(2)
        return cls(environment=dict(os.environ), stderr=stderr)

    def take_over(self) -> None:
        """Make them those of this process."""
        os.environ.clear()
        os.environ.update(self.environment)
        if self.stderr is not None:
            os.dup2(self.stderr.number, 2)
            os.close(self.stderr.number)
