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
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from pipefit.runtime.sockets_folder import make_sockets_folder

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext

_ENDING_SECONDS, _PAUSE_SECONDS = 60, 0.05
_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"  # other C libraries do not read them
# What the fork server imports; making an optimizer imports the last
_IMPORTED = ["pipefit.runtime.worker", "torch._dynamo.config"]


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
    return (
        f"{error.strerror or error}; plan for fewer devices, or raise the limit (ulimit -a shows those of open files "
        "and processes; free, memory; df, free disk space)"
    )


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
                raise ChildProcessError(
                    "the process that forks workers was ended twice, as by lack of memory"
                ) from error
            lost = True
        else:
            return
    process.start()


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
