"""Tables as text: aligned, and harmless to a terminal."""

from __future__ import annotations

import io
import re

import pytest

from pipefit.tables import Table, html, plain, write

TABLE = Table(("name", "bytes"), (("a", "1"), ("long", "1000")), title="sizes")


def test_columns_are_aligned_numbers_to_the_right() -> None:
    """Text is set to the left, numbers to the right, headings like their column."""
    assert plain([TABLE, "done"]) == "sizes\nname  bytes\na         1\nlong   1000\n\ndone"


def test_a_table_without_rows_is_its_headings() -> None:
    """An empty table is not an error."""
    assert plain([Table(("a", "b"), ())]) == "a  b"


def test_control_characters_are_taken_out() -> None:
    """A layer whose name would rewrite the screen is shown without its escapes."""
    assert "\x1b" not in plain([Table(("\x1b[2J",), (("\x1b[2J",),), title="\x1b"), "\x1b"])


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_the_same_words() -> None:
    """Colour and lines differ; cells do not, even if they look like rich's markup."""
    stream = Terminal()
    write([Table(("name",), (("[bold]layer[/bold]",),)), "[red]text[/red]"], stream)
    assert "[bold]layer[/bold]" in stream.getvalue()
    assert "[red]text[/red]" in stream.getvalue()


def test_what_is_over_is_red_and_what_is_tight_yellow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal colours cells by their last word; a pipe, or a terminal without colours, shows only the
    word.
    """
    shown = Table(
        ("full",), (("110.0 % over",), ("96.0 % tight",), ("80.0 %",), ("turnover",), ("out of memory",))
    )
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    write([shown], stream)
    codes = {
        words.strip(): code
        for code, words in re.findall(r"\x1b\[([0-9;]+)m([^\x1b]*)\x1b", stream.getvalue())
    }
    assert {words: codes.get(words) for (words,) in shown.rows} == {
        "110.0 % over": "1;31", "96.0 % tight": "33", "80.0 %": None, "turnover": None, "out of memory": "1;31",
    }  # fmt: skip
    assert "\x1b" not in plain([shown])
    monkeypatch.setenv("NO_COLOR", "1")
    write([shown], stream := Terminal())
    assert "31m" not in stream.getvalue() and "over" in stream.getvalue()


def test_a_cell_that_is_over_is_told_to_a_style_sheet() -> None:
    """The cell has a class in addition to that of figures."""
    made = html([Table(("full", "at"), (("110.0 % over", "over"), ("96.0 % tight", "1F2")))])
    assert (
        '<td class="number over">110.0 % over</td>' in made
        and '<td class="number tight">96.0 % tight</td>' in made
    )
    assert "<td>1F2</td>" in made


WIDE = Table(
    ("layer", "name", *(f"column {place}" for place in range(12))),
    tuple((str(row), f"layer{row}", *(f"{row}.{place} KiB" for place in range(12))) for row in range(3)),
    title="wide",
)


def on_80_columns(monkeypatch: pytest.MonkeyPatch, *blocks: Table | str) -> list[str]:
    """Return the lines that a terminal of 80 columns shows, without its colours."""
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    write(blocks, stream)
    return re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue()).splitlines()


def test_a_table_wider_than_the_terminal_is_shown_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cell is cut or broken, no line is longer than the terminal, and every part names its rows."""
    lines = on_80_columns(monkeypatch, WIDE)
    assert max(map(len, lines)) <= 80
    for row in WIDE.rows:
        for cell in row[2:]:
            (line,) = [line for line in lines if f" {cell} " in f" {line} "]
            assert f" {row[1]} " in line
    assert sum("wide" in line for line in lines) == 1
    assert sum("layer0" in line for line in lines) > 1


def test_a_long_name_is_broken_and_leaves_room_for_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name longer than the terminal is wrapped over several lines, next to an unbroken figure."""
    name = "".join(chr(ord("a") + place % 26) for place in range(200))
    lines = on_80_columns(monkeypatch, Table(("name", "bytes"), ((name, "1000.00 KiB"),)))
    assert max(map(len, lines)) <= 80
    assert any("1000.00 KiB" in line for line in lines)
    assert name in "".join(line.replace("1000.00 KiB", "").strip() for line in lines)


def test_a_table_that_fits_the_terminal_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow table is shown once, with all columns in one part."""
    lines = on_80_columns(monkeypatch, TABLE)
    assert sum("long" in line and "1000" in line for line in lines) == 1
    assert sum("name" in line for line in lines) == 1


