"""A page as a browser has it once its script has run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")


def browsed(made: str, folder: Path) -> str:
    """What a browser has made of a page; the test is skipped where there is none."""
    if CHROMIUM is None:
        pytest.skip("needs chromium")
    file = folder / "page.html"
    file.write_text(made, encoding="utf-8")
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
        "--window-size=1280,1000", "--virtual-time-budget=5000", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
