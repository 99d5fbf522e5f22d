"""Tables as data, and as text: aligned columns for a pipe, rich ones for a terminal.

What is narrower than a table gets it without its spare columns, or in parts, each with the columns that name a row.
A report is a sequence of blocks, each a `Table` or a paragraph. Control characters are taken out of all of them here.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from importlib import import_module
from itertools import zip_longest
from typing import TYPE_CHECKING, TextIO

from pipefit.texts import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

NO_BREAK = "\N{NO-BREAK SPACE}"  # a space at which no line is broken
_NUMBER_LIKE = re.compile(r"[-+]?[0-9].*|-|")
_FIGURE = re.compile(r"(?<=[0-9]) (?=%|(?:[KMGT]?i?B|m?s|us|[kMGT]?FLOP)\b)")  # the space between a figure and its unit
_OPTION = re.compile(r"(--[a-z-]+) (?=[^\s-])")  # an option and its value
_HYPHENED = re.compile(r"--[a-z]+(-[a-z]+)*")
_WHOLE = r'<span style="white-space:nowrap">\g<0></span>'
_ENDLESS = 1 << 20  # characters, more than any line has
_COUNT_LIKE = re.compile(r"[0-9]+(-[0-9]+)?|")
_ALARMS = {"over": "over", "out of memory": "over", "tight": "tight"}  # what is wrong, by how a cell ends
_COLOURS = {"": "", "over": "bold red", "tight": "yellow"}
_METER = re.compile(r"(?=[#.]{5})(#*)(\.*)(.*)")  # a bar of characters, and words behind it


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


def plain(blocks: Iterable[Block], width: int = _ENDLESS) -> str:
    """The blocks as text, with an empty line between them; in lines of at most `width`, but for longer words."""
    return "\n\n".join(_plain(block, width) for block in blocks)


def write(blocks: Sequence[Block], stream: TextIO | None = None, width: int = _ENDLESS) -> None:
    """Write the blocks to `stream`, by default stdout: in colour and fitted to a terminal, or to `width` elsewhere."""
    out = sys.stdout if stream is None else stream
    if not out.isatty():
        out.write(plain(blocks, width) + "\n")
        return
    from rich.console import Console  # half the start-up time of a command that prints nothing
    from rich.text import Text

    console = Console(file=out, highlight=False)
    fitted = partial(_parts, width=console.width, measured=partial(_width, console=console))
    shown = [part for block in blocks for part in (fitted(block) if isinstance(block, Table) else [block])]
    for number, block in enumerate(shown):
        if number:
            console.print()
        if isinstance(block, Table) and block.title:
            console.print(Text(printable(block.title), style="italic"))
        if isinstance(block, str):
            console.print(wrapped(_plain_text(block), console.width), markup=False, soft_wrap=True)
        else:
            console.print(_rich_table(block, console.width))


def html(blocks: Iterable[Block]) -> str:
    """The blocks as HTML: every table, and a paragraph for each line of text."""
    return "".join(_html_table(block) if isinstance(block, Table) else _html_lines(block) for block in blocks)


class Shown:
    """What shows itself: as text of 80 columns where it is printed, and as tables in a notebook.

    The words are found where all documents have theirs, in `pipefit.report`, when they are asked for.
    """

    __slots__ = ()

    def __str__(self) -> str:
        """The words as text."""
        return plain(self._blocks(), 80)

    def _repr_html_(self) -> str:
        """The words and tables, for notebooks."""
        return html(self._blocks())

    def _blocks(self) -> list[Block]:
        found: list[Block] = import_module("pipefit.report.show").describe(self)  # stands above all documents
        return found


def _html_lines(words: str) -> str:
    """With figures beside their units however wide the page is, and options that are not broken at their hyphens."""
    lines = (escape(kept_together(printable(line))) for line in words.splitlines() if line.strip())
    return "".join(f"<p>{_HYPHENED.sub(_WHOLE, line)}</p>" for line in lines)


def _html_table(table: Table) -> str:
    kinds = [' class="number"' if numeric else "" for numeric in table.numeric]
    head = "".join(
        f'<th scope="col"{kind}>{escape(printable(column))}</th>'
        for column, kind in zip(table.columns, kinds, strict=True)
    )
    rows = ("".join(map(_html_cell, row, table.numeric)) for row in table.rows)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    caption = f"<caption>{escape(printable(table.title))}</caption>" if table.title else ""
    return f'<div class="wide"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _html_cell(cell: str, numeric: bool) -> str:
    """A cell of a row, of a class that says whether it is a figure, and one that is `over` or `tight`."""
    kinds = " ".join(filter(None, ("number" if numeric else "", _alarm(cell))))
    named = f' class="{kinds}"' if kinds else ""
    return f"<td{named}>{_html_words(printable(cell))}</td>"


def _html_words(cell: str) -> str:
    """The cell's words; a bar of characters is drawn, for eyes alone, since its figure stands beside it."""
    meter = _METER.fullmatch(cell)
    if meter is None:
        return escape(cell)
    full, empty, words = meter.groups()
    share = 100 * len(full) // (len(full) + len(empty))
    style = f"background:linear-gradient(90deg,currentcolor {share}%,transparent 0);border:1px solid;opacity:.55"
    return f'<i aria-hidden="true" style="display:inline-block;width:8em;height:.7em;{style}"></i>{escape(words)}'


