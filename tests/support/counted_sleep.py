"""Sleep that is the only time the parent of workers counts: hangs take the same seconds on any machine.

A loaded machine may take seconds for work that takes microseconds elsewhere. In tests of timeouts, the
parent's clock therefore advances only while a worker sleeps on purpose.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pipefit.runtime.launch import launch
from pipefit.runtime.launch.launch import Watch

if TYPE_CHECKING:  # workers import this module, and pytest takes them half a second
    import pytest

_FOLDER = "PIPEFIT_TEST_ASLEEP"  # in which those who sleep have a file


def sleep(seconds: float) -> None:
    """Sleep for some seconds."""
    until = time.monotonic() + seconds
    sleep_until(lambda: time.monotonic() >= until)


def sleep_until(over: Callable[[], bool]) -> None:
    """Sleep until a condition holds."""
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
    """Record that this process falls asleep, if the parent counts it."""
    if (mark := _mark()) is not None:
        mark.touch()


def counted(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Count only the time in which workers sleep."""
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
    """Return the file of this process."""
    return Path(os.environ[_FOLDER], str(os.getpid())) if _FOLDER in os.environ else None
