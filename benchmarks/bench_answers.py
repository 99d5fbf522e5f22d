"""Claim: pipefit answers in seconds: with a first word within two, and a plan of GPT-2 in about ten.

Each command is a process of its own, as people call it, for a small model, GPT-2 and a model of 7 billion parameters:
plan, fit, profile, simulate, certify, report. Each is called twice, of which the first leaves the byte code of what it
imports, as an installed package has it, and no profile. Told are the seconds until the second has ended, those of CPU
that it took with its forks, and those until it wrote its first word, on either stream. The first two are as good as the
machine was idle.

    python benchmarks/bench_answers.py [--only zoo:mlp hf:gpt2] [--json FILE] [--page]

About five minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from measured_on import machine
from page_tables import markdown, with_tables

PAGE, TITLE = Path(__file__).parents[1] / "docs" / "choosing.md", "how long answers take"
CLUSTERS = {"zoo:mlp": "emulated:2x32MiB", "hf:gpt2": "4x-titan-rtx", "hf:llama": "hgx-h200"}  # by model
COMMANDS = "plan", "fit", "profile", "simulate", "certify", "report"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One command for one model. `first_word_seconds` is None where it wrote nothing."""

    model: str
    command: str
    words: str
    seconds: float
    cpu_seconds: float
    first_word_seconds: float | None


def calls(model: str) -> Iterator[tuple[str, list[str]]]:
    """The commands in order: what the first ones write, the later ones read."""
    cluster = CLUSTERS[model]
    target = ["--target", "cpu" if cluster.startswith("emulated") else "cuda"]
    yield "plan", ["plan", model, "--cluster", cluster, "--batch-size", "64", "-o", "plan.json"]
    yield "fit", ["fit", model, "--cluster", cluster]
    yield "profile", ["profile", model, "--microbatch-size", "4", *target, "-o", "profile.json"]
    yield "simulate", ["simulate", "plan.json", "-o", "predicted.json"]
    yield "certify", ["certify", "plan.json", model]
    yield "report", ["report", "plan.json", "predicted.json", "-o", "page.html"]


def measured(model: str, command: str, words: list[str], folder: Path) -> Row:
    """Run a command in a folder.

    Raises:
        RuntimeError: it failed; with what it wrote.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "pipefit", *words],
        cwd=folder,
        env=_fresh(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    first, written = _read(process, began)
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"pipefit {' '.join(words)} failed: {written[-2000:].decode()}")
    return Row(
        model=model,
        command=command,
        words=" ".join(words),
        seconds=round(seconds, 2),
        cpu_seconds=round(used.ru_utime + used.ru_stime, 2),
        first_word_seconds=None if first is None else round(first, 2),
    )


def _fresh(folder: Path) -> dict[str, str]:
    """An environment with byte code of its own for all calls in a folder, and a cache of kernels for this one."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {
        "PYTHONPYCACHEPREFIX": str(folder / "byte code"),
        "XDG_CACHE_HOME": tempfile.mkdtemp(dir=folder),
    }


def _read(process: subprocess.Popen[bytes], began: float) -> tuple[float | None, bytes]:
    """When a process wrote its first word, and all that it wrote."""
    first, written = None, b""
    with selectors.DefaultSelector() as streams:
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            streams.register(stream, selectors.EVENT_READ)
        while streams.get_map():
            for ready, _ in streams.select():
                found = os.read(ready.fd, 1 << 16)
                if not found:
                    streams.unregister(ready.fileobj)
                first = first if first is not None or not found else time.monotonic() - began
                written += found
    return first, written


def table(rows: list[Row]) -> str:
    """Seconds, and those of CPU, of every command for every model."""
    found: dict[tuple[str, str], Row] = {(row.model, row.command): row for row in rows}
    models = list(dict.fromkeys(row.model for row in rows))

    def cells(command: str) -> list[str]:
        known = [found.get((model, command)) for model in models]
        return ["" if row is None else f"{row.seconds:.1f} s ({row.cpu_seconds:.1f})" for row in known]

    return markdown(
        ["", *(f"`{model}`" for model in models)], [[command, *cells(command)] for command in COMMANDS]
    )


def load() -> float:
    """How many processes wanted a core in the last minute."""
    return round(os.getloadavg()[0], 1)


def write(path: Path, rows: list[Row], highest: float) -> None:
    """Write the rows so far, with the highest load."""
    document: dict[str, Any] = {
        "machine": machine() | {"load": highest},
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Print the rows; with --json write them too, and with --page put the table into the docs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(CLUSTERS), default=list(CLUSTERS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    rows, loads = list[Row](), [load()]
    with tempfile.TemporaryDirectory() as folder:
        for model in options.only:
            for command, words in calls(model):
                measured(model, command, words, Path(folder))
                rows.append(measured(model, command, words, Path(folder)))
                loads.append(load())
                print(rows[-1], flush=True)
                if options.json:
                    write(options.json, rows, max(loads))
    if options.page:
        PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), {TITLE: table(rows)}), encoding="utf-8")


if __name__ == "__main__":
    main()
