"""Tables as data, and as text: aligned columns for a pipe, rich ones for a terminal.

A report is a sequence of blocks, each a `Table` or a paragraph. Control characters are taken out of all of them here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

from pipefit.texts import printable

_NUMBER_LIKE = re.compile(r"[-+]?[0-9].*|-|")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under column headings. Columns of numbers are set to the right."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which columns hold numbers only."""
        return tuple(
            bool(self.rows) and all(_NUMBER_LIKE.fullmatch(row[place]) for row in self.rows)
            for place in range(len(self.columns))
        )


Block = Table | str


def plain(blocks: Iterable[Block]) -> str:
    """The blocks as text, with an empty line between them."""
    return "\n\n".join(_plain_table(block) if isinstance(block, Table) else _plain_text(block) for block in blocks)


def write(blocks: Sequence[Block], stream: TextIO | None = None) -> None:
    """Write the blocks to `stream`, by default stdout; if it is a terminal, in colour and fitted to its width."""
    out = sys.stdout if stream is None else stream
    if not out.isatty():
        out.write(plain(blocks) + "\n")
        return
    from rich.console import Console  # half the start-up time of a command that prints nothing

    console = Console(file=out, highlight=False)
    for number, block in enumerate(blocks):
        if number:
            console.print()
        console.print(_rich_table(block) if isinstance(block, Table) else _plain_text(block), markup=False)


def _plain_text(text: str) -> str:
    return "\n".join(printable(line) for line in text.splitlines())


def _plain_table(table: Table) -> str:
    rows = [tuple(printable(cell) for cell in row) for row in (table.columns, *table.rows)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(table.columns))]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, table.numeric, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([printable(table.title), *lines] if table.title else lines)


def _rich_table(table: Table) -> object:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    title = Text(printable(table.title)) if table.title else None
    shown = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name, right in zip(table.columns, table.numeric, strict=True):
        shown.add_column(Text(name), justify="right" if right else "left")
    for row in table.rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    return shown
