"""Which releases of torch are taken."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from pipefit.capture.releases import FIRST, LAST, check_release
from pipefit.errors import UsageError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0", "2.13.0+cpu", "2.13.1.dev20260101+cu130"])
def test_a_release_that_is_followed_is_taken(version: str) -> None:
    """Of any build."""
    check_release(version)


@pytest.mark.parametrize("version", ["2.10.1", "2.14.0+cpu", "2.15.0", "3.0.0", "1.13.1", ""])
def test_another_release_is_refused_with_one_that_works(version: str) -> None:
    """Before it fails somewhere in the middle, or says something wrong."""
    with pytest.raises(UsageError, match=r"torch 2\.11 to 2\.13 .* pip install 'torch==2\.13\.\*'"):
        check_release(version)


def test_pip_is_told_the_same() -> None:
    """In the package's requirements, and in the README."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (spec,) = (one for one in wanted if one.startswith("torch"))
    assert spec == f"torch>={FIRST[0]}.{FIRST[1]},<{LAST[0]}.{LAST[1] + 1}"
    assert f"torch {FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]};" in (ROOT / "README.md").read_text()
