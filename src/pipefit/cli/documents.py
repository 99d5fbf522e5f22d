"""The documents that a command line names: what cannot be done with one, whatever is asked, is a fault of its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipefit.errors import FileError, UsageError
from pipefit.texts import printable

if TYPE_CHECKING:
    from pipefit.plans import Plan


@contextmanager
def used(file: Path) -> Iterator[None]:
    """Inside, only this file says what is done: what is wrong with the question is wrong with the file.

    Raises:
        FileError: naming it, instead of a UsageError.
    """
    try:
        yield
    except UsageError as error:
        raise FileError(f"{printable(str(file))} cannot be used: {error}") from error


@contextmanager
def used_together(alone: Callable[[Any], object], documents: Mapping[Path, Any]) -> Iterator[None]:
    """Inside, something is done with several documents, by their files. If it fails, `alone` is done with each: where
    that fails too, its file is at fault, and where none does, the question is, which names files that do not go
    together.

    Raises:
        FileError: naming the file at fault, instead of a UsageError.
    """
    try:
        yield
    except UsageError:
        for file, document in documents.items():
            with used(file):
                alone(document)
        raise


def load_runnable(file: Path) -> Plan:
    """The plan in a file, when its stages, its decisions and its schedule can be carried out together.

    Raises:
        FileError: it is no plan, or cannot be carried out; says why.
    """
    from pipefit.files import load
    from pipefit.plans import Plan
    from pipefit.schedule import step_programs

    plan = load(file, Plan)
    with used(file):
        step_programs(plan)
    return plan
