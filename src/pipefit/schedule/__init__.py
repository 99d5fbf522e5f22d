"""Schedules (pure generators of compute actions) and the lowering of a plan into a program."""

from pipefit.schedule.lower import SCHEDULES, Schedule, compute_actions, lower, lower_evaluation
from pipefit.schedule.situations import Situation, situations

__all__ = ["SCHEDULES", "Schedule", "Situation", "compute_actions", "lower", "lower_evaluation", "situations"]
