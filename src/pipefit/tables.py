"""Tables as data and as text: aligned columns for a pipe, rich tables for a terminal, HTML for a page.

In a narrow output, a table loses its spare columns, or is split into parts that repeat the columns that name
a row. A report is a sequence of blocks, each a `Table` or a paragraph. Control characters are removed from
all of them.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from itertools import zip_longest
from typing import TYPE_CHECKING, TextIO

from pipefit.texts import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

NO_BREAK = "\N{NO-BREAK SPACE}"  # a space without a line break
_NUMBER_LIKE = re.compile(r"[-+]?[0-9].*|-|")
_FIGURE = re.compile(
    r"(?<=[0-9]) (?=%|(?:[KMGT]?i?B|m?s|us|[kMGT]?FLOP)\b)"
)  # the space between a figure and its unit
_OPTION = re.compile(r"(--[a-z-]+) (?=[^\s-])")  # an option and its value
_HYPHENED = re.compile(r"--[a-z]+(-[a-z]+)*")
_WHOLE = r'<span style="white-space:nowrap">\g<0></span>'
_ENDLESS = 1 << 20  # characters, more than any line has
_COUNT_LIKE = re.compile(r"[0-9]+(-[0-9]+)?|")
_ALARMS = {
    "over": "over",
    "out of memory": "over",
    "tight": "tight",
}  # the kind of problem, by the end of a cell
_COLOURS = {"": "", "over": "bold red", "tight": "yellow"}
_METER = re.compile(r"(?=[#.]{5})(#*)(\.*)(.*)")  # a bar of characters, followed by words


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under column headings. Columns of numbers are right-aligned.

    `spare` are headings of nearly redundant columns, in the order in which a narrow output drops them.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    spare: tuple[str, ...] = ()

    @property
    def numeric(self) -> tuple[bool, ...]:
        """For each column, whether it holds only numbers."""
        return tuple(
            bool(self.rows) and all(_NUMBER_LIKE.fullmatch(row[place]) for row in self.rows)
            for place in range(len(self.columns))
        )

    @property
    def keys(self) -> int:
        """The number of leading columns that name a row: counters such as `3` or `3-5`, then names.

        It includes enough name columns to distinguish all rows, or one if none do; at least the first column.
        """
        counting = [
            bool(self.rows) and all(_COUNT_LIKE.fullmatch(row[place]) for row in self.rows)
            for place in range(len(self.columns))
        ]
        first = next((place for place, counts in enumerate(counting) if not counts), 0)
        after = next(
            (place for place in range(first, len(self.columns)) if self.numeric[place]), len(self.columns)
        )
        names = range(first + 1, after + 1)
        apart = (count for count in names if len({row[:count] for row in self.rows}) == len(self.rows))
        return next(apart, names[0] if names else 1)

    def part(self, places: Sequence[int]) -> Table:
        """Return the table of these columns only."""
        rows = tuple(tuple(row[place] for place in places) for row in self.rows)
        return Table(tuple(self.columns[place] for place in places), rows, self.title)


Block = Table | str


def plain(blocks: Iterable[Block], width: int = _ENDLESS) -> str:
    """Format the blocks as text, separated by empty lines, in lines of at most `width` except for longer
    words.
    """
    return "\n\n".join(_plain(block, width) for block in blocks)


def write(blocks: Sequence[Block], stream: TextIO | None = None, width: int = _ENDLESS) -> None:
    """Write the blocks to `stream`, default stdout: in colour and fitted to a terminal, or to `width`
    elsewhere.
    """
    out = sys.stdout if stream is None else stream
    if not out.isatty():
        out.write(plain(blocks, width) + "\n")
        return
    from rich.console import Console  # takes half of the start-up time of a command that prints nothing
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
    """Format the blocks as HTML: tables, and a paragraph for each line of text."""
    return "".join(_html_table(block) if isinstance(block, Table) else _html_lines(block) for block in blocks)


def _html_lines(words: str) -> str:
    """Format paragraphs that do not break between figures and units, nor at the hyphens of options."""
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
    return (
        f'<div class="wide"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _html_cell(cell: str, numeric: bool) -> str:
    """Format a cell with classes for figures, and for `over` or `tight`."""
    kinds = " ".join(filter(None, ("number" if numeric else "", _alarm(cell))))
    named = f' class="{kinds}"' if kinds else ""
    return f"<td{named}>{_html_words(printable(cell))}</td>"


def _html_words(cell: str) -> str:
    """Escape the cell's words.

    A bar of characters becomes a graphic hidden from screen readers, which read its figure.
    """
    meter = _METER.fullmatch(cell)
    if meter is None:
        return escape(cell)
    full, empty, words = meter.groups()
    share = 100 * len(full) // (len(full) + len(empty))
    style = (
        f"background:linear-gradient(90deg,currentcolor {share}%,transparent 0);border:1px solid;opacity:.55"
    )
    style = f"display:inline-block;width:8em;height:.7em;{style}"
    return f'<i aria-hidden="true" style="{style}"></i>{escape(words)}'


def _plain_text(text: str) -> str:
    return "\n".join(printable(line) for line in text.splitlines())


def wrapped(text: str, width: int) -> str:
    """Wrap text to lines of at most `width`, without breaks between figures and units or options and values.

    Longer words stay whole. Continuations of an indented line are indented by two more.
    """
    return "\n".join(_wrapped_line(line, width) for line in kept_together(text).splitlines()).replace(
        NO_BREAK, " "
    )


def _wrapped_line(line: str, width: int) -> str:
    indent = len(line) - len(line.lstrip(" "))
    further = " " * (indent + 2 if indent else 0)
    return textwrap.fill(
        line, width, subsequent_indent=further, break_long_words=False, break_on_hyphens=False
    )


def kept_together(text: str) -> str:
    """Replace spaces between figures and units, and between options and values, by non-breaking ones."""
    return _OPTION.sub(rf"\1{NO_BREAK}", _FIGURE.sub(NO_BREAK, text))


def _plain(block: Block, width: int) -> str:
    """Format a block as text of this width."""
    if isinstance(block, str):
        return wrapped(_plain_text(block), width) if width < _ENDLESS else _plain_text(block)
    measured = partial(_plain_width, most=width // 2)
    return "\n\n".join(_plain_table(part, width // 2) for part in _parts(block, width, measured))


def _plain_table(table: Table, most: int) -> str:
    """Format the table as aligned text; names longer than `most` characters continue on the next line."""
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
    """Yield the lines of a row whose names are broken after `most` characters."""
    cells = [
        [cell[at : at + most] for at in range(0, len(cell), most)] or [""] if place in names else [cell]
        for place, cell in enumerate(row)
    ]
    yield from zip_longest(*cells, fillvalue="")


def _plain_width(table: Table, most: int) -> int:
    return max(map(len, _plain_table(table, most).splitlines()), default=0)


def _parts(table: Table, width: int, measured: Callable[[Table], int]) -> list[Table]:
    """Return the table without as few spare columns as make it fit the width.

    If that does not suffice, returns parts; the first has the title.
    """
    for left_out in range(len(table.spare) + 1):
        without = table.spare[:left_out]
        narrow = table.part([place for place, name in enumerate(table.columns) if name not in without])
        if measured(narrow) <= width:
            return [narrow]
    return _divided(narrow, width, measured)


def _divided(table: Table, width: int, measured: Callable[[Table], int]) -> list[Table]:
    """Return the table in parts that fit the width, if its names and one more column do."""
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
    """Return the terminal columns that the table takes if only long names are folded."""
    endless = console.options.update(width=_ENDLESS)
    return console.measure(_rich_table(table, console.width), options=endless).maximum


def _rich_table(table: Table, width: int) -> RichTable:
    """Return the table for a terminal of this width, with names at most half as wide."""
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
    """Return whether a cell means too little memory or hardly enough: `over`, `tight` or an empty text."""
    return next((alarm for word, alarm in _ALARMS.items() if f" {cell}".endswith(f" {word}")), "")
