"""What the linters cannot check of our style."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = sorted((HERE.parent / "src").rglob("*.py"))


@pytest.mark.parametrize("path", sorted(HERE.rglob("test_*.py")), ids=lambda path: str(path.relative_to(HERE)))
def test_every_test_says_what_it_shows(path: Path) -> None:
    """Every test has a docstring that states the behaviour."""
    tests = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert [test.name for test in tests if not ast.get_docstring(test)] == []


def test_a_file_is_one_idea() -> None:
    """No source file is longer than 400 lines."""
    assert [path.name for path in SOURCES if len(path.read_text().splitlines()) > 400] == []


def test_half_of_all_functions_fit_in_ten_lines() -> None:
    """The median function has ten lines or fewer, without its docstring."""
    lengths = sorted(
        node.end_lineno - node.body[bool(ast.get_docstring(node))].lineno + 1
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) > bool(ast.get_docstring(node))
        if node.end_lineno is not None
    )
    assert lengths[len(lengths) // 2] <= 10
