"""The table of Hugging Face families on the page about models tells what becomes of them."""

from __future__ import annotations

import pytest

from families import ALL, PAGE, becomes, page_with, split


def test_the_table_is_in_order() -> None:
    """Its rows are of known families, and putting one in again changes nothing."""
    text = PAGE.read_text()
    rows = split(text)[1]
    assert len(rows) >= 20 and rows.keys() <= ALL.keys()
    assert page_with(text, dict([rows.popitem()])) == text


@pytest.mark.gallery
@pytest.mark.parametrize("name", ALL)
def test_a_family_becomes_what_the_table_says(name: str) -> None:
    """It is a chain of so many layers that computes what the module does, or is refused for that reason."""
    assert becomes(ALL[name]) == split(PAGE.read_text())[1].get(name, "not in the table")
