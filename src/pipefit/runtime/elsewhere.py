"""A profile that is used elsewhere than it was made: on another processor, torch release or number of threads.

What kernels take for themselves differs then, and with another torch also what autograd saves. The figures of a plan
stay those of the machine that was profiled, as the printed plan says. Whoever certifies or trains elsewhere is warned,
in one sentence.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch

from pipefit.errors import PipefitWarning
from pipefit.meter.machine import this_machine
from pipefit.profiles import Assumptions
from pipefit.texts import counted

CERTIFIED = "the peaks certified are those of the profile"
TRAINED = "what this run takes may differ from its plan"


def warn_elsewhere(made: Assumptions, meaning: str, *, threads: int | None = None, callers: int = 1) -> None:
    """One `PipefitWarning` if the profile was not made for this torch and, for the CPU's kernels, this processor and
    `threads` of them; None where the number of threads is the profile's own. It is shown at the line that called the
    last of so many `callers` of ours.
    """
    if differences := list(_differences(made, threads)):
        warnings.warn(
            f"the profile was made {', '.join(differences)}: {meaning}, so profile the model again here "
            "for figures of this machine",
            PipefitWarning,
            stacklevel=2 + callers,
        )


def _differences(made: Assumptions, threads: int | None) -> Iterator[str]:
    here = this_machine(threads or made.threads)
    if made.torch != torch.__version__:
        yield f"with torch {made.torch}, not {torch.__version__}"
    if made.target != "cpu":
        return
    if made.cpu and (made.cpu, made.capability) != (here.cpu, here.capability):
        yield f"on {made.cpu} with {made.capability}, not {here.cpu} with {here.capability}"
    elif made.processor not in ("", here.details):
        yield f"on another {made.cpu}, which has other features"
    if made.threads != here.threads:
        yield f"for {counted(made.threads, 'thread')}, not {here.threads} (call torch.set_num_threads({made.threads}))"
