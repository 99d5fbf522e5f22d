"""Trainings by the command in separate processes, which wait, die and resume on a test's request."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipefit.schema.json_io import save
from support.resumed_tasks import plan_for

ROOT = Path(__file__).parents[2]
STEPS, EVERY = 9, 3
SECONDS = 240  # in which anything happens on a loaded machine too


@dataclass
class Training:
    """A training of nine steps that saves every third to `runs`, with its files in `folder`."""

    folder: Path
    runs: Path
    seed: int
    steps: int = STEPS
    task: tuple[str, ...] = ("support.resumed_tasks:mortal",)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def command(self, *more: str, seed: bool = True) -> list[str]:
        """Return the words of the command, with these additional options."""
        self.folder.mkdir(exist_ok=True)
        plan = self.runs.parent / "plan.json"
        if not plan.exists():
            save(plan_for("dropout", "1f1b", (3, 3)), plan)
        command = ["train", str(plan), *self.task, "--no-numbers", "--json"]
        command += [
            "--set",
            f"folder='{self.folder}'",
            "--set",
            f"seed={self.seed}",
            "--steps",
            str(self.steps),
        ]
        command += ["--save", str(self.runs), "--every", str(EVERY), *more]
        return command + (["--seed", str(self.seed)] if seed else [])

    def start(self, *more: str, seed: bool = True) -> subprocess.Popen[str]:
        """Start, with these additional options."""
        process = subprocess.Popen(
            [sys.executable, "-m", "pipefit", *self.command(*more, seed=seed)],
            env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def waits_at(self, step: int) -> None:
        """Make the training wait before a step, which it has announced when `until_at` returns."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / f"wait-{step}").touch()

    def until_at(self, step: int) -> None:
        """Wait until it waits there."""
        until = time.monotonic() + SECONDS
        while not (self.folder / f"at-{step}").exists():
            assert time.monotonic() < until, "it does not come there"
            assert self.processes[-1].poll() is None, self.processes[-1].stderr.read()  # type: ignore[union-attr]
            time.sleep(0.02)

    def goes_on(self, step: int) -> None:
        """Let it continue from there."""
        (self.folder / f"wait-{step}").unlink()
        (self.folder / f"at-{step}").unlink(missing_ok=True)

    def dies_at(self, death: str) -> None:
        """Kill one of its workers there: `WORKER-STEP-ACTION`."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / death).touch()

    def kill(self) -> None:
        """Kill the command, as a machine failure does; its workers end with it."""
        process = self.processes[-1]
        process.kill()
        process.communicate(timeout=SECONDS)

    def end(self) -> tuple[int, list[float], str]:
        """Wait for its end; return its exit code, losses and messages."""
        out, err = self.processes[-1].communicate(timeout=SECONDS)
        losses = json.loads(out)["losses"] if out and "losses" in json.loads(out) else []
        return self.processes[-1].returncode, losses, err

    def close(self) -> None:
        """Kill all its remaining processes."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.communicate()
