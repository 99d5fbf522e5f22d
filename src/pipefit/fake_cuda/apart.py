"""Work over fake GPUs, apart from a process that may train on real ones.

The first fake GPU of a process becomes the one accelerator whose streams torch's autograd knows. From then on every
backward on a real GPU fails there, by an assertion of torch's engine (pytorch issue 161129), and torch has no way back.
So where this machine has GPUs, what follows CUDA's kernels is done in a fork of the process, which then ends:
a script may plan, certify and then train.

    trace = apart(target, lambda: run_dry(plan))

Work that a fork cannot do is done in this process: where it has run a backward before, which torch refuses in a fork,
where no process is to be had, where an answer cannot be pickled, or where work fails in a way that may be the fork's
own. Who trains asks `follows_fake_streams`, and refuses.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from pipefit.errors import PipefitError, WorkerFailed
from pipefit.fake_cuda.target import follows_fake_streams
from pipefit.processes import Fork
from pipefit.schema.profile import Target

T = TypeVar("T")

_CHUNK_BYTES = 1 << 20
_ALONE = "in a process of its own, as pipefit plan, fit, certify and profile do"
_Warned = list[tuple[Warning, type[Warning], str, int]]


def apart(target: Target, work: Callable[[], T]) -> T:
    """What `work` returns, raises or warns of. For CUDA, on Linux with GPUs, it is done in a fork if a fork can do it.

    A fork hands over what can be pickled; what `work` changes besides is lost with it.

    Raises:
        WorkerFailed: the fork was killed, or stands still.
    """
    ours = target == "cpu" or sys.platform != "linux" or follows_fake_streams() or not torch.cuda.is_available()
    told = None
    if not ours:
        with suppress(OSError):  # no process is to be had
            told = _told(work)
    if told is None:
        return work()
    found, error, warned = told
    for warning, kind, file, line in warned:
        warnings.warn_explicit(warning, kind, file, line)
    if error is not None:
        raise error
    return found


def run_a_backward() -> None:
    """Torch refuses it in the fork of a process that has run one. There a profile would say that a layer fails."""
    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.backward(torch.ones((), requires_grad=True))


def _told(work: Callable[[], T]) -> tuple[T, PipefitError | None, _Warned] | None:
    """What a fork tells: the answer, or the error, and the warnings. None where it could not do the work."""
    _flush()  # else the fork would write it as well
    fork = Fork(lambda writing: _write(writing, _answer(work)))
    try:
        answer = b"".join(iter(lambda: fork.read(_CHUNK_BYTES), b""))
    except TimeoutError as error:
        raise WorkerFailed(
            f"work over fake GPUs is done in a fork, and {error}, as where another thread held a lock at the fork: do "
            f"it before other threads start, or {_ALONE}"
        ) from None
    finally:
        status = fork.end()
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        raise WorkerFailed(
            f"work over fake GPUs is done in a fork, which was killed by {name}, as where memory runs out: free some "
            f"before, or do it {_ALONE}"
        )
    return pickle.loads(answer) if answer else None  # noqa: S301 - our own fork wrote it


def _write(writing: int, answer: bytes) -> None:
    with open(writing, "wb", closefd=False) as file:  # it closes as the process ends
        file.write(answer)


def _answer(work: Callable[[], object]) -> bytes:
    """In the fork: the answer as a pickle that can be read; nothing where the work has to be done elsewhere."""
    torch.set_num_threads(1)  # the other threads of kernels have stayed behind
    found, error = None, None
    try:
        run_a_backward()
        with warnings.catch_warnings(record=True) as warned:
            try:
                found = work()
            except PipefitError as raised:
                if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                    return b""  # it may be the fork that cannot use what is on a GPU
                error = raised
        said = [(one.message, one.category, one.filename, one.lineno) for one in warned]
        made = pickle.dumps((found, error, said))
        pickle.loads(made)  # noqa: S301 - just made; some errors cannot be
    except Exception:  # noqa: BLE001 - whatever it is, it is raised again where the work is done
        return b""
    _flush()
    return made


def _flush() -> None:
    """Write what has been printed."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed before Python began
            stream.flush()
