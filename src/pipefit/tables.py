"""Tables as data, and as text: aligned columns for a pipe, rich ones for a terminal.

A terminal gets a table that is wider than itself in parts, each with the columns that name a row. A report is a
sequence of blocks, each a `Table` or a paragraph. Control characters are taken out of all of them here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TextIO

from pipefit.texts import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

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

    @property
    def keys(self) -> int:
        """How many of the first columns name a row: up to the first that is no number, or else one."""
        return next((place + 1 for place, numeric in enumerate(self.numeric) if not numeric), 1)

    def part(self, places: Sequence[int]) -> Table:
        """The table of these columns alone."""
        rows = tuple(tuple(row[place] for place in places) for row in self.rows)
        return Table(tuple(self.columns[place] for place in places), rows, self.title)


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
        if isinstance(block, str):
            console.print(_plain_text(block), markup=False)
            continue
        for part in _parts(block, console):
            console.print(_rich_table(part, console.width), markup=False)


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


def _parts(table: Table, console: Console) -> list[Table]:
    """The table in parts that fit the terminal, if a name and one more column do; only the first has the title.

    A column without a heading draws what another one says, and is left out where there is no room beside that.
    """
    keys, endless = list(range(table.keys)), console.options.update(width=1 << 20)
    parts = [table.part(keys)]
    taken = keys
    for place in range(len(keys), len(table.columns)):
        wider = table.part([*taken, place])
        width = console.measure(_rich_table(wider, console.width), options=endless).maximum
        if len(taken) > len(keys) and width > console.width:
            if not table.columns[place]:
                continue
            taken, wider = keys, table.part([*keys, place])
            parts.append(wider)
        taken = [*taken, place]
        parts[-1] = wider
    return [parts[0], *(replace(part, title="") for part in parts[1:])]


def _rich_table(table: Table, width: int) -> RichTable:
    """The table for a terminal of this width, of which names take at most half."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    title = Text(printable(table.title)) if table.title else None
    shown = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for place, (name, right) in enumerate(zip(table.columns, table.numeric, strict=True)):
        most = width // 2 if place == table.keys - 1 else None
        shown.add_column(Text(name), justify="right" if right else "left", overflow="fold", max_width=most)
    for row in table.rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    return shown
