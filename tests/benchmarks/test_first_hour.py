"""The script for the first hour on a GPU, in its dry mode: every part runs on a CPU, and its claims hold there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "benchmarks" / "gpu"
sys.path.insert(0, str(HERE))

import parts  # noqa: E402
from first_hour import main, run_part, shown  # noqa: E402 - the script's folder is on the path from here on
from machines import Cpu  # noqa: E402
from parts import PARTS, Row  # noqa: E402

CLAIMED = [name for name in PARTS if name not in ("constants", "seconds")]  # those need a GPU's own figures


def check(name: str) -> None:
    """The rows of a part are measured, and what is claimed of bytes holds to the byte."""
    rows = run_part(name, Cpu(), dry=True)
    assert rows
    assert all(row.holds is not False for row in rows)
    assert any(row.holds for row in rows) == (name in CLAIMED)


@pytest.mark.parametrize("name", ["constants", "peaks-gpt"])
def test_a_part_runs_dry(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process takes, which is not measured on a CPU, and the peaks of a GPT in float32."""
    monkeypatch.setattr(parts, "PRECISIONS", ("float32",))
    check(name)


@pytest.mark.gallery
@pytest.mark.parametrize("name", PARTS)
def test_every_part_runs_dry(name: str) -> None:
    """All models and precisions, layers, histories, limits, seconds, and the collection of the tests for GPUs."""
    check(name)


def test_a_claim_that_does_not_hold_is_shown() -> None:
    """By its word, beside both figures; what is not measured here holds neither way."""
    assert shown(Row(what="a", expected=1 << 20, found=1 << 21, within=0.1)).endswith(
        "1.00 MiB        2.00 MiB  DIFFERS"
    )
    assert shown(Row(what="a", expected=1.0, found=1.05, unit="seconds", within=0.1)).endswith("ok")
    assert Row(what="a", expected=1, found=None, within=0.0).holds is None


@pytest.mark.gallery
def test_parts_run_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The JSON has the machine and the rows of each; the exit code is 0 where all is as expected."""
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1] / "src"))
    path = tmp_path / "hour.json"
    assert main(["--dry", "--only", "constants", "largest", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert [part["part"] for part in document["parts"]] == ["constants", "largest"]
    assert all(part["rows"] and part["failure"] is None for part in document["parts"])
    assert document["machine"]["torch"]
