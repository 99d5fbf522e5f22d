"""The first hour on a GPU: what is claimed about it without one, beside what is found, in the order of value.

    PYTHONPATH=src python benchmarks/gpu/first_hour.py [--json FILE] [--only PART ...] [--kind PRESET] [--dry]

Every part runs in a process of its own, for ten minutes at most, so that one that crashes or fills the GPU leaves the
others alone. After each, the JSON has all rows so far, with the GPU, the driver and torch. `--kind` is a preset with
devices like this one. `--dry` runs every part on the CPU, in small, so that no minute of a GPU is spent on a
script's mistakes: bytes are then those of an emulated device. Exits with 1 if a claim does not hold, or a part fails.

Under 40 minutes on an H100 as it is meant; it has not been run on one yet.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # where `measured_on` is

import torch
from machines import Cpu, Gpu, Machine
from parts import PARTS, Row

from measured_on import machine as described
from pipefit.units import format_bytes

LONGEST_SECONDS = 600


def shown(row: Row) -> str:
    """A line: what, expected, found, and whether the claim holds."""
    verdict = {True: "ok", False: "DIFFERS", None: ""}[row.holds]
    return (
        f"{row.what:60}  {_figure(row.expected, row.unit):>14}  {_figure(row.found, row.unit):>14}  {verdict}".rstrip()
    )


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return format_bytes(round(value)) if unit == "bytes" else f"{value:.6g} {unit}"


def run_part(name: str, machine: Machine, *, dry: bool) -> Iterator[Row]:
    """The rows of a part, printed as they come."""
    for row in PARTS[name](machine, dry):
        print(shown(row), flush=True)
        yield row


def alone(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A part in a process of its own: its rows, what it was measured on, and why it ended if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "part.json"
        line = [sys.executable, __file__, "--part", name, "--json", str(told), "--kind", options.kind]
        began = time.perf_counter()
        part = subprocess.Popen([*line, *["--dry"] * options.dry], start_new_session=True)
        try:
            code = part.wait(LONGEST_SECONDS)
            failure = None if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            failure = f"longer than {LONGEST_SECONDS} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(part.pid, signal.SIGKILL)  # with what it has started, which would hold the GPU
            part.wait()
        found = json.loads(told.read_text(encoding="utf-8")) if told.exists() else {"rows": []}
    return found | {"part": name, "seconds": round(time.perf_counter() - began, 1), "failure": failure}


def one_part(options: argparse.Namespace) -> None:
    """What the process of a part does."""
    torch.set_num_threads(1)  # those that profiles are made for
    machine: Machine = Cpu() if options.dry else Gpu(options.kind)
    document: dict[str, Any] = {"gpu": machine.named(), "rows": []}
    for row in run_part(options.part, machine, dry=options.dry):  # one that fails leaves the rows before
        document["rows"].append(asdict(row) | {"holds": row.holds})
        options.json.write_text(json.dumps(document), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that are asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--kind", default="hgx-h100")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        one_part(options)
        return 0
    done: list[dict[str, Any]] = []
    print(f"{'':60}  {'expected':>14}  {'found':>14}")
    for name in options.only:
        print(f"--- {name}", flush=True)
        done.append(alone(name, options))
        if options.json:
            document = {"machine": described(), "dry": options.dry, "parts": done}
            options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    failed = [part["part"] for part in done if part["failure"] or any(row["holds"] is False for row in part["rows"])]
    print(f"not as expected: {', '.join(failed)}" if failed else "all as expected")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
