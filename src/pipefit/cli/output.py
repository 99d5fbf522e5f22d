"""What a command leaves behind: a file on success, and either JSON or readable text on stdout."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipefit.errors import PipefitError, UsageError
from pipefit.texts import printable

if TYPE_CHECKING:
    from pipefit.files import Document
    from pipefit.tables import Block


_CHECKPOINT = re.compile(r"step-[0-9]{8,18}")  # the name of the folder of one


def check_output(path: Path | None, *others: str | Path | None) -> None:
    """Before any work: can the result be saved? `others` are files that the command reads, or writes besides, and
    folders of such.

    Raises:
        FileError: it cannot; says why.
        UsageError: it is one of the others, or there already in one, or would be among the files of a checkpoint.
    """
    from pipefit.files import check_target

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
    from pipefit.files import dumps

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
    from pipefit.files import save

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
        from pipefit.files import save

        if output is not None:
            save(document, output)

    return save_it


def _print(document: Document, as_json: bool, describe: Callable[[], Sequence[Block]] | None) -> None:
    from pipefit.files import dumps
    from pipefit.plans import Plan

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
