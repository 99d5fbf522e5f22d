"""Peaks of stages whose replicas divide state, read of their programs to the byte, as the simulator does.

Only the ranks of such stages are lowered. Under 1F1B a step of 2P + 2 microbatches has every peak that a longer one
has, but for the losses of the others.

Costs: some twenty microseconds for every action of a stage's devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from pipefit.cost.stage import Costs
from pipefit.decisions import Decision
from pipefit.errors import UsageError
from pipefit.grids import Stage
from pipefit.planner.question import Question, Split
from pipefit.plans import Plan
from pipefit.schedule.recompute_settings import recompute_decisions
from pipefit.simulator.assembled import Part, Parts
from pipefit.training import Training


class Reader:
    """Reads stages of plans for one question."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.actions = 0  # in the programs that were read
        self._parts: dict[Training, Parts] = {}

    def peaks(self, split: Split, numbers: Sequence[int], decisions: Sequence[Decision] = ()) -> list[float]:
        """The peak of the fullest device of some stages, with these decisions or those that the question asks for;
        infinity where a stage cannot be carried out.
        """
        plan, parts = self._read(split, decisions)
        left_out = self.question.training.microbatches - plan.training.microbatches
        found = list[float]()
        for number in numbers:
            try:
                highest = max(part.memory().peak_bytes for part in self._devices(plan, parts, number))
            except UsageError:
                found.append(float("inf"))
                continue
            losses = plan.measurement.loss_bytes * left_out * (number == len(plan.stages) - 1)
            found.append(float(highest + losses))
        return found

    def borrowed_bytes(self, split: Split, number: int, decisions: Sequence[Decision]) -> int:
        """What the devices of a stage take of places, all together.

        Raises:
            UsageError: the stage cannot be carried out.
        """
        plan, parts = self._read(split, decisions)
        arenas = (arena for part in self._devices(plan, parts, number) for arena in part.memory().arenas)
        return sum(arena.nbytes for arena in arenas)

    def _read(self, split: Split, decisions: Sequence[Decision]) -> tuple[Plan, Parts]:
        """The plan of a split, of few microbatches, and what is known of its devices."""
        how = self._training(len(split.devices))
        plan = self._plan(split, how, decisions)
        if how not in self._parts:
            self._parts[how] = Parts(Costs(plan.measurement, how, plan.profile.measurements))
        return plan, self._parts[how]

    def _devices(self, plan: Plan, parts: Parts, number: int) -> Iterable[Part]:
        """What the devices of a stage do.

        Raises:
            UsageError: it cannot be carried out.
        """
        before = parts.actions
        found = parts.of_rank(plan, number).values()
        self.actions += parts.actions - before
        return found

    def _training(self, stages: int) -> Training:
        """The training with as few microbatches as show all peaks."""
        how, few = self.question.training, 2 * stages + 2
        if how.schedule != "1f1b" or self.question.options.recompute != "never" or how.microbatches <= few:
            return how
        return replace(how, batch_size=how.microbatch_size * few, microbatches=few)

    def _plan(self, split: Split, how: Training, decisions: Sequence[Decision]) -> Plan:
        question = self.question
        edges = [question.edges[block] for block in split.edges]
        stages = tuple(
            Stage(start=start, stop=stop, grid=split.grid(number))
            for number, (start, stop) in enumerate(pairwise(edges))
        )
        decisions = decisions or recompute_decisions(
            stages,
            question.edges,
            question.options.recompute,
            how.schedule,
            how.microbatches,
            shared=question.measurement.shared,
        )
        return Plan(
            profile=question.profile, cluster=question.cluster, training=how, stages=stages, decisions=tuple(decisions)
        )
