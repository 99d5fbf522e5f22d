"""The first hour on a GPU: what is claimed about it without one, beside what is found, in the order of value.

    PYTHONPATH=src python benchmarks/gpu/first_hour.py [--json FILE] [--only PART ...] [--kind PRESET] [--minutes 40]
                                                       [--small | --dry]

Every part runs in a process of its own, for ten minutes at most, so that one that crashes or fills the GPU leaves the
others alone. `--minutes` are those of all parts: what is under way is ended when they are over, and what has not begun
is named. After each part, the JSON has all rows so far, with the GPU, the driver and torch. `--kind` is a preset with
devices like this one. `--small` takes models that train in 4 GiB. `--dry` runs every part on the CPU, with tiny models,
so that no minute of a GPU is spent on a script's mistakes: bytes are then those of an emulated device. Exits with 1 if
a claim does not hold, or a part fails or has not begun.

Nothing else may use the GPU. It has not been run on a real one yet. On the emulation (`make cuda`) run it with
`--small`: `context` and `process` differ there, because what an emulated process takes is what it allocates.
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
from parts import PARTS, Row, Scale

from measured_on import machine as described
from pipefit.units import format_bytes

LONGEST_SECONDS = 600


def shown(row: Row) -> str:
    """A line: what, expected, found, and whether the claim holds."""
    verdict = {True: "ok", False: "DIFFERS", None: ""}[row.holds]
    expected, found = _figure(row.expected, row.unit), _figure(row.found, row.unit)
    return f"{row.what:60}  {expected:>14}  {found:>14}  {verdict}".rstrip()


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return format_bytes(round(value)) if unit == "bytes" else f"{value:.6g} {unit}"


def run_part(name: str, machine: Machine, scale: Scale) -> Iterator[Row]:
    """The rows of a part, printed as they come."""
    for row in PARTS[name](machine, scale):
        print(shown(row), flush=True)
        yield row


def alone(name: str, options: argparse.Namespace, left: float) -> dict[str, Any]:
    """A part in a process of its own, while so many seconds are left: its rows, what it was measured on, and why it
    ended if it failed.
    """
    longest = min(LONGEST_SECONDS, left)
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "part.json"
        line = [sys.executable, __file__, "--part", name, "--json", str(told), "--kind", options.kind]
        began = time.perf_counter()
        part = subprocess.Popen(
            [*line, *[f"--{options.scale}"] * (options.scale != "full")], start_new_session=True
        )
        try:
            code = part.wait(longest)
            failure = None if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            failure = f"longer than {longest:.0f} s" + (
                ", which were left" if longest < LONGEST_SECONDS else ""
            )
        finally:
            with suppress(ProcessLookupError):
                os.killpg(part.pid, signal.SIGKILL)  # with what it has started, which would hold the GPU
            part.wait()
        found = json.loads(told.read_text(encoding="utf-8")) if told.exists() else {"rows": []}
    if failure:
        print(f"{name}: {failure}")
    return found | {"part": name, "seconds": round(time.perf_counter() - began, 1), "failure": failure}


def one_part(options: argparse.Namespace) -> None:
    """What the process of a part does."""
    torch.set_num_threads(1)  # those that profiles are made for
    machine: Machine = Cpu() if options.scale == "dry" else Gpu(options.kind)
    document: dict[str, Any] = {"gpu": machine.named(), "rows": []}
    for row in run_part(options.part, machine, options.scale):  # one that fails leaves the rows before
        document["rows"].append(asdict(row) | {"holds": row.holds})
        options.json.write_text(json.dumps(document), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that are asked for; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--kind", default="hgx-h100")
    parser.add_argument("--minutes", type=float, default=40)
    scale = parser.add_mutually_exclusive_group()
    for name in ("small", "dry"):
        scale.add_argument(f"--{name}", dest="scale", action="store_const", const=name, default="full")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        one_part(options)
        return 0
    over = time.monotonic() + 60 * options.minutes
    done: list[dict[str, Any]] = []
    waiting = list(options.only)
    print(f"{'':60}  {'expected':>14}  {'found':>14}")
    keep(options, done, waiting)
    while waiting and (left := over - time.monotonic()) > 0:
        print(f"--- {waiting[0]}", flush=True)
        done.append(alone(waiting.pop(0), options, left))
        keep(options, done, waiting)
    return concluded(done, waiting)


def keep(options: argparse.Namespace, done: Sequence[dict[str, Any]], waiting: Sequence[str]) -> None:
    """Write what has been found so far, and what has not begun, if a file is named."""
    if options.json:
        document = {"machine": described(), "scale": options.scale, "minutes": options.minutes, "parts": done}
        options.json.write_text(
            json.dumps(document | {"not_begun": waiting}, indent=1) + "\n", encoding="utf-8"
        )


def concluded(done: Sequence[dict[str, Any]], waiting: Sequence[str]) -> int:
    """What is said at the end, and the exit code."""
    failed = [
        part["part"] for part in done if part["failure"] or any(row["holds"] is False for row in part["rows"])
    ]
    print(
        f"not as expected: {', '.join(failed)}" if failed else f"{'all' if done else 'nothing'} as expected"
    )
    if waiting:
        print(f"not begun: {', '.join(waiting)}")
    return 1 if failed or waiting else 0


if __name__ == "__main__":
    raise SystemExit(main())
