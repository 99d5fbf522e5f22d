"""pipefit tells whether, how and how fast a PyTorch model fits given devices, and then trains it.

    import pipefit

    task    = pipefit.Task(module, batch=make_batch, loss=loss_fn)
    plan    = pipefit.plan(task, pipefit.Cluster.preset("dgx1-v100"), batch_size=64)
    trainer = pipefit.Trainer(task, plan)                # in each worker
    loss    = trainer.step(batch)

Importing pipefit does not import torch; each name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipefit.capture import Task
    from pipefit.capture.model import chain
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
    from pipefit.largest.overview import fit
    from pipefit.largest.task_plans import plan
    from pipefit.lowering import lower
    from pipefit.own_loop import Handle, LoopPlan, apply
    from pipefit.planner import plan_again
    from pipefit.profiler import profile
    from pipefit.report.show import html, text
    from pipefit.runtime import Trainer, certify, certify_numbers, train
    from pipefit.schema.cluster import Cluster
    from pipefit.schema.json_io import load, load_cluster, save
    from pipefit.schema.plan import Plan
    from pipefit.schema.profile import ModelProfile
    from pipefit.schema.program import Program
    from pipefit.schema.trace import Trace
    from pipefit.schema.training import Training
    from pipefit.simulator import simulate
    from pipefit.torch_engine import Pipeline, certify_pipeline, pipeline


__all__ = [
    "Cluster",
    "FileError",
    "Handle",
    "InfeasibleError",
    "LoopPlan",
    "LossNotFinite",
    "ModelProfile",
    "OutOfMemory",
    "PipefitError",
    "PipefitWarning",
    "Pipeline",
    "Plan",
    "Program",
    "Task",
    "Trace",
    "Trainer",
    "Training",
    "UsageError",
    "WorkerFailed",
    "__version__",
    "apply",
    "certify",
    "certify_numbers",
    "certify_pipeline",
    "chain",
    "fit",
    "html",
    "load",
    "load_cluster",
    "lower",
    "pipeline",
    "plan",
    "plan_again",
    "profile",
    "save",
    "simulate",
    "text",
    "train",
]

__version__ = "0.1.0"

_HOMES = {
    "capture": ("Task",),
    "capture.model": ("chain",),
    "schema.cluster": ("Cluster",),
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
    "schema.json_io": ("load", "load_cluster", "save"),
    "largest.overview": ("fit",),
    "largest.task_plans": ("plan",),
    "schema.plan": ("Plan",),
    "planner": ("plan_again",),
    "schema.profile": ("ModelProfile",),
    "profiler": ("profile",),
    "report.show": ("html", "text"),
    "schema.program": ("Program",),
    "runtime": ("Trainer", "certify", "certify_numbers", "train"),
    "lowering": ("lower",),
    "own_loop": ("Handle", "LoopPlan", "apply"),
    "simulator": ("simulate",),
    "torch_engine": ("Pipeline", "certify_pipeline", "pipeline"),
    "schema.trace": ("Trace",),
    "schema.training": ("Training",),
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
