"""Imported by the process that forks workers, and by no other: what workers need, and a home for their own children.

A worker's children, such as those of a data loader, outlive a worker that is killed. Here they are waited for when they
end, so that none stays as a zombie of the training program, which takes in orphans as well (`orphans_adopted`).
"""

from __future__ import annotations

import warnings

import pipefit.runtime.launch.worker  # noqa: F401 - forks have it
from pipefit.processes import adopt_orphans

warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
adopt_orphans(True)
