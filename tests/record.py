"""Recorder of the first ten minutes with pipefit: runs real commands and writes their output to a page.

    python tests/record.py docs/first_ten_minutes.md

A test of the gallery records again and compares the page. Takes minutes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

_HEAD = """\
# The first ten minutes

A recording, made by `tests/record.py` from real commands on two CPU cores; dots stand for lines that are left out.
The model is a small GPT that learns the sources of Python's standard library, and its devices are four processes of
12 MiB each.
"""


class Shot(NamedTuple):
    """A command, its purpose, and the lines of its output to show: some at both ends, or all."""

    why: str
    line: str
    first: int = 99
    last: int = 0


_MODEL = "zoo:gpt-stdlib --set layers=8 --set hidden=128 --set heads=4 --set sequence=128"
_ASKED = f"{_MODEL} --cluster emulated:4x12MiB --batch-size 16 --microbatch-size 2 --data 1 --tensor 1"
SHOTS = (
    Shot("What does this machine have, and what can pipefit do on it?", "pipefit doctor", 2, 6),
    Shot("Does it fit, on one screen?", f"pipefit fit {_MODEL} --cluster emulated:4x12MiB", 24),
    Shot("Does a split alone fit? Exit code 3: no.", f"pipefit plan {_ASKED} --objective peak"),
    Shot("Then what does?", f"pipefit plan {_ASKED} -o plan.json"),
    Shot("As a page, with memory over time, the timeline, and sliders.", "pipefit report plan.json"),
    Shot(
        "Is that right? A dry run of the real runtime counts every byte.",
        f"pipefit certify plan.json {_MODEL} -o certified.json", 6,
    ),
    Shot(
        "Train: one process for each device. A process that needs more than 12 MiB fails.",
        f"pipefit train plan.json {_MODEL} --steps 40 --log-every 10 --save runs --every 20 -o measured.json", 7,
    ),
    Shot("Predicted and measured.", "pipefit compare certified.json measured.json"),
    Shot("The weights, for plain PyTorch.", "pipefit checkpoint runs -o model.safetensors"),
    Shot(
        "How does another plan differ?",
        f"pipefit plan {_ASKED} --recompute always --objective peak -o leanest.json", 2,
    ),
    Shot("In words and numbers.", "pipefit diff plan.json leanest.json"),
    Shot("And for GPUs that are somewhere else?", "pipefit plan zoo:gpt --cluster 4x-titan-rtx --batch-size 64", 14),
)  # fmt: skip


def recorded(shots: tuple[Shot, ...] = SHOTS) -> str:
    """Return the page: every command with its output, in a separate folder and on a terminal of 80
    columns.
    """
    with tempfile.TemporaryDirectory() as folder:
        parts = [
            _HEAD,
            *(f"{shot.why}\n\n```text\n$ {shot.line}\n{_shown(shot, folder)}\n```\n" for shot in shots),
        ]
    return "\n".join(parts)


def _shown(shot: Shot, folder: str) -> str:
    """Return the output of a command, without its progress and without lines in the middle."""
    words = [sys.executable, "-m", "pipefit", *shot.line.split()[1:]]
    done = subprocess.run(
        words, cwd=folder, env=os.environ | {"COLUMNS": "80"}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, timeout=600, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if not re.fullmatch(r"pipefit: .*, \d+ s", line)]
    cut = len(lines) > shot.first + shot.last
    kept = [*lines[: shot.first], "...", *lines[len(lines) - shot.last :]] if cut else lines
    return "\n".join(kept).strip()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(recorded(), encoding="utf-8")
