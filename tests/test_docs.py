"""The documentation runs: every Python block, and every `pipefit` line of every shell block."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from pipefit.cli import main

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


def named(page: Path) -> str:
    """A page by its place in the project."""
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From top to bottom, in an empty folder, the Python blocks of a page in one namespace.

    `pipefit demo` is left to its own test: it starts workers and takes its time.
    """
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "documentation"}
    for language, block in BLOCK.findall(page.read_text()):
        if language == "python":
            exec(compile(block, named(page), "exec"), namespace)
        if language == "sh":
            lines = [line for line in block.replace("\\\n", " ").splitlines() if line.startswith("pipefit ")]
            for line in (line for line in lines if not line.startswith("pipefit demo")):
                assert main(shlex.split(line, comments=True)[1:]) == 0, line


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    """Every relative link names a file or folder that exists."""
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []


def test_the_version_is_the_same_everywhere() -> None:
    """The package, its metadata, the citation and the changelog agree on the version."""
    import pipefit

    for name, text in {
        "pyproject.toml": f'version = "{pipefit.__version__}"',
        "CITATION.cff": f"version: {pipefit.__version__}",
        "CHANGELOG.md": f"## {pipefit.__version__}",
    }.items():
        assert text in (ROOT / name).read_text(), name
