"""Preloaded module of the fork server, imported by no other process: it adopts orphans of workers.

A worker's children, such as those of a data loader, outlive a worker that is killed. The fork server waits
for them, so that none stays as a zombie of the training program, which adopts orphans too
(`orphans_adopted`).
"""

from __future__ import annotations

import warnings

import pipefit.runtime.launch.worker  # noqa: F401 - forks have it
from pipefit.processes import adopt_orphans

warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
adopt_orphans(True)
