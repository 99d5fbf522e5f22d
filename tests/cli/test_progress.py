"""Progress of a command: a bar, from the first moment on."""

from __future__ import annotations

import io
import re
import sys
import time
from pathlib import Path

import pytest

from pipefit.cli import main
from pipefit.cli import model as models
from pipefit.cli import progress as module
from pipefit.cli.progress import progress
from pipefit.errors import UsageError
from pipefit.schema.json_io import save
from support.pipelines import make_plan, random_profile


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def terminal_as_stderr(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace stderr by a terminal for the rest of a test."""
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_a_bar_counts_when_it_knows_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first report the bar shows no count, and no `0/?`."""
    stderr = terminal_as_stderr(monkeypatch)
    with progress("working") as report:
        assert "working" in stderr.getvalue()
        report(3, 7, "layer3")
    assert "/?" not in stderr.getvalue()
    assert "3/7" in stderr.getvalue()
    assert "working: layer3" in stderr.getvalue()


def test_off_a_terminal_there_is_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines with the current work appear after a moment and then regularly; none after the end, and none for
    quick work.
    """
    monkeypatch.setattr(module, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(module, "SECONDS", 0.05)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())

    def shows(line: str) -> None:
        while not re.search(rf"^pipefit: {line}, \d+ s$", stream.getvalue(), re.MULTILINE):
            time.sleep(0.01)

    with progress("working") as report:
        shows("working")
        report(3, 7, "layer3")
        shows(r"working: layer3 \(3 of 7\)")
    said = stream.getvalue()
    time.sleep(0.1)
    monkeypatch.setattr(module, "FIRST_SECONDS", 60)
    with progress("working"), progress("training", lines=False):
        pass
    assert stream.getvalue() == said


def test_a_refusal_is_wrapped_at_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the words of a long sentence are not broken, and none is lost."""
    monkeypatch.setenv("COLUMNS", "80")
    stderr = terminal_as_stderr(monkeypatch)
    assert main(["show", "emulated:4x1MiBB"]) == 2
    lines = stderr.getvalue().splitlines()
    assert len(lines) > 1
    assert all(len(line) <= 80 and line == line.strip() for line in lines)
    assert "write a positive number and a unit, such as" in " ".join(lines)


@pytest.mark.parametrize(
    "line", ["profile zoo:x -b 1", "plan zoo:x -c emulated:2x1GiB", "certify p zoo:x", "train p zoo:x"]
)
def test_a_command_is_seen_to_work_before_it_imports_a_model(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Importing torch takes seconds, during which the terminal already shows the command's progress."""
    stderr, shown = terminal_as_stderr(monkeypatch), list[str]()

    def refuse(*_: object) -> None:
        shown.append(stderr.getvalue())
        raise UsageError("no such model")

    monkeypatch.setattr(models, "_task", refuse)
    monkeypatch.chdir(tmp_path)
    save(make_plan(random_profile(6), (2, 4)), "p")
    assert main(line.split()) == 2
    assert len(shown) == 1
    assert shown[0].strip()
