"""Work over fake GPUs, apart from a process that may train on real ones.

The first fake GPU of a process becomes the one accelerator whose streams torch's autograd knows. From then on every
backward on a real GPU fails there, by an assertion of torch's engine (pytorch issue 161129), and torch has no way back.
So where this machine has GPUs, what follows CUDA's kernels is done in a fork of the process, which then ends:
a script may plan, certify and then train.

    trace = apart(target, lambda: run_dry(plan))

Work that a fork cannot do is done in this process: where it has run a backward before, which torch refuses in a fork,
where an answer cannot be pickled, or where work fails in a way that may be the fork's own. Who trains asks
`follows_fake_streams`, and refuses.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from pipefit.errors import PipefitError
from pipefit.fake.target import follows_fake_streams
from pipefit.profiles import Target
from pipefit.signals import ENDING

T = TypeVar("T")

_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
_Warned = list[tuple[Warning, type[Warning], str, int]]


def apart(target: Target, work: Callable[[], T]) -> T:
    """What `work` returns, raises or warns of. For CUDA, on Linux with GPUs, it is done in a fork if a fork can do it.

    A fork hands over what can be pickled; what `work` changes besides is lost with it.
    """
    ours = target == "cpu" or sys.platform != "linux" or follows_fake_streams() or not torch.cuda.is_available()
    told = None if ours else _told(work)
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
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads: they hold nothing of ours
        process = os.fork()
    if process == 0:
        try:
            os.close(reading)
            with open(writing, "wb") as file:
                file.write(_answer(work))
        finally:
            os._exit(0)
    os.close(writing)
    try:
        with open(reading, "rb") as file:
            answer = file.read()
    finally:
        os.kill(process, signal.SIGKILL)  # at its end already, unless this process is interrupted
        os.waitpid(process, 0)
    return pickle.loads(answer) if answer else None  # noqa: S301 - our own fork wrote it


def _answer(work: Callable[[], object]) -> bytes:
    """In the fork: the answer as a pickle that can be read; nothing where the work has to be done elsewhere."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    for number in ENDING:
        signal.signal(number, signal.SIG_DFL)
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
