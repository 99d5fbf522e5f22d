"""Work over fake GPUs, isolated from a process that may train on real ones.

The first fake GPU of a process becomes the only accelerator whose streams torch's autograd knows. From then
on every backward on a real GPU fails in this process, by an assertion of torch's engine (pytorch issue
161129), and torch cannot undo this. So on a machine with GPUs, work that follows CUDA's kernels runs in a
fork of the process, which then ends: a script may plan, certify and then train.

    trace = apart(target, lambda: run_dry(plan))

Work that a fork cannot do runs in this process: if the process has GPUs and has already run a backward, so
that torch refuses backwards in forks, if no process can be started, if an answer cannot be pickled, or if the
work fails in a way that the fork may have caused. Training checks `follows_fake_streams`, and
refuses.
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
from pipefit.fake_cuda.target import follows_fake_streams, run_a_backward
from pipefit.processes import Fork
from pipefit.schema.profile import Target

T = TypeVar("T")

_ALONE = "in a separate process, like pipefit plan, fit, certify and profile"
_Warned = list[tuple[Warning, type[Warning], str, int]]


def apart(target: Target, work: Callable[[], T]) -> T:
    """Run `work` and return its result, with errors and warnings; for CUDA with GPUs, in a fork if possible.

    A fork returns only what can be pickled; other effects of `work` are lost.

    Raises:
        WorkerFailed: the fork was killed, or hangs.
    """
    ours = (
        target == "cpu" or sys.platform != "linux" or follows_fake_streams() or not torch.cuda.is_available()
    )
    told = None
    if not ours:
        with suppress(OSError):  # no process can be started
            told = _told(work)
    if told is None:
        return work()
    result, error, warned = told
    for warning, kind, file, line in warned:
        warnings.warn_explicit(warning, kind, file, line)
    if error is not None:
        raise error
    return result


def _told(work: Callable[[], T]) -> tuple[T, PipefitError | None, _Warned] | None:
    """Return a fork's answer or error, and its warnings; None if it could not do the work."""
    _flush()  # otherwise the fork would write the output again
    fork = Fork(lambda: [_answer(work)])
    try:
        answer = fork.receive()
    except TimeoutError as error:
        raise WorkerFailed(
            f"simulation of GPUs runs in a fork, and {error}, probably because another thread held a lock "
            f"at the fork: run it before other threads start, or {_ALONE}"
        ) from None
    finally:
        status = fork.end()
    if answer is None and os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        raise WorkerFailed(
            f"simulation of GPUs runs in a fork, which was killed by {name}, usually because memory ran "
            f"out: free some memory first, or run it {_ALONE}"
        )
    return pickle.loads(answer) if answer else None  # noqa: S301 - our own fork wrote it


def _answer(work: Callable[[], object]) -> bytes:
    """Do the work in the fork; return the pickled answer, or b"" if this process must do the work."""
    torch.set_num_threads(1)  # a fork does not have the other kernel threads
    result, error = None, None
    try:
        run_a_backward()
        with warnings.catch_warnings(record=True) as warned:
            try:
                result = work()
            except PipefitError as raised:
                if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                    return b""  # the fork may be unable to use tensors on a GPU
                error = raised
        said = [(one.message, one.category, one.filename, one.lineno) for one in warned]
        made = pickle.dumps((result, error, said))
        pickle.loads(made)  # noqa: S301 - just made; some errors cannot be
    except Exception:  # noqa: BLE001 - the parent does the work again, and raises it there
        return b""
    _flush()
    return made


def _flush() -> None:
    """Flush stdout and stderr."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # None if closed before Python started
            stream.flush()
