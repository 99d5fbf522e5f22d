"""Schedules, which generate compute actions, and the lowering of a plan to its program."""

from pipefit.lowering.asynchronous import Entered, as_early, period
from pipefit.lowering.local_batches import check_slices
from pipefit.lowering.lower import (
    ENDLESS,
    SCHEDULES,
    distinct_steps,
    distinct_steps_of,
    is_endless,
    loss_delay,
    lower,
    lower_drain,
    lower_evaluation,
    lower_for_torch,
    rank_programs,
    schedule_named,
    step_programs,
    updates_alone,
    whole_run,
)
from pipefit.lowering.passes.collectives import bucket_edges
from pipefit.lowering.passes.communication import (
    Following,
    answers_next,
    begins,
    following_of,
    is_backward_of,
    pass_of,
)
from pipefit.lowering.passes.recomputation import (
    RECOMPUTE,
    Recompute,
    cuts,
    recompute_decisions,
    recomputed_microbatches,
)
from pipefit.lowering.passes.torch_engine import check_for_torch, moves_of_stage, runs_gpipe
from pipefit.lowering.schedules import Compute, Endless, Schedule, computes

__all__ = [
    "ENDLESS",
    "RECOMPUTE",
    "SCHEDULES",
    "Compute",
    "Endless",
    "Entered",
    "Following",
    "Recompute",
    "Schedule",
    "answers_next",
    "as_early",
    "begins",
    "bucket_edges",
    "check_for_torch",
    "check_slices",
    "computes",
    "cuts",
    "distinct_steps",
    "distinct_steps_of",
    "following_of",
    "is_backward_of",
    "is_endless",
    "loss_delay",
    "lower",
    "lower_drain",
    "lower_evaluation",
    "lower_for_torch",
    "moves_of_stage",
    "pass_of",
    "period",
    "rank_programs",
    "recompute_decisions",
    "recomputed_microbatches",
    "runs_gpipe",
    "schedule_named",
    "step_programs",
    "updates_alone",
    "whole_run",
]
