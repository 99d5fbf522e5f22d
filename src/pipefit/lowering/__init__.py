"""Schedules, which generate compute actions, and the lowering of a plan to its program."""

from pipefit.lowering.asynchronous import Entered, as_early
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
    rank_programs,
    schedule_named,
    step_programs,
    updates_alone,
    whole_run,
)
from pipefit.lowering.schedules import Compute, Endless, Schedule

__all__ = [
    "ENDLESS",
    "SCHEDULES",
    "Compute",
    "Endless",
    "Entered",
    "Schedule",
    "as_early",
    "distinct_steps",
    "distinct_steps_of",
    "is_endless",
    "loss_delay",
    "lower",
    "lower_drain",
    "lower_evaluation",
    "rank_programs",
    "schedule_named",
    "step_programs",
    "updates_alone",
    "whole_run",
]