def test_spare_columns_give_way_before_a_table_is_parted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fewest spare columns are dropped, in the given order, until the table fits; a wider terminal shows
    them.
    """
    rows = [("a", "7", "1" * room, "#" * 20) for room in (45, 46, 73)]
    tables = [Table(("name", "count", "figure", ""), (row,), spare=("", "count")) for row in rows]
    shown = [on_80_columns(monkeypatch, table) for table in tables]
    assert [lines[0].split() for lines in shown] == [
        ["name", "count", "figure"], ["name", "count", "figure"], ["name", "figure"],
    ]  # fmt: skip
    assert [lines[-1].split() for lines in shown] == [
        list(rows[0]),
        list(rows[1][:3]),
        [rows[2][0], rows[2][2]],
    ]
    assert "count" in plain([tables[2]])


def test_a_line_is_not_broken_between_a_figure_and_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any line break of a sentence, `0.5 %` and `3.20 GiB` stay on one line; all words are kept."""
    for room in range(60, 80):
        words = f"{'x' * room} 0.5 % above, 3.20 GiB free, in 14 ms"
        lines = on_80_columns(monkeypatch, words)
        assert max(map(len, lines)) <= 80
        assert " ".join(lines) == words
        assert all(figure in "\n".join(lines) for figure in ("0.5 %", "3.20 GiB", "14 ms"))


def test_an_indented_line_goes_on_indented_two_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra indent separates an entry of a list from the next entry; a sentence continues at the
    margin.
    """
    words = "one\n  two three four\n  five six\nseven eight nine"
    shown = "one\n  two three\n    four\n  five six\nseven eight\nnine\n"
    stream = io.StringIO()
    write([words], stream, width=12)
    assert stream.getvalue() == shown
    monkeypatch.setenv("COLUMNS", "12")
    terminal = Terminal()
    write([words], terminal)
    assert terminal.getvalue() == shown


def test_a_word_among_figures_is_not_the_name_of_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of figures is shown in whole cells whatever its last column contains: the row counter names the
    rows.
    """
    cells = tuple(f"{place}{place}.00 MiB" for place in range(1, 10))
    columns = ("device", *(f"column {place}" for place in range(1, 10)), "verdict")
    lines = on_80_columns(monkeypatch, Table(columns, (("0", *cells, "out of memory"), ("1", *cells, "0"))))
    assert max(map(len, lines)) <= 80
    for cell in (*cells, "out of memory"):
        assert any(f" {cell} " in f" {line} " for line in lines)
    assert all(
        line.split()[0] in ("0", "1", "device")
        for line in lines
        if line and "\N{BOX DRAWINGS LIGHT HORIZONTAL}" not in line
    )


def test_rows_of_the_same_name_are_told_apart_in_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """If several rows have the same first name, the next columns are repeated with it."""
    rows = tuple(
        ("layer0", operation, *(f"{place}000.00 KiB" for place in range(7)))
        for operation in ("Addmm", "Gelu")
    )
    lines = on_80_columns(monkeypatch, Table(("layer", "operation", *"abcdefg"), rows))
    assert sum("Addmm" in line for line in lines) == sum("Gelu" in line for line in lines) == 2
    assert all("Addmm" in line or "Gelu" in line for line in lines if "layer0" in line)


def test_a_bar_of_characters_is_drawn_in_html() -> None:
    """The bar has the given length, followed by its words; a cell of dots or with a number sign remains
    text.
    """
    made = html(
        [Table(("full", ""), (("75.0 %", "###############....."), ("120.0 % over", "#" * 20 + " and more")))]
    )
    assert "currentcolor 75%" in made and "currentcolor 100%" in made and "</i> and more</td>" in made
    assert "##" not in made and made.count('aria-hidden="true"') == 2
    assert "<td>...</td>" in html([Table(("a",), (("...",),))]) and "<td>#1</td>" in html(
        [Table(("a",), (("#1",),))]
    )
