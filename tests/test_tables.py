"""Tables as text: aligned, and harmless to a terminal."""

from __future__ import annotations

import io

from pipefit.tables import Table, plain, write

TABLE = Table(("name", "bytes"), (("a", "1"), ("long", "1000")), title="sizes")


def test_columns_are_aligned_numbers_to_the_right() -> None:
    """Text is set to the left, numbers to the right, headings like their column."""
    assert plain([TABLE, "done"]) == "sizes\nname  bytes\na         1\nlong   1000\n\ndone"


def test_a_table_without_rows_is_its_headings() -> None:
    """Nothing to show is not an error."""
    assert plain([Table(("a", "b"), ())]) == "a  b"


def test_control_characters_are_taken_out() -> None:
    """A layer whose name would rewrite the screen is shown without its escapes."""
    assert "\x1b" not in plain([Table(("\x1b[2J",), (("\x1b[2J",),), title="\x1b"), "\x1b"])


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_the_same_words() -> None:
    """Colour and lines differ; cells do not, even if they look like rich's markup."""
    stream = Terminal()
    write([Table(("name",), (("[bold]layer[/bold]",),)), "[red]text[/red]"], stream)
    assert "[bold]layer[/bold]" in stream.getvalue()
    assert "[red]text[/red]" in stream.getvalue()
