"""The folder of multiprocessing's sockets is removed at any end of a program."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from pipefit.runtime.launch import forks

SECONDS = 300  # for a loaded machine
SCRIPT = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(forks.__file__).parent)!r})
import forks
from multiprocessing.util import get_temp_dir
def mkdir(folder, mode):
    usual(folder, mode)
    os.kill(os.getpid(), signal.SIGKILL)
if "at once" in sys.argv:
    usual, os.mkdir = os.mkdir, mkdir
forks.make_sockets_folder()
forks.make_sockets_folder()
print(get_temp_dir(), flush=True)
"""
ENDS = {
    "as usual": "",
    "at once": "",
    "without cleaning up": "os._exit(3)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "killed with its whole group": "os.killpg(0, signal.SIGKILL)",
    "hung up": "os.killpg(0, signal.SIGHUP)",
    "while it forks": "os.fork() and os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("end", ENDS)
def test_however_a_program_ends_the_folder_goes(end: str) -> None:
    """The folder is removed at every kind of end, also if the program is killed while creating it."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="sockets-") as folder:  # a short path
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT + ENDS[end], end],
            env={**os.environ, "TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            start_new_session=True,
            check=False,
        )
        made = Path(run.stdout.strip())
        assert run.stderr == ""
        assert (made.parent.parent == Path(folder)) is (end != "at once")
        if end == "as usual":
            assert not os.listdir(folder)
        until = time.monotonic() + SECONDS
        while left := os.listdir(folder):
            assert time.monotonic() < until, left
            time.sleep(0.01)


def test_what_the_program_made_before_stays_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing folder of multiprocessing is used and kept, and the folder for temporary files stays
    unchanged.
    """
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(forks, "get_temp_dir", (tmp_path / "theirs").mkdir)
    forks.make_sockets_folder()
    assert tempfile.tempdir is None
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
