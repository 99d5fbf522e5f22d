"""On systems other than Linux, features without worker processes work, and others are refused in a
sentence.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PLAN = "plan zoo:mlp --cluster 2x-rtx-3090 --batch-size 8 --planner uniform -o plan.json"


@pytest.mark.parametrize("system", ["win32", pytest.param("darwin", marks=pytest.mark.gallery)])
def test_plans_and_pages_are_made_and_workers_refused(system: str, tmp_path: Path) -> None:
    """A plan with its dry run, a page and `doctor` work; the message on training by workers gives an
    alternative.
    """
    lines = (
        PLAN,
        "report plan.json",
        "certify plan.json zoo:mlp",
        "train plan.json zoo:mlp --save runs",
        "doctor",
    )
    done = subprocess.run(
        [sys.executable, str(HERE / "support" / "missing_linux.py"), system, *lines],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    codes = [line for line in done.stdout.splitlines() if line.startswith("-> ")]
    assert codes == ["-> 0", "-> 0", "-> 0", "-> 2", "-> 0"], done.stderr
    assert (tmp_path / "plan.html").stat().st_size > 10_000
    assert "worker processes need Linux" in done.stderr and "unexpected" not in done.stderr
    assert "no   train on emulated devices" in done.stdout
