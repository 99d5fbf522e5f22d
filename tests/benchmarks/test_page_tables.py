"""Tables of benchmarks in the docs: their position, and their equality with the JSON."""

from __future__ import annotations

import pytest

import bench_ablation
import bench_joint_real
import bench_mpress
import bench_mpress_reserved
from page_tables import PAGE, with_tables


def test_a_page_gets_the_tables_where_their_titles_are() -> None:
    """Old tables are replaced and the text around them stays; a page without a place is refused."""
    page = "before\n<!-- speeds -->\nold\n<!-- end of speeds -->\nbehind\n"
    new = "before\n<!-- speeds -->\n\n| a |\n\n<!-- end of speeds -->\nbehind\n"
    assert with_tables(page, {"speeds": "| a |"}) == new
    with pytest.raises(ValueError, match="no place"):
        with_tables(page, {"techniques": "| a |"})


def test_the_docs_have_the_tables_of_the_json() -> None:
    """The docs match the tables word for word, so that page and JSON are of one run."""
    ablated = [*bench_mpress.read(bench_ablation.RESULTS).values()]
    found = (
        bench_mpress.tables([*bench_mpress.read(bench_mpress.RESULTS).values()])
        | ({"ablation": bench_ablation.table(ablated)} if ablated else {})
        | bench_joint_real.tables([*bench_joint_real.read(bench_joint_real.RESULTS).values()])
        | bench_mpress_reserved.tables(bench_mpress_reserved.read(bench_mpress_reserved.RESULTS))
    )
    page = PAGE.read_text(encoding="utf-8")
    assert found and with_tables(page, found) == page
