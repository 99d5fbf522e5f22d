"""Candidates: a split, and a choice for each of its stages; what the simulator says of one, computed once.

Peaks are the exact ledger's, seconds those of the simulated steady step. All candidates of a question share the costs
of their stages. Costs: about ten microseconds for each action of the program, of which most goes into lowering.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from pipefit.cost.stage import Costs
from pipefit.decisions import Decision
from pipefit.errors import UsageError
from pipefit.places import Member, MemberKind, Place, Share
from pipefit.planner.choices import StageChoice, decisions_of
from pipefit.planner.driver import plan_of
from pipefit.planner.menus import Menu, Menus
from pipefit.planner.question import Question, Split
from pipefit.plans import Plan
from pipefit.schedule.room import missing_bytes
from pipefit.simulator import Simulation

HOST = Place([Share(Member.host(), 1)])


class Candidate(NamedTuple):
    """A split, and what is done on each of its stages."""

    split: Split
    choices: tuple[StageChoice, ...]


class Evaluation:
    """What the simulator says of a candidate."""

    def __init__(self, candidate: Candidate, simulation: Simulation) -> None:
        self.candidate, self.simulation = candidate, simulation
        self._cluster = simulation.plan.cluster

    @cached_property
    def peaks(self) -> tuple[int, ...]:
        """The peak of every device."""
        return self.simulation.peak_bytes

    @cached_property
    def over(self) -> tuple[int, ...]:
        """Bytes by which every stage's device is above its budget; negative where it has room."""
        budgets = self._cluster.budgets
        return tuple(self.peaks[device] - budgets[device] for device in self.candidate.split.devices)

    @cached_property
    def over_bytes(self) -> int:
        """Bytes above what devices and hosts have, all together; zero if the candidate fits."""
        devices = sum(max(0, peak - budget) for peak, budget in zip(self.peaks, self._cluster.budgets, strict=True))
        missing = missing_bytes(self.simulation.plan, self.simulation.arenas)
        return devices + sum(nbytes for member, nbytes in missing.items() if member.kind is not MemberKind.DEVICE)

    @property
    def fits(self) -> bool:
        """Whether every device and every host has the memory."""
        return self.over_bytes == 0

    @cached_property
    def seconds(self) -> float:
        """Seconds of a steady step."""
        return self.simulation.step_seconds[-1]

    @property
    def order(self) -> tuple[int, float, int]:
        """Lower is better: bytes that are missing, then seconds, then the highest peak."""
        return self.over_bytes, self.seconds, max(self.peaks)


class Evaluator:
    """Evaluates candidates of one question."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.menus = Menus(question)
        self.costs = Costs(question.measurement, question.training)
        self.known: dict[Candidate, Evaluation | None] = {}

    @property
    def count(self) -> int:
        """How many candidates have been simulated."""
        return len(self.known)

    def stage_menus(self, split: Split) -> list[tuple[Menu, ...]]:
        """The menus of every stage of a split."""
        return [self.menus.of_stage(*edges) for edges in pairwise(split.edges)]

    @property
    def pinned(self) -> bool:
        """Whether the question says what is recomputed, so that nothing is chosen."""
        return self.question.options.recompute != "never"

    def decisions(self, candidate: Candidate) -> tuple[Decision, ...]:
        """The decisions of a candidate's plan."""
        stages = enumerate(zip(candidate.choices, self.stage_menus(candidate.split), strict=True))
        return tuple(d for stage, (choice, menus) in stages for d in decisions_of(stage, choice, menus, HOST))

    def kept(self, split: Split) -> Candidate:
        """The candidate of a split that does nothing with its tensors."""
        return Candidate(split, tuple(StageChoice.keep(stop - start) for start, stop in pairwise(split.edges)))

    def evaluate(self, candidate: Candidate) -> Evaluation | None:
        """What the simulator says; None where the decisions cannot be carried out."""
        if candidate not in self.known:
            self.known[candidate] = self._evaluated(candidate)
        return self.known[candidate]

    def best(self, candidates: Sequence[Candidate]) -> Evaluation | None:
        """The best of some candidates; None if none can be carried out."""
        found = [one for one in map(self.evaluate, candidates) if one is not None]
        return min(found, key=lambda one: one.order, default=None)

    def _evaluated(self, candidate: Candidate) -> Evaluation | None:
        try:
            found = Evaluation(candidate, Simulation(self.plan(candidate), costs=self.costs))
            _ = found.over_bytes, found.seconds  # both refuse what cannot be carried out
        except UsageError:
            return None
        return found

    def plan(self, candidate: Candidate) -> Plan:
        """The plan of a candidate."""
        decisions = None if self.pinned else self.decisions(candidate)
        return plan_of(self.question, candidate.split, decisions=decisions)
