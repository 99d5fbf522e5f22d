"""Schedules, which are generators of compute actions, and the lowering of a plan to its program."""

from pipefit.schedule.lower import SCHEDULES, lower, lower_evaluation, schedule_named
from pipefit.schedule.order import Compute, Schedule

__all__ = ["SCHEDULES", "Compute", "Schedule", "lower", "lower_evaluation", "schedule_named"]
