"""All deliberate errors of pipefit, and the exit code of each.

    PipefitError            1   base class: catch this one
    ├── UsageError          2   the request is wrong: an option, a size, a name
    ├── InfeasibleError     3   no plan found that fits; says which device lacks how much, and what would help
    ├── OutOfMemory         4   a run exceeded a device's memory; says where, and what held the bytes
    ├── WorkerFailed        5   a worker died, hung or raised; names the one that failed first
    │   ├── PeerLost            error of the other workers: a message does not arrive
    │   └── LimitMet            a worker met a limit of the system on its process
    ├── FileError           6   a document is missing, truncated, of another version, or for another model
    │   ├── DamagedCheckpoint   a checkpoint cannot be read as it was saved; an older one may be intact
    │   ├── UnreadableCheckpoint    the checkpoint may be intact: no permission to read it, or another version
    │   ├── SaveFailed          a checkpoint could not be written
    │   └── NotSaved            the training has ended, but its last checkpoint could not be written
    └── LossNotFinite       7   a loss became infinite or nan, and training was to stop then

A message says what happened, where, by how much, and what to try. The command line catches `PipefitError`
once, prints the message to stderr and exits with `exit_code`; with `--json` it prints both to stdout too,
with `found`. A `PipefitWarning`, given by `warnings.warn`, does not stop the run; the command line prints it
to stderr too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any


class PipefitError(Exception):
    """Base class of all deliberate errors.

    `found` has partial results as plain data, such as the trace of a dry run that shows that a plan does not
    fit.
    """

    exit_code = 1
    found: Mapping[str, Any] = MappingProxyType({})


class UsageError(PipefitError, ValueError):
    """A wrong request: an unknown name, an impossible size, options that exclude each other."""

    exit_code = 2


class InfeasibleError(PipefitError):
    """No plan was found that fits: the device, the lacking bytes, and the cheapest changes that would fit."""

    exit_code = 3


class OutOfMemory(PipefitError):
    """A run exceeded a device's memory: the device, the action, and the contents of its memory.

    `post_mortem` has the state at that moment, if it was at an action of a plan.
    """

    exit_code = 4
    post_mortem: Any = None  # a `schema.post_mortem.PostMortem`


class WorkerFailed(PipefitError):
    """A worker died, hung or raised: the one that failed first, and its action at that time."""

    exit_code = 5


class PeerLost(WorkerFailed):
    """A message of another worker does not arrive: this worker fails because the other one did."""


class LimitMet(WorkerFailed):
    """A worker met a limit of the system on its process: files, threads, addresses."""


class FileError(PipefitError):
    """A document cannot be used: missing, truncated, of another version, invalid, or for another model."""

    exit_code = 6


class DamagedCheckpoint(FileError):
    """A checkpoint, or one of its files, is missing or damaged, or its content contradicts its name."""


class UnreadableCheckpoint(FileError):
    """A checkpoint cannot be read by this process; it may be intact."""


class SaveFailed(FileError):
    """The checkpoint after `step` batches could not be written."""

    def __init__(self, sentence: str, step: int | None = None) -> None:
        super().__init__(sentence)
        self.step = step


class NotSaved(FileError):
    """The last checkpoint of a training could not be written, after all steps were done.

    `losses` and `trace` are the training's results.
    """

    def __init__(self, sentence: str, trace: Any) -> None:
        super().__init__(sentence)
        self.trace, self.losses = trace, list[float]()


class LossNotFinite(PipefitError):
    """A loss became infinite or nan, and training was to stop then."""

    exit_code = 7


class PipefitWarning(UserWarning):
    """A fact that does not stop the run, but that the user should know, such as a figure with a
    limitation.
    """


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error, and those that led to it: torch's engine wraps errors of layers in its own."""
    while error is not None:
        yield error
        error = error.__cause__


_LONGEST = 300  # characters of a foreign exception that our messages repeat


def _text(error: BaseException) -> str:
    """Return the text of any exception; empty if it has none, or cannot be printed."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a `__str__` that fails must not hide the exception that it belongs to
        return ""


def first_line(error: BaseException) -> str:
    """Return the first line of any exception's text; its type's name if the text is empty or cannot be
    printed.
    """
    lines = _text(error).strip().splitlines()
    return lines[0][:_LONGEST] if lines else type(error).__name__


def all_lines(error: BaseException) -> str:
    """Return an exception's whole text in one line, because NCCL's last line says what failed.

    Torch's general remarks about CUDA errors and C++ stack frames are removed.
    """
    said = re.split(r"CUDA kernel errors might |Exception raised from |frame #0", _text(error))[0]
    return " ".join(said.split())[: 2 * _LONGEST] or type(error).__name__


_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|Failed to CUDA (host )?[cm]alloc"  # the driver, the host, NCCL
    r"|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_\w*ALLOC\w*_FAILED|CUFFT_ALLOC_FAILED",
    re.IGNORECASE,
)


def no_memory(error: BaseException) -> bool:
    """Return whether an error's type and text say that memory ran out."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(_text(error)))
    )


def in_one_line(error: BaseException) -> str:
    """Return any exception's type and the first line of its text."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"
