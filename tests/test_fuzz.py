"""A small budget of the fuzzer: `make fuzz` has a long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz import fuzz


def test_mutated_documents_and_lines_are_refused_or_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a sentence and a code of ours, in time, without a file that was not asked for and without code being run."""
    monkeypatch.chdir(tmp_path)
    assert fuzz(tmp_path, files=40, command_lines=30, seed=0) == []
