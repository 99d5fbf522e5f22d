"""Output of commands: saved files, and either JSON or readable text on stdout."""

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

from pipefit.cli.progress import cleared_away
from pipefit.errors import FileError, OutOfMemory, PipefitError, UsageError
from pipefit.tables import Block, write
from pipefit.texts import printable

if TYPE_CHECKING:
    from pipefit.schema.json_io import Document
    from pipefit.schema.plan import Plan

# ---- Documents on the command line, and errors that are the fault of a file


@contextmanager
def used(file: Path) -> Iterator[None]:
    """Convert usage errors in the block to errors of this file, which alone determines the work.

    Raises:
        FileError: instead of a UsageError; names the file.
    """
    try:
        yield
    except UsageError as error:
        raise FileError(f"{printable(file)} cannot be used: {error}") from error


@contextmanager
def used_together(alone: Callable[[Any], object], documents: Mapping[Path, Any]) -> Iterator[None]:
    """Convert usage errors of work on several documents to errors of the file at fault.

    A file is at fault if `alone` fails for its document; if none is, the documents do not fit together.

    Raises:
        FileError: instead of a UsageError; names the file at fault.
    """
    try:
        yield
    except UsageError:
        for file, document in documents.items():
            with used(file):
                alone(document)
        raise


def load_runnable(file: Path) -> Plan:
    """Load a plan whose stages, decisions and schedule can be carried out together.

    Raises:
        FileError: it is not a plan, or cannot be carried out; says why.
    """
    from pipefit.lowering import step_programs
    from pipefit.schema.json_io import load
    from pipefit.schema.plan import Plan

    plan = load(file, Plan)
    with used(file):
        step_programs(plan)
    return plan


# ---- Standard streams that lose no result silently, and do not cost one
#
# A stdin or stderr that the parent closed is replaced by the null device, here and in workers, so that no
# other file takes its place; a closed stdout refuses all output, as with the system's own programs. Stdout is
# line-buffered also under PYTHONUNBUFFERED, because Python's unbuffered writes treat a partial write on a
# full disk as complete. Text that stderr cannot take is lost, so that a full disk does not end a training for
# lack of a log.


class MessageStream(io.TextIOWrapper):
    """A stream for messages, which ignores errors of the system."""

    def write(self, text: str) -> int:
        """Write the text, or lose it; return its length."""
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        """Write buffered text, or lose it."""
        with suppress(OSError):
            super().flush()


def fill_streams() -> bool:
    """Set up the process's standard streams; streams that a caller has replaced stay.

    Return whether stdout can be written to: it is neither closed nor read-only.
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
        sys.stderr = _again(err, MessageStream)
    return _takes_words(sys.stdout)


def _takes_words(stream: TextIO) -> bool:
    """Return whether the process may write to a stream; True for a stream without a file."""
    try:
        os.write(stream.fileno(), b"")
    except OSError as error:
        return error.errno != errno.EBADF
    except (AttributeError, ValueError):
        pass
    return True


def _again(stream: TextIO, kind: type[io.TextIOWrapper]) -> io.TextIOWrapper:
    """Return a line-buffered stream of another kind to the same file."""
    buffer = os.fdopen(stream.fileno(), "wb", closefd=False)
    return kind(buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=True)


# ---- Results

_CHECKPOINT = re.compile(r"step-[0-9]{8,18}")  # name of a checkpoint's folder


def check_output(path: Path | None, *others: str | Path | None) -> None:
    """Check, before any work, that the result can be saved.

    `others` are other files and folders that the command uses.

    Raises:
        FileError: it cannot; says why.
        UsageError: it is one of the others, or an existing file in one, or would be among the files of a
            checkpoint.
    """
    from pipefit.schema.json_io import check_target

    if path is None:
        return
    check_target(path)
    target = Path(os.path.realpath(path))
    for other in map(os.path.realpath, (one for one in others if one is not None)):
        if other == str(target):
            raise UsageError(
                f"{path} is named twice and would be overwritten: name another file for the result"
            )
        if Path(other) in target.parents and target.exists():
            raise UsageError(
                f"{path} is a file of {other}, and would be overwritten: name another file for the result"
            )
    if _CHECKPOINT.fullmatch(target.parent.name) and (target.parent / "manifest.json").exists():
        raise UsageError(f"{path} would be inside a checkpoint: name another folder")


def on_stderr(sentence: str) -> None:
    """Print a sentence next to the result; it may contain words of a document."""
    print(printable(sentence), file=sys.stderr)


def deliver(
    document: Document,
    *,
    output: Path | None,
    as_json: bool,
    describe: Callable[[], Sequence[Block]] | None = None,
) -> None:
    """Print `document`, and save it if `output` is given.

    It is printed as JSON, or as `describe` formats it; default: as `show`.

    A plan has lines of at most 80 columns in a pipe too.
    """
    result = partial(plain_data, document) if as_json else None
    print_and_save(partial(_print, document, as_json, describe), _saved(document, output), found=result)
    if output is not None and not as_json:
        on_stderr(f"saved to {output}")


def plain_data(document: Document) -> dict[str, Any]:
    """Return a document as JSON data, for an error's `found`."""
    from pipefit.schema.json_io import dumps

    return {"result": json.loads(dumps(document))}


def told(blocks: Sequence[Block], built: str) -> list[Block]:
    """Insert the model's settings after the head of the blocks, if any."""
    return [*blocks[:1], built, *blocks[1:]] if built else [*blocks]


def print_and_save(
    print_it: Callable[[], None],
    save_it: Callable[[], None],
    *,
    found: Callable[[], Mapping[str, Any]] | None = None,
) -> None:
    """Print first, so that a full disk loses nothing, then save, even if the reader of a pipe has left.

    JSON is printed last, because stdout has one document: if saving fails, `found` is part of the error's
    JSON.
    """
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
    """Attach partial results to an error that ends the command in the block."""
    try:
        yield
    except PipefitError as error:
        error.found = found()
        raise


@contextmanager
def leaving_post_mortem(plan: Path, target: Path | None) -> Iterator[None]:
    """Save the post-mortem of a run that runs out of memory in the block.

    It is saved in `target` or next to its plan, and the error names the file.
    """
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
                error.args = (f"{error}. The post-mortem could not be saved: {failure}",)
            else:
                error.args = (
                    f"{error}. For its memory by layer, and plans that would fit, run pipefit report {path}",
                )
                error.found = {**error.found, "post_mortem": str(path)}
        raise


def _saved(document: Document, output: Path | None) -> Callable[[], None]:
    """Return a function that saves a document if `output` is given."""

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

    blocks = show(document) if describe is None else describe()
    if isinstance(document, Plan):
        write(blocks, width=80)
    else:
        write(blocks)
