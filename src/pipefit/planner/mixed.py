"""The fastest of plans with any degrees, by simulation: those that are estimated to be the fastest are simulated.

They are looked for among whole replicas that keep everything, with plans beside them (`planner.nearby`), and then
among all stages that may divide state, or run again in part, so that neither ever makes a plan slower; of many blocks
on many devices only if nothing fits otherwise. Where plans take much longer than one that is known, of
another microbatch size, few of them are looked at. What runs again is trimmed (`hybrid.trimming`),
and the best plan's goes to hosts or peers instead where that is faster (`planner.swapping`).

Costs: the search of `planner.hybrid` for each, and a simulation for every number of stages, from the one of the
fewest estimated seconds on, until estimates are longer than what was simulated, or a budget of work has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pipefit.decisions import Decision
from pipefit.planner.common_plans import common_plan
from pipefit.planner.hybrid import Hybrid, candidates, fastest
from pipefit.planner.hybrid.programme import WHOLE
from pipefit.planner.hybrid.reading import Reader
from pipefit.planner.hybrid.trimming import trimmed
from pipefit.planner.nearby import Timed, nearby
from pipefit.planner.question import Found, Question, Split
from pipefit.planner.simulations import Simulations
from pipefit.planner.swapping import Swapped, swapped
from pipefit.provenance import Objective
from pipefit.simulator.assembled import Assembled

_CLOSE = 0.02  # the part of a step by which estimates may be too long
_FAR = 0.05  # the part of a step by which the first plan may be slower than one that is known
_MOST = 8  # plans that are simulated
_WORTH = 0.01  # the part of a step that dividing state, or running again, has to gain
_CANDIDATES = 2_000_000  # stages that are compared where plans that keep everything fit
_WORK = 60_000  # actions that were read, after which no other plan is simulated
_LITTLE = 5_000  # the same where plans are far slower than one that is known
_PASSES = 50_000  # of microbatches through stages, above which a simulation takes several seconds


class Mixed(NamedTuple):
    """A plan that fits, with its seconds and its peaks by simulation."""

    question: Question
    split: Split
    seconds: float
    peaks: tuple[int, ...]  # of every device, in bytes
    decisions: tuple[Decision, ...] = ()
    simulation: Assembled | None = None  # where it is the last one that was made
    estimated: float = float("inf")  # seconds of the plan of its question that is estimated to be the fastest

    @property
    def is_whole(self) -> bool:
        """Whether no replicas divide anything, and everything is kept."""
        return not self.decisions and all(grid.shard == "none" for grid in self.split.grids)

    def found(self, evaluated: int, remarks: tuple[str, ...] = ()) -> Found:
        """The plan, as planners say it, after so many were simulated."""
        decisions = self.decisions if self.question.options.recompute == "never" else self.decisions or None
        return Found(
            self.split,
            Objective.STEP,
            self.seconds,
            evaluated,
            proven=False,
            decisions=decisions,
            remarks=remarks,
            simulation=self.simulation,
        )


def commonly(question: Question, at_most: float) -> Mixed | None:
    """The fastest common plan (`planner.common_plans`) of less than `at_most` seconds; None if none fits."""
    found = common_plan(question, at_most)
    return None if found is None else Mixed(question, *found)


def mixed(question: Question, at_most: float = float("inf"), below: float = float("inf")) -> Mixed | None:
    """The fastest plan in which no state moves; None if none fits. Stages save memory where that is faster, or where
    nothing else fits.

    With a plan that fits and takes `at_most` seconds, slower ones are not looked for: there may be None too. So there
    is where simulations take long, and no plan is estimated to take less than the one that is known was (`below`).
    """
    estimated = fastest(question, _MOST, question.shards[:1], at_most * (1 + _CLOSE))
    least = estimated[0].value if estimated else float("inf")
    if _is_long(question) and at_most < float("inf") and least >= below:
        return None
    found = _mixed(question, estimated, at_most)
    return found and found._replace(estimated=least)


def otherwise(known: Sequence[Mixed], schedules: Sequence[str]) -> Iterator[Mixed]:
    """The fastest of some plans under other schedules, if that keeps everything; where it fits and is faster."""
    best = min(known, key=lambda one: one.seconds, default=None)
    if best is None or not best.is_whole:
        return
    how = best.question.training
    for schedule in schedules:
        if schedule == how.schedule:
            continue
        question = replace(best.question, training=replace(how, schedule=schedule))
        simulation = Simulations(question).of(best.split)
        if simulation.step_seconds[-1] < best.seconds and simulation.fits:
            yield Mixed(question, best.split, simulation.step_seconds[-1], simulation.peak_bytes, (), simulation)


def _is_long(question: Question) -> bool:
    """Whether many microbatches go through many stages, where all devices have one."""
    widest = max(degree.devices for degree in question.degrees)
    return -(-len(question.cluster.devices) // widest) * question.training.microbatches > _PASSES


def _mixed(question: Question, estimated: Sequence[Hybrid], at_most: float) -> Mixed | None:
    """The fastest plan of those that are estimated to be fast, and of those beside them."""
    first, every = question.shards[:1], question.shards
    again = question.options.recompute == "never" and question.means.recompute != "never"
    simulations = Simulations(question)
    best = _simulated(simulations, estimated, None, at_most)
    if _is_enough(simulations, best, at_most):
        return None
    known = Timed(best.split, best.seconds, best.simulation) if best and best.simulation else None
    near = nearby(simulations, known, at_most)
    best = near and Mixed(question, near.split, near.seconds, near.simulation.peak_bytes, (), near.simulation)
    if first == every and not again:
        return best
    at_most = at_most if best is None else min(at_most, best.seconds)
    if at_most < float("inf") and candidates(question, every, again=again) > _CANDIDATES:
        return best
    others = fastest(question, _MOST, every, at_most * (1 + _CLOSE), again=again)
    if best is not None:
        others = [one for one in others if any(stage.way != WHOLE for stage in one.stages)]
    return _swapped(simulations, _simulated(simulations, others, best))


def _swapped(simulations: Simulations, best: Mixed | None) -> Mixed | None:
    """A plan, or a faster one in which hosts or peers have tensors that it computed again."""
    if best is None or not best.decisions:
        return best
    found = swapped(simulations, best.split, Swapped(best.decisions, best.seconds, best.peaks))
    return best._replace(decisions=found.decisions, seconds=found.seconds, peaks=found.peaks, simulation=None)


def _simulated(
    simulations: Simulations, estimated: Sequence[Hybrid], best: Mixed | None, at_most: float = float("inf")
) -> Mixed | None:
    """The fastest of some plans that are estimated to be fast, or the one of before, if they gain too little; of a few
    of them if they take much longer than `at_most` seconds.
    """
    enough = float("inf") if best is None else best.seconds * (1 - _WORTH)
    question, reader = simulations.question, Reader(simulations.question)
    until = simulations.work + simulations.share_of(_WORK)
    for found in estimated:
        ended = simulations.work + reader.actions > until
        ended = ended or _is_enough(simulations, best, at_most)
        if best is not None and (ended or found.value > best.seconds * (1 + _CLOSE)):
            break
        decisions = trimmed(question, found, reader)
        simulation = simulations.of(found.split, decisions)
        seconds = simulation.step_seconds[-1]
        if seconds < enough:
            best = Mixed(question, found.split, seconds, simulation.peak_bytes, decisions, simulation)
            enough = seconds
    return best


def _is_enough(simulations: Simulations, best: Mixed | None, at_most: float) -> bool:
    """Whether the best plan that a little work has found is far slower than one that is known."""
    return best is not None and best.seconds > at_most * (1 + _FAR) and simulations.work > simulations.share_of(_LITTLE)
