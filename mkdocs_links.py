"""What the site has besides its pages: files that they link to outside of `docs/`, and the reports of the gallery.

A hook of mkdocs: a link out of `docs/`, such as to an example, leads to a copy under `repository/`, so that the site
works wherever it is put; reports are made by the commands on their page.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
_LEFT: set[Path] = set()  # what pages link to, outside of docs


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """A page whose links out of `docs/` lead to copies."""
    folder = ROOT / "docs" / Path(page.file.src_uri).parent

    def copied(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / match[1]))
        if target.is_relative_to(ROOT / "docs") or not target.is_file():
            return match[0]
        _LEFT.add(target)
        up = "../" * (len(Path(page.file.src_uri).parts) - 1)
        return f"]({up}repository/{target.relative_to(ROOT)}"

    return _LINK.sub(copied, markdown)


def on_post_build(*, config: Any, **_: Any) -> None:
    """The copies, beside the pages."""
    for target in _LEFT:
        copy = Path(config.site_dir) / "repository" / target.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target, copy)
    make_reports(ROOT / "docs" / "reports" / "index.md", Path(config.site_dir) / "reports")


def report_lines(page: str) -> list[str]:
    """The commands of a page that make its reports, in order."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    return [line.partition("#")[0].strip() for block in blocks for line in block.splitlines() if line]


def make_reports(page: Path, folder: Path) -> None:
    """Run the commands of a page, and leave the reports in `folder`."""
    with tempfile.TemporaryDirectory() as place:
        for line in report_lines(page.read_text()):
            words = [sys.executable, "-m", *shlex.split(line)]
            subprocess.run(words, cwd=place, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - lines of our own page
        for made in Path(place).glob("*.html"):
            shutil.copyfile(made, folder / made.name)
