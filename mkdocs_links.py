"""Links of the documentation that leave `docs/`, such as those to examples, on the site: the files go along.

A hook of mkdocs: such a link leads to a copy under `repository/`, so that the site works wherever it is put.
"""

from __future__ import annotations

import os
import re
import shutil
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
