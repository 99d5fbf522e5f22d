"""What a command leaves behind: a file on success, and either JSON or readable text on stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pipefit.errors import UsageError

if TYPE_CHECKING:
    from pipefit.files import Document
    from pipefit.tables import Block


def check_output(path: Path | None, *others: str | Path | None) -> None:
    """Before any work: can the result be saved? `others` are files that the command reads, or writes besides.

    Raises:
        FileError: it cannot; says why.
        UsageError: it is one of the others.
    """
    from pipefit.files import check_target

    if path is None:
        return
    check_target(path)
    for other in others:
        if other is not None and os.path.realpath(other) == os.path.realpath(path):
            raise UsageError(f"{path} is named twice, and would be overwritten: name another file for the result")


def deliver(
    document: Document, *, output: Path | None, as_json: bool, describe: Callable[[], Sequence[Block]] | None = None
) -> None:
    """Prints `document` as JSON, or as `describe` has it (by default as `show` would), and saves it if asked to.

    A plan, which people read most of all, has lines of at most 80 columns in a pipe too.
    """
    print_and_save(partial(_print, document, as_json, describe), document, output, quiet=as_json)


def told(blocks: Sequence[Block], built: str) -> list[Block]:
    """The blocks with what the model was built with below their head, if that is to be told."""
    return [*blocks[:1], built, *blocks[1:]] if built else [*blocks]


def print_and_save(print_it: Callable[[], None], document: Document, output: Path | None, *, quiet: bool) -> None:
    """Prints, so that a full disk loses nothing, then saves `document`, although the reader of a pipe may have left.

    Says where it is, unless `quiet`.
    """
    from pipefit.cli.stopping import cleared_away
    from pipefit.files import save

    try:
        print_it()
    finally:
        if output is not None:
            with cleared_away():
                save(document, output)
    if output is not None and not quiet:
        print(f"saved to {output}", file=sys.stderr)


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
