"""Sleep that the parent of workers counts, and no other time: who hangs does so for the same seconds on any machine.

A loaded machine may take seconds for what takes none elsewhere. So where a test is about what training says of silence,
the parent's watch goes on only while a worker sleeps on purpose.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipefit.runtime.launch import launch
from pipefit.runtime.launch.launch import Watch

_FOLDER = "PIPEFIT_TEST_ASLEEP"  # in which those who sleep have a file


def sleep(seconds: float) -> None:
    """Sleep for so long."""
    until = time.monotonic() + seconds
    sleep_until(lambda: time.monotonic() >= until)


def sleep_until(over: Callable[[], bool]) -> None:
    """Sleep until it is over."""
    tell()
    while not over():
        time.sleep(0.01)
    if (mark := _mark()) is not None:
        mark.unlink()


def stop() -> None:
    """Stop this process, as SIGSTOP does."""
    tell()
    os.kill(os.getpid(), signal.SIGSTOP)


def tell() -> None:
    """This process falls asleep, if anybody wants to know."""
    if (mark := _mark()) is not None:
        mark.touch()


def counted(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """From now on the parent counts the time in which workers sleep, and no other."""
    passed, before = 0.0, time.monotonic()

    def clock() -> float:
        nonlocal passed, before
        now = time.monotonic()
        passed, before = passed + (now - before) * any(folder.iterdir()), now
        return passed

    folder.mkdir()
    patch.setenv(_FOLDER, str(folder))
    patch.setattr(launch, "Watch", lambda longest: Watch(longest, clock))


def _mark() -> Path | None:
    """The file of this process."""
    return Path(os.environ[_FOLDER], str(os.getpid())) if _FOLDER in os.environ else None
