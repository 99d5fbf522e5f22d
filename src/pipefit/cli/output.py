"""What a command leaves behind: a file on success, and either JSON or readable text on stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipefit.files import Document
    from pipefit.tables import Block


def check_output(path: Path | None) -> None:
    """Before any work: can the result be saved?

    Raises:
        FileError: it cannot; says why.
    """
    from pipefit.files import check_target

    if path is not None:
        check_target(path)


def deliver(
    document: Document, *, output: Path | None, as_json: bool, describe: Callable[[], Sequence[Block]] | None = None
) -> None:
    """Saves `document` if asked to, then prints it: as JSON, or as `describe` has it (by default as `show` would).

    A plan, which people read most of all, has lines of at most 80 columns in a pipe too.
    """
    from pipefit.files import dumps, save
    from pipefit.plans import Plan

    if output is not None:
        save(document, output)
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
    if output is not None:
        print(f"saved to {output}", file=sys.stderr)
