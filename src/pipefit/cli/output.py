"""What a command leaves behind: a file on success, and either JSON or readable text on stdout."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pipefit.errors import FileError, PipefitError, UsageError
from pipefit.texts import printable

if TYPE_CHECKING:
    from pipefit.schema.json_io import Document
    from pipefit.schema.plan import Plan
    from pipefit.tables import Block

# ----------------------------------------------------------------------------------------------------
# The documents that a command line names: what cannot be done with one, whatever is asked, is a fault of its
# file.


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
    from pipefit.lowering import step_programs
    from pipefit.schema.json_io import load
    from pipefit.schema.plan import Plan

    plan = load(file, Plan)
    with used(file):
        step_programs(plan)
    return plan


# ----------------------------------------------------------------------------------------------------
# The standard streams of a command, so that none of them loses a result in silence, or costs one.
#
# Stdin and stderr that our parent closed lead nowhere, here and in workers, and no other file takes their
# place; a closed stdout refuses every word, as it does with the system's own programs. Stdout has a buffer
# under PYTHONUNBUFFERED too, which ends with a line: without it Python takes a write of which a full disk has
# taken a part for a whole one. What stderr cannot take is lost, as on a full disk: days of training do not
# end for want of a log.


class Told(io.TextIOWrapper):
    """A stream of words for people, which raises nothing where the system does not take them."""

    def write(self, text: str) -> int:
        """Write the text, or lose it; its length."""
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Write what waits, or lose it."""
        with suppress(OSError):
            super().flush()


def fill_streams() -> bool:
    """Make the process's own streams such; others that a caller has put in their place stay.

    Returns whether stdout can be written to: it is neither closed nor open for reading only.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            way = os.O_RDONLY if name == "stdout" else os.O_RDWR
            stream = os.fdopen(os.open(os.devnull, way), mode, encoding="utf-8")
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    if (out := sys.__stdout__) is not None and sys.stdout is out and isinstance(out.buffer, io.RawIOBase):
        sys.stdout = _again(out, io.TextIOWrapper)
    if (err := sys.__stderr__) is not None and sys.stderr is err:
        sys.stderr = _again(err, Told)
    return _takes_words(sys.stdout)


def _takes_words(stream: TextIO) -> bool:
    """Whether the system lets this process write to a stream; one that is no file takes what it likes."""
    try:
        os.write(stream.fileno(), b"")
    except OSError as error:
        return error.errno != errno.EBADF
    except (AttributeError, ValueError):
        pass
    return True


def _again(stream: TextIO, kind: type[io.TextIOWrapper]) -> io.TextIOWrapper:
    """A stream of another kind to the same file, with a buffer that ends with a line."""
    buffer = os.fdopen(stream.fileno(), "wb", closefd=False)
    return kind(buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=True)


# ----------------------------------------------------------------------------------------------------

_CHECKPOINT = re.compile(r"step-[0-9]{8,18}")  # the name of the folder of one


def check_output(path: Path | None, *others: str | Path | None) -> None:
    """Before any work: can the result be saved? `others` are files that the command reads, or writes besides, and
    folders of such.

    Raises:
        FileError: it cannot; says why.
        UsageError: it is one of the others, or there already in one, or would be among the files of a checkpoint.
    """
    from pipefit.schema.json_io import check_target

    if path is None:
        return
    check_target(path)
    target = Path(os.path.realpath(path))
    for other in map(os.path.realpath, (one for one in others if one is not None)):
        if other == str(target):
            raise UsageError(f"{path} is named twice, and would be overwritten: name another file for the result")
        if Path(other) in target.parents and target.exists():
            raise UsageError(f"{path} is a file of {other}, and would be overwritten: name another file for the result")
    if _CHECKPOINT.fullmatch(target.parent.name) and (target.parent / "manifest.json").exists():
        raise UsageError(f"{path} would be in a checkpoint, which has files of its own: name another folder")


def on_stderr(sentence: str) -> None:
    """Print a sentence beside the result; its words may be those of a document."""
    print(printable(sentence), file=sys.stderr)


def deliver(
    document: Document, *, output: Path | None, as_json: bool, describe: Callable[[], Sequence[Block]] | None = None
) -> None:
    """Prints `document` as JSON, or as `describe` has it (by default as `show` would), and saves it if asked to.

    A plan, which people read most of all, has lines of at most 80 columns in a pipe too.
    """
    found = partial(plain_data, document) if as_json else None
    print_and_save(partial(_print, document, as_json, describe), _saved(document, output), found=found)
    if output is not None and not as_json:
        on_stderr(f"saved to {output}")


def plain_data(document: Document) -> dict[str, Any]:
    """A document as JSON has it, beside an error."""
    from pipefit.schema.json_io import dumps

    return {"result": json.loads(dumps(document))}


def told(blocks: Sequence[Block], built: str) -> list[Block]:
    """The blocks with what the model was built with below their head, if that is to be told."""
    return [*blocks[:1], built, *blocks[1:]] if built else [*blocks]


def print_and_save(
    print_it: Callable[[], None], save_it: Callable[[], None], *, found: Callable[[], Mapping[str, Any]] | None = None
) -> None:
    """Prints, so that a full disk loses nothing, then saves, although the reader of a pipe may have left.

    JSON is printed last, for stdout has one document: where saving fails, `found` is in that of the error.
    """
    from pipefit.cli.stopping import cleared_away

    if found is None:
        try:
            print_it()
        finally:
            with cleared_away():
                save_it()
        return
    with with_found(found), cleared_away():
        save_it()
    print_it()


@contextmanager
def with_found(found: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
    """Inside, an error that ends the command brings along what is known all the same."""
    try:
        yield
    except PipefitError as error:
        error.found = found()
        raise


@contextmanager
def leaving_post_mortem(plan: Path, target: Path | None) -> Iterator[None]:
    """Inside, a run that runs out of memory leaves what was there, in `target` or beside its plan, and says so."""
    from pipefit.cli.stopping import cleared_away
    from pipefit.errors import OutOfMemory
    from pipefit.schema.json_io import save

    try:
        yield
    except OutOfMemory as error:
        if error.post_mortem is not None:
            path = plan.with_suffix(".out-of-memory.json") if target is None else target
            try:
                with cleared_away():
                    save(error.post_mortem, path)
            except PipefitError as failure:
                error.args = (f"{error}. What held it could not be saved: {failure}",)
            else:
                error.args = (f"{error}. Which layers held it, and what would fit: pipefit report {path}",)
                error.found = {**error.found, "post_mortem": str(path)}
        raise


def _saved(document: Document, output: Path | None) -> Callable[[], None]:
    """Saves a document where that is asked for."""

    def save_it() -> None:
        from pipefit.schema.json_io import save

        if output is not None:
            save(document, output)

    return save_it


def _print(document: Document, as_json: bool, describe: Callable[[], Sequence[Block]] | None) -> None:
    from pipefit.schema.json_io import dumps
    from pipefit.schema.plan import Plan

    if as_json:
        sys.stdout.write(dumps(document))
        return
    from pipefit.report.show import describe as show
    from pipefit.tables import write

    blocks = show(document) if describe is None else describe()
    if isinstance(document, Plan):
        write(blocks, width=80)
    else:
        write(blocks)
