"""Candidates (a split with a choice for each stage) and their cached evaluation by the simulator.

Peaks are the exact ledger's, seconds those of the simulated steady step. All candidates of a question share
the programs of equal stages (`simulator.assembled`). A long step under 1F1B is simulated with 3P + 2
microbatches; each further one adds the time between two backwards of the last stage. Under PipeDream 5P are
simulated from an empty pipeline, or more until their times repeat. `Evaluator.whole` simulates a long run of
all microbatches.

Cost: some ten microseconds for each action of a new stage, and half a microsecond for each other action. A
search ends after a number of actions (`Budget`), not after a time, so that its result is the same on any
machine. The unit of work is a new action.
"""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy
from dataclasses import replace
from functools import cached_property
from heapq import nsmallest
from itertools import pairwise
from math import inf
from typing import NamedTuple, NoReturn

from pipefit.errors import UsageError
from pipefit.memory import Costs, missing_bytes
from pipefit.planner.memory_choices import Menu, Menus, StageChoice, decisions_of
from pipefit.planner.options import Means
from pipefit.planner.problem import Degree, Question, Split, plan_of, shortened
from pipefit.schema.decisions import Decision, State
from pipefit.schema.devices import Member, MemberKind, Place, Share
from pipefit.schema.plan import Plan
from pipefit.simulator import Assembled, Parts
from pipefit.texts import counted

HOST = Place([Share(Member.host(), 1)])
_EACH = 100  # actions that take as long as the fixed cost of a program
_KNOWN = 16  # number of known actions that take as long as a new one
_FEW = 50  # forwards of all stages in a step up to which candidates are simulated by long runs
_STEADY = 1.1  # multiple of a steady step's seconds that the last simulated step hardly takes


class Candidate(NamedTuple):
    """A split and a choice for each of its stages."""

    split: Split
    choices: tuple[StageChoice, ...]


class Simulated:
    """Simulation of a split whose step has `microbatches`, perhaps simulated with fewer of them.

    With `quick`, its seconds are those of the last simulated step, which may differ from those of a long run.
    """

    def __init__(
        self, split: Split, simulation: Assembled, microbatches: int, *, quick: bool = False
    ) -> None:
        self.split, self.simulation, self._microbatches = split, simulation, microbatches
        self._quick = quick
        self._left_out = microbatches - simulation.plan.training.microbatches
        self._cluster = simulation.plan.cluster

    @property
    def is_complete(self) -> bool:
        """True if all microbatches of a step are simulated."""
        return not self._left_out

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """Peak bytes of every device."""
        last = self.split.grid(len(self.split.devices) - 1).devices
        losses = self.simulation.plan.measurement.loss_bytes * self._left_out
        return tuple(
            peak + losses * (device in last) for device, peak in enumerate(self.simulation.peak_bytes)
        )

    @cached_property
    def over(self) -> tuple[int, ...]:
        """Bytes by which every stage's fullest device exceeds its budget; negative if the device has room."""
        budgets = self._cluster.budgets
        grids = map(self.split.grid, range(len(self.split.devices)))
        return tuple(max(self.peaks[device] - budgets[device] for device in grid.devices) for grid in grids)

    @cached_property
    def over_bytes(self) -> int:
        """Total bytes above the memory of devices and hosts; zero if the candidate fits."""
        devices = sum(
            max(0, peak - budget) for peak, budget in zip(self.peaks, self._cluster.budgets, strict=True)
        )
        missing = missing_bytes(self.simulation.plan, self.simulation.arenas)
        return devices + sum(
            nbytes for member, nbytes in missing.items() if member.kind is not MemberKind.DEVICE
        )

    @property
    def fits(self) -> bool:
        """True if every device and every host has enough memory."""
        return self.over_bytes == 0

    @cached_property
    def seconds(self) -> float:
        """Seconds of a steady step; of the first if it is extrapolated and no state moves between steps."""
        decisions = self.simulation.plan.decisions
        moves = any(isinstance(decision.subject, State) for decision in decisions)
        quick = self._quick or (self._left_out and not self.simulation.plan.training.endless and not moves)
        return self._whole(self.simulation.step_seconds[-1] if quick else self.simulation.seconds)

    def takes(self, seconds: float) -> bool:
        """Return whether a steady step takes at least this number of seconds.

        A last simulated step that is far longer decides without a long run.
        """
        last = self._whole(self.simulation.step_seconds[-1])
        return last >= _STEADY * seconds or self.seconds >= seconds

    def _whole(self, simulated: float) -> float:
        """Return the seconds of a step with all microbatches, from those of the simulated step."""
        training = self.simulation.plan.training
        if training.endless:
            return simulated * self._microbatches / training.microbatches
        return simulated + self._left_out * self._period if self._left_out else simulated

    @property
    def _period(self) -> float:
        """Seconds from one microbatch to the next of a synchronous step, by its last stage's backwards.

        By the last ones, or under eager 1F1B, whose last backwards follow each other sooner, by those in the
        middle.
        """
        *_, last = devices = self.split.devices
        ends = sorted(end for _, end in self.simulation.backwards_run(last).values())
        if self.simulation.plan.training.schedule == "eager-1f1b":
            ends = ends[: -2 * len(devices)]
        return (ends[-1] - ends[-1 - len(devices)]) / len(devices)


