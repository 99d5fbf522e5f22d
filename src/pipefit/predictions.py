"""What is predicted for a plan: peaks, step time, and what the processes of GPUs take, beside what devices have."""

from __future__ import annotations

from dataclasses import dataclass

from pipefit.cluster import Cluster
from pipefit.compactions import Compaction
from pipefit.errors import UsageError
from pipefit.texts import counted
from pipefit.trace import AllocatorPeaks
from pipefit.validation import check_types

TIGHT = 0.95  # of a GPU: what is not counted, such as cuDNN's workspaces, may take the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What is predicted for a plan: the peak of every device in bytes, and seconds per step.

    Seconds come of those of the layers, which are estimates where the profile holds none (`Measurement.estimated`).
    `utilisation` is the share of a step in which each device computes; empty where it is not known. `compactions` say
    what recomputing and moving does for each stage. `processes` are what a dry run found that the process of each
    device takes of a GPU, None for devices without tensors; empty where there was none.

    Raises:
        UsageError: a negative peak or time, or not as many figures as peaks.
    """

    __pydantic_config__ = {"extra": "forbid"}

    peak_bytes: tuple[int, ...]
    step_seconds: float
    utilisation: tuple[float, ...] = ()
    compactions: tuple[Compaction, ...] = ()
    processes: tuple[AllocatorPeaks | None, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        for name, told in (("processes", self.processes), ("utilisation", self.utilisation)):
            if told and len(told) != len(self.peak_bytes):
                raise UsageError(
                    f"a prediction of {counted(len(self.peak_bytes), 'peak')} tells the {name} of as many devices, or "
                    f"of none, not of {len(told)}"
                )
        for name, figures in (
            ("peak_bytes", self.peak_bytes),
            ("step_seconds", (self.step_seconds,)),
            ("utilisation", self.utilisation),
        ):
            if wrong := [figure for figure in figures if not figure >= 0]:
                raise UsageError(f"{name} of a prediction are zero or more, not {wrong[0]}")

    def is_tight(self, cluster: Cluster, device: int) -> bool:
        """Whether little is left of a GPU: for its process, or for tensors where that is not known."""
        process = self.processes[device] if self.processes else None
        if process is None:
            return is_tight(cluster, device, self.peak_bytes[device])
        return cluster.backend == "cuda" and process.process_bytes >= TIGHT * cluster.devices[device].memory_bytes


def is_tight(cluster: Cluster, device: int, peak_bytes: int) -> bool:
    """Whether so high a peak leaves little of a GPU's budget."""
    return cluster.backend == "cuda" and peak_bytes >= TIGHT * cluster.budgets[device]


def fullness(part: float, *, tight: bool) -> str:
    """How full a device is, in a cell of a table: `80.0 %`, `96.2 % tight` where little is left, or `110.0 % over`.

    Where tensors leave much of the budget, and the process of a GPU little of the GPU, it says so: `84.9 %, process
    tight`.
    """
    why = " tight" if part >= TIGHT else ", process tight"
    return f"{100 * part:.1f} %" + (" over" if part > 1 else why if tight else "")
