"""What a person sees of a document in a Python session or a notebook."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from pipefit.schedule import lower
from pipefit.simulator import simulate
from pipefit.tables import Table, html
from pipelines import make_plan, random_profile

PLAN = make_plan(random_profile(40), (20, 20), microbatches=8)


@pytest.mark.parametrize(
    "document", [PLAN, PLAN.profile, simulate(PLAN), lower(PLAN)], ids=lambda one: type(one).__name__
)
def test_a_document_is_a_line(document: object) -> None:
    """Its kind and what it is about, in one line that fits a terminal twice over."""
    text = repr(document)
    assert text.startswith(f"<{type(document).__name__}: ") and text.endswith(">")
    assert "\n" not in text and len(text) < 160


class Cells(HTMLParser):
    """The cells of tables, and every tag that is open."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.texts = list[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_notebook_shows_a_plan_as_tables() -> None:
    """Every cell of its tables is there, and every tag that opens closes."""
    reader = Cells()
    reader.feed(PLAN._repr_html_())
    assert reader.open == []
    cells = [
        cell for block in PLAN.explanation if isinstance(block, Table) for row in block.rows for cell in row if cell
    ]
    assert set(cells) <= set(reader.texts)


def test_names_from_outside_are_no_html() -> None:
    """A layer or a title that looks like a tag is text."""
    shown = html([Table(("<b>",), (("<script>",),), title="<i>"), "a <u> line"])
    assert not [tag for tag in ("<b>", "<script>", "<i>", "<u>") if tag in shown]
