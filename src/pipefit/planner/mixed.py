"""The fastest of plans with any degrees, by simulation: those that are estimated to be the fastest are simulated.

They are looked for among whole replicas that keep everything, with plans beside them (`planner.nearby`), and then
among all stages that may divide state, or run again in part, so that neither ever makes a plan slower; of many blocks
on many devices only if nothing fits otherwise. What runs again is trimmed (`hybrid.trimming`).

Costs: the search of `planner.hybrid` for each, and a simulation for every number of stages, from the one of the
fewest estimated seconds on, until estimates are longer than what was simulated, or actions enough were.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipefit.decisions import Decision
from pipefit.planner.driver import plan_of
from pipefit.planner.hybrid import Hybrid, candidates, fastest
from pipefit.planner.hybrid.programme import WHOLE
from pipefit.planner.hybrid.reading import Reader
from pipefit.planner.hybrid.trimming import trimmed
from pipefit.planner.nearby import Timed, nearby
from pipefit.planner.question import Question, Split
from pipefit.simulator import Simulation

_CLOSE = 0.02  # the part of a step by which estimates may be too long
_MOST = 8  # plans that are simulated
_WORTH = 0.01  # the part of a step that dividing state, or running again, has to gain
_CANDIDATES = 2_000_000  # stages that are compared where plans that keep everything fit
_ACTIONS = 60_000  # in the programs of plans after which no other is simulated


class Mixed(NamedTuple):
    """A plan that fits, with its seconds by simulation."""

    question: Question
    split: Split
    seconds: float
    decisions: tuple[Decision, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether no replicas divide anything, and everything is kept."""
        return not self.decisions and all(grid.shard == "none" for grid in self.split.grids)

    @property
    def peaks(self) -> tuple[int, ...]:
        """The peak of every device in bytes."""
        return Simulation(plan_of(self.question, self.split, decisions=self.decisions or None)).peak_bytes


def mixed(question: Question) -> Mixed | None:
    """The fastest plan; None if none fits. Stages save memory where that is faster, or where nothing else fits."""
    first, every = question.shards[:1], question.shards
    again = question.options.recompute == "never" and question.means.recompute != "never"
    best = _simulated(question, fastest(question, _MOST, first), None)
    near = nearby(question, None if best is None else Timed(best.split, best.seconds))
    best = None if near is None else Mixed(question, near.split, near.seconds)
    if first == every and not again:
        return best
    if best is not None and candidates(question, every, again=again) > _CANDIDATES:
        return best
    at_most = float("inf") if best is None else best.seconds * (1 + _CLOSE)
    others = fastest(question, _MOST, every, at_most, again=again)
    if best is not None:
        others = [one for one in others if any(stage.way != WHOLE for stage in one.stages)]
    return _simulated(question, others, best)


def _simulated(question: Question, estimated: Sequence[Hybrid], best: Mixed | None) -> Mixed | None:
    """The fastest of some plans that are estimated to be fast, or the one of before, if they gain too little."""
    actions, enough, reader = 0, float("inf") if best is None else best.seconds * (1 - _WORTH), Reader(question)
    for found in estimated:
        if best is not None and (found.value > best.seconds * (1 + _CLOSE) or actions > _ACTIONS):
            break
        decisions = trimmed(question, found, reader)
        simulation = Simulation(plan_of(question, found.split, decisions=decisions or None))
        seconds, actions = simulation.step_seconds[-1], actions + simulation.actions + reader.actions
        if seconds < enough:
            best, enough = Mixed(question, found.split, seconds, decisions), seconds
    return best
