"""Imported by the process that forks workers: it removes the folder of its socket as it ends.

multiprocessing gives the socket a name in a folder, which the parent removes as it ends; a parent that is killed
cannot. The process that forks ends when the parent and all workers have ended, and removes the folder then. If the
parent is killed while it still imports torch, it ends after that.

`pipefit.runtime.processes` says whose folder this is in the environment that the process starts with. Imported by any
other process, this module does nothing.
"""

from __future__ import annotations

import atexit
import os
import shutil

PARENT, FOLDER = "_PIPEFIT_FORKS_FOR", "_PIPEFIT_FORKS_IN"


def _remove(parent: int, folder: str) -> None:
    """A parent that lives needs the folder for its next server. Forks never come here: they end with `os._exit`."""
    if os.getppid() != parent:
        shutil.rmtree(folder, ignore_errors=True)


_parent, _folder = os.environ.pop(PARENT, ""), os.environ.pop(FOLDER, "")
if _parent:
    atexit.register(_remove, int(_parent), _folder)
