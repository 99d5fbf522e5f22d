"""Style checks beyond the linters."""

from __future__ import annotations

import ast
import re
import tomllib
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def test_every_test_says_what_it_shows() -> None:
    """Every test has a docstring that states the behaviour."""
    assert [
        f"{path.relative_to(HERE)}:{test.lineno} {test.name}"
        for path in sorted(HERE.rglob("test_*.py"))
        for test in ast.parse(path.read_text()).body
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test_")
        if not ast.get_docstring(test)
    ] == []


def test_counts_are_written_with_their_nouns() -> None:
    """`{len(x)} layers` is wrong for one layer: `counted` writes a number with its noun, singular or
    plural.
    """
    bare = [
        f"{path.name}:{count.lineno} {ast.unparse(count.value)}{noun.value!r}"
        for path in SOURCES
        for text in ast.walk(ast.parse(path.read_text()))
        if isinstance(text, ast.JoinedStr)
        for count, noun in pairwise(text.values)
        if isinstance(count, ast.FormattedValue) and ast.unparse(count.value).startswith("len(")
        if isinstance(noun, ast.Constant) and re.match(r" (?!is |was |has |as )[a-z-]*s\b", noun.value)
    ]
    assert not bare


def test_the_architecture_shows_the_order_of_imports_that_is_checked() -> None:
    """The layers on the page match those of the contract, line by line."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    section = (
        (ROOT / "ARCHITECTURE.md")
        .read_text()
        .partition("## The order of imports")[2]
        .partition("Imports point")[0]
    )
    assert [line.strip() for line in section.strip().splitlines()] == contracts[0]["layers"]
