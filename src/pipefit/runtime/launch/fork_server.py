"""Preloaded module of the fork server, imported by no other process: it adopts orphans of workers.

A worker's children, such as those of a data loader, outlive a worker that is killed. The fork server waits
for them, so that none stays as a zombie of the training program, which adopts orphans too
(`orphans_adopted`).
"""

from __future__ import annotations

import gc
import warnings

from torch.overrides import resolve_name

import pipefit.runtime.launch.worker  # noqa: F401 - forks have it
from pipefit.processes import adopt_orphans
from pipefit.schema.json_text import adapter
from pipefit.schema.layer_costs import Kernel

# Made once for all workers, each of which would take a quarter of a second: a reader, and torch's names.
adapter(Kernel)
resolve_name(abs)
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
adopt_orphans(True)
gc.collect()
gc.freeze()  # workers share the memory of these objects, and their collections pass over them
