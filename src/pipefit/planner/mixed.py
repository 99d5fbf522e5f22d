"""The fastest of plans with any degrees that keep everything on their devices: those estimated fastest are simulated.

Costs: the exact search once (`planner.hybrid`), and a simulation for every number of stages, from the one of the
fewest estimated seconds on, until estimates are longer than what was simulated, or actions enough were. Then
plans beside them are simulated (`planner.nearby`).
"""

from __future__ import annotations

from typing import NamedTuple

from pipefit.planner.driver import plan_of
from pipefit.planner.hybrid import fastest
from pipefit.planner.nearby import Timed, nearby
from pipefit.planner.question import Question, Split
from pipefit.simulator import Simulation

_CLOSE = 0.02  # the part of a step by which estimates may be too long
_MOST = 8  # plans that are simulated
_ACTIONS = 60_000  # in the programs of plans after which no other is simulated


class Mixed(NamedTuple):
    """A plan that fits and keeps everything, with its seconds by simulation; `actions` were simulated to find it."""

    question: Question
    split: Split
    seconds: float
    actions: int

    @property
    def peaks(self) -> tuple[int, ...]:
        """The peak of every device in bytes."""
        return Simulation(plan_of(self.question, self.split)).peak_bytes


def mixed(question: Question) -> Mixed | None:
    """The fastest plan; None if none fits."""
    best: Mixed | None = None
    actions = 0
    for found in fastest(question, _MOST):
        if best is not None and (found.value > best.seconds * (1 + _CLOSE) or actions > _ACTIONS):
            break
        simulation = Simulation(plan_of(question, found.split))
        seconds, actions = simulation.step_seconds[-1], actions + simulation.actions
        if best is None or seconds < best.seconds:
            best = Mixed(question, found.split, seconds, 0)
    near = nearby(question, None if best is None else Timed(best.split, best.seconds))
    return None if near is None else Mixed(question, near.split, near.seconds, actions)
