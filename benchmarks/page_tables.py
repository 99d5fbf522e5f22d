"""Tables of benchmarks in a page of the docs, made from their JSON. Not a benchmark itself.

Every table has a title, and its place in the page is between two comments that have it: `<!-- TITLE -->` and
`<!-- end of TITLE -->`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "compaction.md"


def put(found: dict[str, str], page: Path = PAGE) -> None:
    """Put tables into a page, each at the place of its title."""
    page.write_text(with_tables(page.read_text(encoding="utf-8"), found), encoding="utf-8")


def with_tables(page: str, found: dict[str, str]) -> str:
    """A page with every table at the place of its title.

    Raises:
        ValueError: a table has no place.
    """
    for title, text in found.items():
        begin, end = f"<!-- {title} -->", f"<!-- end of {title} -->"
        head, _, rest = page.partition(begin)
        _, there, tail = rest.partition(end)
        if not there:
            raise ValueError(f"the page has no place for a table: write {begin} and {end} into it")
        page = f"{head}{begin}\n\n{text}\n\n{end}{tail}"
    return page


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
