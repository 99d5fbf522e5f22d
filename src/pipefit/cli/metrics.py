"""The file of `pipefit train --metrics`: a line of JSON for each step, there as soon as the step ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from math import isfinite
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from pipefit.errors import FileError
from pipefit.readable import content
from pipefit.texts import printable

if TYPE_CHECKING:
    from pipefit.runtime.callbacks import StepReport

    Note = Callable[[StepReport, Mapping[str, float | None]], None]

_LARGEST_BYTES = 1 << 30  # of a file whose lines are kept


@contextmanager
def lines_of_metrics(path: Path | None, first: int) -> Iterator[Note]:
    """A function to call with the report of each step as it ends, and figures made of it.

    Its line is in the file at once, whatever happens later.

    Seconds are those since the step before ended; the first step's include the start of the workers. Training that goes
    on at step `first` keeps the lines of the steps before it, and makes those of later ones anew. So does a training
    that is started again.

    Raises:
        FileError: the file cannot be written, as on a full disk.
    """
    if path is None:
        yield lambda report, figures: None
        return
    last, before = perf_counter(), _lines_before(path, first)
    begins = dict[int, int]()  # where the line of each step begins
    with _opened(path) as file:

        def write(text: bytes, step: int) -> None:
            try:
                file.write(text)
            except OSError as error:
                raise FileError(f"{path} cannot be written: {error.strerror}; step {step} was the last") from error

        def note(report: StepReport, figures: Mapping[str, float | None]) -> None:
            nonlocal last
            now, step = perf_counter(), report.step
            again = [done for done in begins if done >= step]  # which have been trained before
            if again:
                file.seek(min(begins[done] for done in again))
                file.truncate()
            for done in again:
                del begins[done]
            begins[step] = file.tell()
            told = {"step": step, "loss": in_json(report.loss), "seconds": now - last}
            write(f"{json.dumps({**told, **figures, 'peak_bytes': report.peak_bytes})}\n".encode(), step)
            last = now

        for step, line in before:
            begins[step] = file.tell()
            write(line, first - 1)
        yield note


def _opened(path: Path) -> FileIO:
    """The file, empty, and written without a buffer.

    Raises:
        FileError: the system does not let us.
    """
    try:
        return path.open("wb", buffering=0)
    except OSError as error:
        raise FileError(f"{printable(str(path))} cannot be written: {error.strerror}; choose another file") from None


def in_json(loss: float) -> float | str:
    """A loss as JSON has it: one that is not finite has no number there."""
    return loss if isfinite(loss) else str(loss)


def _lines_before(path: Path, first: int) -> list[tuple[int, bytes]]:
    """The steps before `first` of which a file of metrics has lines, and these."""
    if not first or not path.is_file():
        return []
    found = list[tuple[int, bytes]]()
    for line in content(path, printable(str(path)), _LARGEST_BYTES, "files of metrics have").splitlines(keepends=True):
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            step = json.loads(line)["step"]
            found += [(step, line)] if step < first else []
    return found
