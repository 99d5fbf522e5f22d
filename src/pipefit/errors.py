"""Everything pipefit raises on purpose, and the exit code each one becomes.

    PipefitError            1   base class: catch this one
    ├── UsageError          2   the question itself is wrong: an option, a size, a name
    ├── InfeasibleError     3   no plan fits; says which device, by how much, and what would help
    ├── OutOfMemory         4   a run passed a device's cap; says where, at which action, what held the bytes
    ├── WorkerFailed        5   a worker died, hung or raised; names the one that failed first
    │   └── PeerLost            what the others report then: a message that does not come
    ├── FileError           6   a document is missing, truncated, of another version, or for another model
    │   ├── DamagedCheckpoint   a checkpoint cannot be read as it was saved; an older one may be whole
    │   ├── UnreadableCheckpoint    it may be whole: the system lets nobody read it, or it is of another version
    │   ├── SaveFailed          a checkpoint could not be written
    │   └── NotSaved            the training is done, and its last checkpoint could not be written
    └── LossNotFinite       7   a loss became infinite or nan, and training was to stop then

A message says what, where, by how much, and what to try. The command line catches `PipefitError` once, prints the
message to stderr and exits with `exit_code`; with `--json` it prints both to stdout too, with `found`. What stops
nothing but should be known is a `PipefitWarning`, given by `warnings.warn`; the command line prints it to stderr too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class PipefitError(Exception):
    """Base class of every deliberate failure.

    `found` is what is known all the same, as plain data, such as the trace of a dry run that shows that a plan does not
    fit.
    """

    exit_code = 1
    found: Mapping[str, Any] = MappingProxyType({})


class UsageError(PipefitError, ValueError):
    """The question is wrong: an unknown name, a size that cannot be, options that exclude each other."""

    exit_code = 2


class InfeasibleError(PipefitError):
    """No plan fits the cluster: which device, how many bytes short, and the cheapest changes that would fit."""

    exit_code = 3


class OutOfMemory(PipefitError):
    """A run passed a device's cap: where, at which action, and what held the bytes.

    `post_mortem` says what was there at that moment, where it was at an action of a plan.
    """

    exit_code = 4
    post_mortem: Any = None  # a `schema.post_mortem.PostMortem`


class WorkerFailed(PipefitError):
    """A worker died, hung or raised: the one that failed first, and what it was doing."""

    exit_code = 5


class PeerLost(WorkerFailed):
    """A message of another worker does not come: this worker fails because that one did."""


class FileError(PipefitError):
    """A document cannot be used: missing, truncated, of another version, invalid, or for another model."""

    exit_code = 6


class DamagedCheckpoint(FileError):
    """A checkpoint, or one of its files, is missing, damaged, or not what its name says."""


class UnreadableCheckpoint(FileError):
    """A checkpoint cannot be read by this process, which says nothing of whether it is damaged."""


class SaveFailed(FileError):
    """The checkpoint after `step` batches could not be written."""

    def __init__(self, sentence: str, step: int | None = None) -> None:
        super().__init__(sentence)
        self.step = step


class NotSaved(FileError):
    """The last checkpoint of a training could not be written, and all of its steps were done already.

    `losses` and `trace` are what the training would have returned.
    """

    def __init__(self, sentence: str, trace: Any) -> None:
        super().__init__(sentence)
        self.trace, self.losses = trace, list[float]()


class LossNotFinite(PipefitError):
    """A loss became infinite or nan, and training was to stop then."""

    exit_code = 7


class PipefitWarning(UserWarning):
    """What stops nothing and should be known: where a figure is not what it seems to be."""


_LONGEST = 300  # characters of a foreign exception that a message of ours repeats


def _text(error: BaseException) -> str:
    """The text of any exception; empty if it has none, or cannot be printed."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - a `__str__` that fails must not hide the exception that it belongs to
        return ""


def first_line(error: BaseException) -> str:
    """The first line of any exception's text; its type's name if it has none, or cannot be printed."""
    lines = _text(error).strip().splitlines()
    return lines[0][:_LONGEST] if lines else type(error).__name__


def all_lines(error: BaseException) -> str:
    """All that any exception's text says, in one line, as NCCL's says in its last one what has failed; without what
    torch adds to each of CUDA, and the calls in C++ that it may tell behind it.
    """
    said = re.split(r"CUDA kernel errors might |Exception raised from |frame #0", _text(error))[0]
    return " ".join(said.split())[: 2 * _LONGEST] or type(error).__name__


_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|Failed to CUDA (host )?[cm]alloc"  # the driver, the host, NCCL
    r"|CU(BLAS|DNN|SOLVER|SPARSE)_STATUS_\w*ALLOC\w*_FAILED|CUFFT_ALLOC_FAILED",
    re.IGNORECASE,
)


def no_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, as far as its type and words tell."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(_text(error))))


def in_one_line(error: BaseException) -> str:
    """Any exception's type and the first line of its text."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"
