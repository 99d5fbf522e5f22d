"""The folder of multiprocessing's sockets, which is removed at any end of the program.

multiprocessing makes a folder `pymp-...` for the fork server's socket, and removes it when the program
ends; a killed program cannot. So the folder is made in another one, and a small process waits for the end
of a pipe that only this process holds. The pipe ends when the program does, in any way, and then the
process removes the folder. It has a separate session, which signals to a whole terminal do not reach.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import cache
from multiprocessing.spawn import get_executable
from multiprocessing.util import Finalize, get_temp_dir
from secrets import token_hex

_NAME = "pipefit-12345678"
_LONGEST_PATH = 107 - len(f"/{_NAME}/pymp-12345678/listener-12345678")  # Linux's limit for sockets
_WAITS_AND_REMOVES = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], True)"
_AFTER_MULTIPROCESSING = -101  # its own folder goes at -100


def make_sockets_folder() -> None:
    """Make multiprocessing put its folder where it will be removed; a folder that exists already stays.

    The folder is below TMPDIR, or below /tmp if the path of TMPDIR is too long for sockets.

    Raises:
        OSError: the system refuses.
    """
    usual = tempfile.tempdir
    try:
        tempfile.tempdir = _removed_at_the_end_of(os.getpid())
        get_temp_dir()
    finally:
        tempfile.tempdir = usual


@cache
def _removed_at_the_end_of(process: int) -> str:
    """Return a new folder of this process, which is removed when the process has ended."""
    usual = tempfile.gettempdir()
    below = "/tmp" if len(os.fsencode(usual)) > _LONGEST_PATH else usual  # noqa: S108 - the folder's name is its own
    folder = os.path.join(below, _NAME[:-8] + token_hex(4))
    _remove_when_we_end(folder)
    os.mkdir(folder, 0o700)
    Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=_AFTER_MULTIPROCESSING)
    return folder


def _remove_when_we_end(folder: str) -> None:
    """Start the process that waits and removes. Programs that this process starts do not inherit the pipe."""
    waits, _ = os.pipe()  # the other end stays open until this process has ended
    streams = [
        (os.POSIX_SPAWN_DUP2, waits, 0),
        *((os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_WRONLY, 0) for n in (1, 2)),
    ]
    python = os.fsdecode(get_executable())
    command = [python, "-I", "-S", "-c", _WAITS_AND_REMOVES, folder]
    try:
        os.posix_spawn(python, command, os.environ, file_actions=streams, setsid=True)
    finally:
        os.close(waits)
