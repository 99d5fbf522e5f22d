"""Tables as data, and as text: aligned columns for a pipe, rich ones for a terminal.

A terminal narrower than a table gets it without its spare columns, or in parts, each with the columns that name a row.
A report is a sequence of blocks, each a `Table` or a paragraph. Control characters are taken out of all of them here.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TextIO

from pipefit.texts import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

_NUMBER_LIKE = re.compile(r"[-+]?[0-9].*|-|")
_FIGURE = re.compile(r"(?<=[0-9]) (?=%|(?:[KMGT]?i?B|m?s|us|[kMGT]?FLOP)\b)")  # the space between a figure and its unit
_COUNT_LIKE = re.compile(r"[0-9]+(-[0-9]+)?|")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under column headings. Columns of numbers are set to the right.

    `spare` are headings of columns that the others nearly say, in the order in which a narrow terminal goes without.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    spare: tuple[str, ...] = ()

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which columns hold numbers only."""
        return tuple(
            bool(self.rows) and all(_NUMBER_LIKE.fullmatch(row[place]) for row in self.rows)
            for place in range(len(self.columns))
        )

    @property
    def keys(self) -> int:
        """How many of the first columns name a row: those that count, such as `3` or `3-5`, and the names beside them.

        As many names as tell all rows apart, or one where none does; the first column at least.
        """
        counting = [
            bool(self.rows) and all(_COUNT_LIKE.fullmatch(row[place]) for row in self.rows)
            for place in range(len(self.columns))
        ]
        first = next((place for place, counts in enumerate(counting) if not counts), 0)
        after = next((place for place in range(first, len(self.columns)) if self.numeric[place]), len(self.columns))
        names = range(first + 1, after + 1)
        apart = (count for count in names if len({row[:count] for row in self.rows}) == len(self.rows))
        return next(apart, names[0] if names else 1)

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
    from rich.text import Text

    console = Console(file=out, highlight=False)
    shown = [part for block in blocks for part in (_parts(block, console) if isinstance(block, Table) else [block])]
    for number, block in enumerate(shown):
        if number:
            console.print()
        if isinstance(block, Table) and block.title:
            console.print(Text(printable(block.title), style="italic"))
        if isinstance(block, str):
            console.print(wrapped(_plain_text(block), console.width), markup=False, soft_wrap=True)
        else:
            console.print(_rich_table(block, console.width))


def _plain_text(text: str) -> str:
    return "\n".join(printable(line) for line in text.splitlines())


def wrapped(text: str, width: int) -> str:
    """Lines of at most `width`, with figures beside their units; a longer word, such as a path, stays whole."""
    together = _FIGURE.sub("\N{NO-BREAK SPACE}", text)
    lines = (
        textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False) for line in together.splitlines()
    )
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


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
    """The table without as few spare columns as make it fit the terminal; else in parts, of which one has the title."""
    for left_out in range(len(table.spare) + 1):
        without = table.spare[:left_out]
        narrow = table.part([place for place, name in enumerate(table.columns) if name not in without])
        if _width(narrow, console) <= console.width:
            return [narrow]
    return _divided(narrow, console)


def _divided(table: Table, console: Console) -> list[Table]:
    """The table in parts that fit the terminal, if its names and one more column do."""
    keys = list(range(table.keys))
    parts = [table.part(keys)]
    taken = keys
    for place in range(len(keys), len(table.columns)):
        wider = table.part([*taken, place])
        if len(taken) > len(keys) and _width(wider, console) > console.width:
            taken, wider = keys, table.part([*keys, place])
            parts.append(wider)
        taken = [*taken, place]
        parts[-1] = wider
    return [parts[0], *(replace(part, title="") for part in parts[1:])]


def _width(table: Table, console: Console) -> int:
    """Columns of a terminal that the table takes, if no cell is folded but a long name."""
    endless = console.options.update(width=1 << 20)
    return console.measure(_rich_table(table, console.width), options=endless).maximum


def _rich_table(table: Table, width: int) -> RichTable:
    """The table for a terminal of this width, of which names take at most half."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for place, (name, right) in enumerate(zip(table.columns, table.numeric, strict=True)):
        most = width // 2 if place < table.keys and not right else None
        shown.add_column(Text(name), justify="right" if right else "left", overflow="fold", max_width=most)
    for row in table.rows:
        shown.add_row(*(Text(printable(cell)) for cell in row))
    return shown