def _plain_text(text: str) -> str:
    return "\n".join(printable(line) for line in text.splitlines())


def wrapped(text: str, width: int) -> str:
    """Lines of at most `width`, with figures beside units and options beside values; longer words stay whole.

    What an indented line goes on with is indented two more.
    """
    return "\n".join(_wrapped_line(line, width) for line in kept_together(text).splitlines()).replace(NO_BREAK, " ")


def _wrapped_line(line: str, width: int) -> str:
    indent = len(line) - len(line.lstrip(" "))
    further = " " * (indent + 2 if indent else 0)
    return textwrap.fill(line, width, subsequent_indent=further, break_long_words=False, break_on_hyphens=False)


def kept_together(text: str) -> str:
    """The text with no space to break at between figures and units, and between options and values."""
    return _OPTION.sub(rf"\1{NO_BREAK}", _FIGURE.sub(NO_BREAK, text))


def _plain(block: Block, width: int) -> str:
    """A block as text of this width."""
    if isinstance(block, str):
        return wrapped(_plain_text(block), width) if width < _ENDLESS else _plain_text(block)
    measured = partial(_plain_width, most=width // 2)
    return "\n\n".join(_plain_table(part, width // 2) for part in _parts(block, width, measured))


def _plain_table(table: Table, most: int) -> str:
    """The table as aligned text; names of more than `most` characters go on in the next line."""
    rows = [tuple(printable(cell) for cell in row) for row in (table.columns, *table.rows)]
    names = [place for place, right in enumerate(table.numeric[: table.keys]) if not right]
    lines = [line for row in rows for line in _folded(row, names, most)]
    widths = [max(len(line[place]) for line in lines) for place in range(len(table.columns))]
    text = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, table.numeric, strict=True)
        ).rstrip()
        for line in lines
    ]
    return "\n".join([printable(table.title), *text] if table.title else text)


def _folded(row: tuple[str, ...], names: Sequence[int], most: int) -> Iterator[tuple[str, ...]]:
    """The lines of a row whose names are broken after so many characters."""
    cells = [
        [cell[at : at + most] for at in range(0, len(cell), most)] or [""] if place in names else [cell]
        for place, cell in enumerate(row)
    ]
    yield from zip_longest(*cells, fillvalue="")


def _plain_width(table: Table, most: int) -> int:
    return max(map(len, _plain_table(table, most).splitlines()), default=0)


def _parts(table: Table, width: int, measured: Callable[[Table], int]) -> list[Table]:
    """The table without as few spare columns as make it fit the width; else in parts, of which one has the title."""
    for left_out in range(len(table.spare) + 1):
        without = table.spare[:left_out]
        narrow = table.part([place for place, name in enumerate(table.columns) if name not in without])
        if measured(narrow) <= width:
            return [narrow]
    return _divided(narrow, width, measured)


def _divided(table: Table, width: int, measured: Callable[[Table], int]) -> list[Table]:
    """The table in parts that fit the width, if its names and one more column do."""
    keys = list(range(table.keys))
    parts = [table.part(keys)]
    taken = keys
    for place in range(len(keys), len(table.columns)):
        wider = table.part([*taken, place])
        if len(taken) > len(keys) and measured(wider) > width:
            taken, wider = keys, table.part([*keys, place])
            parts.append(wider)
        taken = [*taken, place]
        parts[-1] = wider
    return [parts[0], *(replace(part, title="") for part in parts[1:])]


def _width(table: Table, console: Console) -> int:
    """Columns of a terminal that the table takes, if no cell is folded but a long name."""
    endless = console.options.update(width=_ENDLESS)
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
        shown.add_row(*(Text(printable(cell), style=_COLOURS[_alarm(cell)]) for cell in row))
    return shown


def _alarm(cell: str) -> str:
    """Whether a cell says that there is too little memory, or hardly enough: `over`, `tight` or nothing."""
    return next((alarm for word, alarm in _ALARMS.items() if f" {cell}".endswith(f" {word}")), "")