class Evaluation(Simulated):
    """Simulation of a candidate."""

    def __init__(
        self, candidate: Candidate, simulation: Assembled, microbatches: int, *, quick: bool = False
    ) -> None:
        super().__init__(candidate.split, simulation, microbatches, quick=quick)
        self.candidate = candidate

    @property
    def lends(self) -> bool:
        """True if devices lend memory to others."""
        return any(choice.peers is not None for choice in self.candidate.choices)

    @property
    def order(self) -> tuple[int, float, bool, int]:
        """Sort key, lower is better: missing bytes, seconds, whether memory is lent, the highest peak."""
        return self.over_bytes, self.seconds, self.lends, max(self.peaks)


class Evaluator:
    """Evaluator of the candidates of one question."""

    def __init__(self, question: Question) -> None:
        self.question = self._asked = question
        self._every: dict[Degree, Menus] = {}  # menus with all techniques, shared with restricted evaluators
        self._menus: dict[Degree, Menus] = {}
        self._short = replace(question, training=shortened(question, question.stages))
        steps = 1 if self._is_short and question.training.endless else None
        self._parts = Parts(_costs(self._short), steps)
        self._simulated: dict[Candidate, Evaluation] = {}  # shared by all evaluators restricted from one
        self.known: dict[Candidate, Evaluation | None] = {}
        self._too_slow: dict[Candidate, float] = {}  # seconds of candidates whose memory is unknown
        self._decisions: dict[Hashable, tuple[Decision, ...]] = {}  # by stage, its layers, devices and choice
        self.work = 0  # new actions requested, and equivalent work
        self.effort = 1.0  # scale of every budget
        self.ended = False  # whether a budget has ended a search
        self._refusal = UsageError("no candidate was evaluated")  # error of the last refused candidate

    def restricted(self, means: Means) -> Evaluator:
        """Return an evaluator for fewer techniques that shares all simulations with this one.

        A simulation that one evaluator has made counts as work of every evaluator that uses it, so that the
        length of a search does not depend on other searches.
        """
        result = copy(self)
        result.question, result._menus, result._decisions = self.question.using(means), {}, {}
        result._parts, result.known, result._too_slow, result.work = self._parts.apart(), {}, {}, 0
        return result

    def begin(self, effort: float) -> None:
        """Begin a search whose budgets are scaled by `effort`."""
        self.effort, self.ended = effort, False

    @property
    def count(self) -> int:
        """Number of simulated candidates, over all evaluators that share them."""
        return len(self._simulated)

    @property
    def work_of_all(self) -> int:
        """Work of all evaluators that share simulations, each simulation counted once."""
        clocks = sum(_EACH + value.simulation.actions // _KNOWN for value in self._simulated.values())
        return clocks + self._parts.actions_of_all

    def told_end(self) -> tuple[str]:
        """Return a sentence about the limit of work that has ended a search."""
        return (f"The search stopped at its work limit, after {counted(self.count, 'simulated candidate')}.",)

    def stage_menus(self, split: Split) -> list[tuple[Menu, ...]]:
        """Return the menus of every stage of a split."""
        menus = (self._menus_of(Degree.of(split.grid(stage))) for stage in range(len(split.devices)))
        return [own.of_stage(*edges) for own, edges in zip(menus, pairwise(split.edges), strict=True)]

    def _menus_of(self, degree: Degree) -> Menus:
        """Return the menus of all blocks on one device of a stage of this degree."""
        if degree not in self._menus:
            if degree not in self._every:
                self._every[degree] = Menus(self._asked.of_one(degree))
            self._menus[degree] = self._every[degree].restricted(self.question.means)
        return self._menus[degree]

    def kept_peak(self, split: Split, stage: int) -> float:
        """Return the peak of a stage's fullest device if the stage keeps everything, read from its program.

        Infinity if the stage cannot be carried out.
        """
        plan, before = self._plan(self._short, self.kept(split)), self._parts.actions
        try:
            highest = self._parts.peak_of_rank(plan, stage)
        except UsageError:
            return inf
        finally:
            self.work += self._parts.actions - before
        left_out = self.question.training.microbatches - plan.training.microbatches
        return float(highest + plan.measurement.loss_bytes * left_out * (stage == len(plan.stages) - 1))

    @property
    def pinned(self) -> bool:
        """True if the question's options fix the recomputation, so that nothing is chosen."""
        return self.question.options.recompute != "never"

    def decisions(self, candidate: Candidate) -> tuple[Decision, ...]:
        """Return the decisions of a candidate's plan."""
        made, menus = list[Decision](), self.stage_menus(candidate.split)
        for stage, choice in enumerate(candidate.choices):
            key = stage, candidate.split.edges[stage : stage + 2], candidate.split.grid(stage), choice
            if key not in self._decisions:
                own = decisions_of(stage, choice, menus[stage], HOST)
                ahead = self.question.means.ahead
                self._decisions[key] = tuple(one if ahead else replace(one, ahead=0) for one in own)
            made += self._decisions[key]
        return tuple(made)

    def kept(self, split: Split) -> Candidate:
        """Return the candidate of a split that keeps everything."""
        return Candidate(
            split, tuple(StageChoice.keep(stop - start) for start, stop in pairwise(split.edges))
        )

    def evaluate(
        self, candidate: Candidate, *, below: float = inf, at_least: float = 0.0
    ) -> Evaluation | None:
        """Return the evaluation of a candidate; None if its decisions cannot be carried out.

        None also if its step does not take less than `below` seconds; its memory is then not computed. A
        step that takes `at_least` these seconds, by a lower bound, is not simulated.
        """
        if at_least >= below:
            self.work += _EACH
            return None
        if candidate not in self.known and self._too_slow.get(candidate, -inf) < below:
            self._simulate(candidate, below)
        return self.known.get(candidate)

    def kept_at(self, split: Split) -> Evaluation:
        """Return the evaluation of a split with only the recomputation that the question requests.

        Raises:
            UsageError: the candidate cannot be carried out.
        """
        result = self.evaluate(self.kept(split))
        return self.refuse() if result is None else result

    def refuse(self) -> NoReturn:
        """Raise the error of the last candidate that could not be carried out.

        Raises:
            UsageError: always.
        """
        raise self._refusal

    def fastest(self, count: int) -> list[Evaluation]:
        """Return the `count` fastest simulated candidates that fit, the fastest first."""
        return nsmallest(
            count, (value for value in self._simulated.values() if value.fits), key=lambda none: none.order
        )

    def whole(self, candidate: Candidate) -> Evaluation:
        """Return the evaluation of a candidate that can be carried out, by a long run of all microbatches."""
        count = self.question.training.microbatches
        if self._is_short:
            return Evaluation(
                candidate, Assembled(self._plan(self.question, candidate), self._whole_parts), count
            )
        result = self.evaluate(candidate)
        assert result is not None, "it can be carried out"
        return Evaluation(candidate, result.simulation, count) if self._is_quick else result

    @cached_property
    def _whole_parts(self) -> Parts:
        """Shared programs of stages in steps of all microbatches."""
        return Parts(_costs(self.question))

    @property
    def _is_short(self) -> bool:
        """True if a step is simulated with another number of microbatches than it has."""
        return self.question.training != self._short.training

    @property
    def _is_quick(self) -> bool:
        """True if long runs of all candidates would take too long."""
        how, few = self.question.training, self.question.stages * self.question.training.microbatches <= _FEW
        return how.endless and not self._is_short and not few

    def _simulate(self, candidate: Candidate, below: float) -> None:
        """Record the evaluation of a candidate, or that its step takes `below` seconds or more."""
        before = self._parts.actions
        try:
            simulation = Assembled(self._plan(self._short, candidate), self._parts)
            self.work += _EACH + simulation.actions // _KNOWN
            result = self._simulated.get(candidate) or Evaluation(
                candidate, simulation, self.question.training.microbatches, quick=self._is_quick
            )
            # each of these raises UsageError if the decisions cannot be carried out
            if below < inf and result.takes(below):
                self._too_slow[candidate] = below
                return
            if result.fits:
                _ = result.seconds
            self.known[candidate] = self._simulated[candidate] = result
        except UsageError as error:
            self._refusal = error
            self.known[candidate] = None
        finally:
            self.work += self._parts.actions - before

    def _plan(self, question: Question, candidate: Candidate) -> Plan:
        decisions = None if self.pinned else self.decisions(candidate)
        return plan_of(question, candidate.split, decisions=decisions)


def _costs(question: Question) -> Costs:
    return Costs(question.measurement, question.training, question.profile.measurements)


class Budget:
    """Work that a part of a search may still do, scaled by the evaluator's effort."""

    def __init__(self, evaluator: Evaluator, work: int) -> None:
        self._evaluator = evaluator
        self._until = evaluator.work + round(work * evaluator.effort)

    def ends(self) -> bool:
        """Return whether the budget is spent; the evaluator records that it ended a search."""
        if self._evaluator.work < self._until:
            return False
        self._evaluator.ended = True
        return True
