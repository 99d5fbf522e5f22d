"""Supported releases of torch."""

from __future__ import annotations

import importlib
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

import pipefit.capture
from pipefit.capture.model import FIRST, LAST, check_release
from pipefit.errors import PipefitWarning, UsageError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0", "2.13.0+cpu", "2.15.1.dev20260101+cu132"])
def test_a_release_that_is_followed_is_taken(version: str) -> None:
    """A supported release passes without a warning, in any build."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_release(version)


@pytest.mark.parametrize("version", ["2.10.1", "1.13.1", ""])
def test_an_older_release_is_refused_with_one_that_works(version: str) -> None:
    """The refusal comes early, before a failure or a wrong result, and names a release that works."""
    with pytest.raises(UsageError, match=r"torch 2\.11 to 2\.15 .* pip install 'torch==2\.15\.\*'"):
        check_release(version)


@pytest.mark.parametrize("version", ["2.16.0", "2.16.0a0+git1234", "3.0.0"])
def test_a_newer_release_is_taken_with_a_warning(version: str) -> None:
    """The warning names the tested releases, the possible errors, and the release to install."""
    with pytest.warns(
        PipefitWarning, match=r"torch 2\.11 to 2\.15: .* may be wrong, .* pip install 'torch==2\.15\.\*'"
    ):
        check_release(version)


def test_whoever_captures_first_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning comes with the first import of the capture package."""
    monkeypatch.setattr(torch, "__version__", "2.99.0+cu140")
    with pytest.warns(PipefitWarning, match=r"this is torch 2\.99\.0\+cu140, "):
        importlib.reload(pipefit.capture)


def test_pip_is_told_the_oldest() -> None:
    """The package's requirements and the README name the oldest release."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (spec,) = (one for one in wanted if one.startswith("torch"))
    assert spec == f"torch>={FIRST[0]}.{FIRST[1]}"
    assert f"torch {FIRST[0]}.{FIRST[1]} to {LAST[0]}.{LAST[1]}." in (ROOT / "README.md").read_text()
