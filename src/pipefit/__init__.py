"""pipefit makes a PyTorch model fit: will it fit, how, and how fast; then it trains that way.

    import pipefit

    task    = pipefit.Task(module, batch=make_batch, loss=loss_fn)
    plan    = pipefit.plan(task, pipefit.Cluster.preset("dgx1-v100"), batch_size=64)
    trainer = pipefit.Trainer(task, plan)                # in each worker
    loss    = trainer.step(batch)

Importing this imports neither torch nor anything else: a name is fetched when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipefit.capture import Task
    from pipefit.capture.model import chain
    from pipefit.cluster import Cluster
    from pipefit.errors import (
        FileError,
        InfeasibleError,
        LossNotFinite,
        OutOfMemory,
        PipefitError,
        PipefitWarning,
        UsageError,
        WorkerFailed,
    )
    from pipefit.files import load, load_cluster, save
    from pipefit.fitting.overview import fit
    from pipefit.planned import plan
    from pipefit.planner import plan_again
    from pipefit.plans import Plan
    from pipefit.profiler import profile
    from pipefit.profiles import ModelProfile
    from pipefit.program import Program
    from pipefit.runtime import Trainer, certify, certify_numbers, train
    from pipefit.schedule import lower
    from pipefit.simulator import simulate
    from pipefit.trace import Trace
    from pipefit.training import Training

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "FileError",
    "InfeasibleError",
    "LossNotFinite",
    "ModelProfile",
    "OutOfMemory",
    "PipefitError",
    "PipefitWarning",
    "Plan",
    "Program",
    "Task",
    "Trace",
    "Trainer",
    "Training",
    "UsageError",
    "WorkerFailed",
    "__version__",
    "certify",
    "certify_numbers",
    "chain",
    "fit",
    "load",
    "load_cluster",
    "lower",
    "plan",
    "plan_again",
    "profile",
    "save",
    "simulate",
    "train",
]

_HOMES = {
    "capture": ("Task",),
    "capture.model": ("chain",),
    "cluster": ("Cluster",),
    "errors": (
        "FileError",
        "InfeasibleError",
        "LossNotFinite",
        "OutOfMemory",
        "PipefitError",
        "PipefitWarning",
        "UsageError",
        "WorkerFailed",
    ),
    "files": ("load", "load_cluster", "save"),
    "fitting.overview": ("fit",),
    "planned": ("plan",),
    "plans": ("Plan",),
    "planner": ("plan_again",),
    "profiles": ("ModelProfile",),
    "profiler": ("profile",),
    "program": ("Program",),
    "runtime": ("Trainer", "certify", "certify_numbers", "train"),
    "schedule": ("lower",),
    "simulator": ("simulate",),
    "trace": ("Trace",),
    "training": ("Training",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'pipefit' has no attribute {name!r}")
    value = getattr(import_module(f"pipefit.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
