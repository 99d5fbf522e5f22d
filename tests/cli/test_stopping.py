"""Signals end a command at any moment: with a message, the code that shells expect, and no half-written
file.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from pipefit.cli import main
from pipefit.cli.progress import Stopped, cleared_away, stoppable
from pipefit.schema.json_io import load
from support.gallery_samples import sampled

ROOT = Path(__file__).parents[2]
SIGNALLED = str(ROOT / "tests" / "support" / "signalled_commands.py")
MODEL = "support.signalled_commands:stubborn"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
COMMANDS = {
    "profile": f"profile {MODEL} -b 2 -o made.json",
    "plan": f"plan {MODEL} -b 2 --cluster emulated:2x1MiB -o made.json",
    "fit": f"fit {MODEL} -b 2 --cluster emulated:2x64KiB --grow layers --to 64 -o made.json",
    "simulate": "simulate plan.json -o made.json",
    "certify": f"certify plan.json {MODEL} -o made.json",
    "train": f"train plan.json {MODEL} --steps 200 --save runs --every 5 --metrics made.jsonl -o made.json",
    "checkpoint": "checkpoint saved -o made.safetensors",
    "demo": "demo --steps 2",
    "doctor": "doctor",
}


GRID = f"plan {MODEL} --cluster emulated:4x1MiB --data 2 --tensor 2 -b 4 --batch-size 8 -o grid.json"
IN_A_GRID = COMMANDS["train"].replace("plan.json", "grid.json")


@pytest.fixture(autouse=True, scope="module")
def no_signal_is_ignored() -> Iterator[None]:
    """Handle all signals, as in a terminal: a background job inherits that some are ignored."""
    ignored = [number for number in SIGNALS if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a folder with a profile, a plan and a checkpoint of the model."""
    here, before = tmp_path_factory.mktemp("folder"), Path.cwd()
    os.chdir(here)
    try:
        assert main(f"profile {MODEL} -b 2 -o profile.json".split()) == 0
        assert (
            main(
                [
                    "plan",
                    "profile.json",
                    "--cluster",
                    "emulated:2x1MiB",
                    "--batch-size",
                    "4",
                    "-o",
                    "plan.json",
                ]
            )
            == 0
        )
        assert main(f"train plan.json {MODEL} --steps 1 --save saved".split()) == 0
    finally:
        os.chdir(before)
    return here


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a separate process that, unlike background programs, handles Ctrl-C, and leaves
    nothing among temporary files or in shared memory.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])}
    with tempfile.TemporaryDirectory() as temporary:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env=environment | {"OMP_NUM_THREADS": "1", "TMPDIR": temporary},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert left_by(temporary) == []
    return done


def left_by(temporary: str) -> list[str]:
    """Return files in a folder of temporary files, and the processes that use it, after they had time to
    end.
    """
    until, word = time.monotonic() + 60, f"TMPDIR={temporary}".encode()
    while True:
        found = [name for name in os.listdir(temporary) if not name.startswith("torchinductor_")]
        for process in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # it has ended, or belongs to another user
                found += [process.parent.name] if word in process.read_bytes().split(b"\0") else []
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.1)


def word(number: signal.Signals) -> str:
    return "pipefit: stopped\n" if number == signal.SIGINT else f"pipefit: stopped by {number.name}\n"


def assert_whole(folder: Path, before: set[str]) -> None:
    """Assert that the command's files are whole, and remove them."""
    for name in set(os.listdir(folder)) - before - {"__pycache__", "runs"}:
        if name == "made.json":
            load(folder / name)
        assert name in ("made.json", "made.jsonl", "made.safetensors")
        (folder / name).unlink()


@pytest.mark.parametrize(
    ("command", "number"),
    sampled(
        [("profile", signal.SIGINT), ("certify", signal.SIGTERM), ("fit", signal.SIGHUP)],
        often=[("certify", signal.SIGTERM)],
    ),
)
def test_a_signal_that_is_swallowed_ends_the_command(
    command: str, number: signal.Signals, folder: Path
) -> None:
    """The signal arrives in a layer that swallows every exception, as code between Python and C++ may."""
    before = set(os.listdir(folder))
    words = shlex.split(COMMANDS[command].replace(MODEL, f"{MODEL} --set number={int(number)}"))
    done = run(folder, SIGNALLED, number.name, "1000", *words)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", word(number))
    assert set(os.listdir(folder)) - {"__pycache__"} == before - {"__pycache__"}


@pytest.mark.gallery
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_signal_ends_a_command_whenever_it_comes(command: str, folder: Path) -> None:
    """At eight random moments the command ends with a message and the code of the signal, or with its result
    if the signal came too late.
    """
    assert_ends(COMMANDS[command], folder)


@pytest.mark.gallery
@pytest.mark.timeout(1800)
def test_a_signal_ends_replicas_and_shards_whenever_it_comes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two of each, a worker may wait for another in a layer or in a sum; no process is left."""
    monkeypatch.chdir(folder)
    assert main(shlex.split(GRID)) == 0
    before = processes_in(folder)
    assert_ends(IN_A_GRID, folder)
    assert processes_in(folder) <= before


def processes_in(folder: Path) -> set[str]:
    """Return the processes with this working directory."""
    return {
        one.parent.name for one in Path("/proc").glob("[0-9]*/cwd") if Path(os.path.realpath(one)) == folder
    }


def assert_ends(command: str, folder: Path) -> None:
    """Assert that a command that gets each signal twice, at random moments, reports it and leaves only whole
    files.
    """
    random, before = Random(command), set(os.listdir(folder))
    for number in SIGNALS * 2:
        words = shlex.split(command)
        done = run(
            folder,
            SIGNALLED,
            number.name,
            str(random.uniform(0, 8)),
            *words,
        )
        if done.returncode == 0:
            assert "stopped" not in done.stderr
        else:
            assert done.returncode == 128 + number, done.stderr
            *reached, last = done.stderr.splitlines(keepends=True)
            assert last == word(number) and "Traceback" not in done.stderr and "terminate" not in done.stderr
            assert not reached or reached[-1].startswith("pipefit: steps done: ")
        assert_whole(folder, before)
        if (folder / "runs").exists():
            subprocess.run(["rm", "-r", folder / "runs"], check=True)


@pytest.mark.parametrize("number", SIGNALS)
def test_what_has_to_be_cleared_away_is(number: signal.Signals) -> None:
    """With workers, a signal raises an exception, even in a command that would end at once; then the state is
    restored.
    """
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with (
            pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Stopped),
            stoppable(at_once=True),
            cleared_away(),
        ):
            signal.raise_signal(number)
        assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    finally:
        signal.signal(signal.SIGINT, usual)


def test_a_signal_that_comes_as_the_process_ends_has_its_code(folder: Path) -> None:
    """The interpreter may take seconds to exit, with all its imports."""
    ending = (
        "import os, signal, sys; from pipefit.cli import main; sys.argv = ['pipefit', 'clusters']; main()"
    )
    done = run(folder, "-c", f"{ending}; os.kill(os.getpid(), signal.SIGQUIT)")
    assert (done.returncode, done.stderr) == (131, word(signal.SIGQUIT))
    assert "dgx1-v100" in done.stdout


def test_what_a_parent_has_ignored_is_ignored() -> None:
    """A command under nohup survives its terminal."""
    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable(at_once=True), cleared_away():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, usual)
