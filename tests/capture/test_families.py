"""The page on models has a table of Hugging Face families that states the result for each."""

from __future__ import annotations

import pytest

from support.transformers_families import ALL, PAGE, becomes, page_with, split


def test_the_table_is_in_order() -> None:
    """Its rows are known families, and regenerating a row changes nothing."""
    text = PAGE.read_text()
    rows = split(text)[1]
    assert len(rows) >= 20 and rows.keys() <= ALL.keys()
    assert page_with(text, dict([rows.popitem()])) == text


@pytest.mark.gallery
@pytest.mark.parametrize("name", ALL)
def test_a_family_becomes_what_the_table_says(name: str) -> None:
    """A family is a chain with the stated number of layers that computes the module's result, or is refused
    for the stated reason.
    """
    assert becomes(ALL[name]) == split(PAGE.read_text())[1].get(name, "not in the table")
