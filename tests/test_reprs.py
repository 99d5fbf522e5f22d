"""Display of documents in a Python session or a notebook."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest

from pipefit.errors import UsageError
from pipefit.lowering import lower
from pipefit.report import show
from pipefit.report.difference import difference_of_plans
from pipefit.report.show import describe
from pipefit.report.traces import compare
from pipefit.schema.fit import Attempt, Fit
from pipefit.schema.post_mortem import PostMortem
from pipefit.schema.program import Program
from pipefit.simulator import simulate
from pipefit.tables import Table, html, plain
from support.pipelines import make_plan, random_profile

PLAN = make_plan(random_profile(40), (20, 20), microbatches=8)
OTHER = make_plan(random_profile(40), (10, 30), microbatches=8)
TRACE = simulate(PLAN)
BEST = Attempt(value=40, plan=PLAN, certified_bytes=TRACE.peak_bytes)
FIT = Fit(grown="layers", sense="largest", best=BEST, beyond=None, tried=(BEST,), refused={})
SMALL = make_plan(random_profile(4), (2, 2))
DIED = PostMortem(
    plan=SMALL, trace=simulate(SMALL), device=0, moment=simulate(SMALL).devices[0].memory[-1], asked_bytes=0,
    sentence="no room",
)  # fmt: skip
DOCUMENTS = [
    PLAN, PLAN.profile, PLAN.measurement, PLAN.cluster, TRACE, lower(PLAN), FIT, compare(TRACE, TRACE),
    difference_of_plans(PLAN, OTHER), DIED,
]  # fmt: skip


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda one: type(one).__name__)
def test_a_document_is_a_line(document: object) -> None:
    """The repr gives the kind and subject in one line of at most two terminal widths; `str` is one line too."""
    text = repr(document)
    assert isinstance(document, Program) or "\n" not in str(document)
    assert text.startswith(f"<{type(document).__name__}: ") and text.endswith(">")
    assert "\n" not in text and len(text) < 160


class Cells(HTMLParser):
    """Parser of the cells of tables, and of every open tag."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.texts = list[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda one: type(one).__name__)
def test_a_document_is_shown_as_tables(document: Any) -> None:
    """Every cell of the tables that `pipefit show` prints is there, and every tag that opens closes."""
    reader = Cells()
    reader.feed(show.html(document))
    assert reader.open == []
    tables = [block for block in describe(document) if isinstance(block, Table)]
    assert {cell for table in tables for row in table.rows for cell in row if cell} <= set(reader.texts)
    assert tables or isinstance(document, Program)


@pytest.mark.parametrize("document", [PLAN, PLAN.profile, TRACE, FIT], ids=lambda one: type(one).__name__)
def test_the_text_of_a_document_is_what_is_shown(document: Any) -> None:
    """`text` gives the output of `pipefit show` in lines of 80 columns."""
    assert show.text(document) == plain(describe(document), 80)
    assert max(map(len, show.text(document).splitlines())) <= 80


def test_only_documents_have_a_text() -> None:
    """Other objects are refused by their type."""
    with pytest.raises(UsageError, match="a int is not a document"):
        show.text(3)


def test_names_from_outside_are_no_html() -> None:
    """A layer or a title that looks like a tag is text."""
    shown = html([Table(("<b>",), (("<script>",),), title="<i>"), "a <u> line"])
    assert not [tag for tag in ("<b>", "<script>", "<i>", "<u>") if tag in shown]
