"""Simulations of the splits of one question, whose stages may have several devices.

Plans that are compared differ in a stage or two, so that what their other devices do is known (`simulator.assembled`).

Costs: some ten microseconds for each action of a device that is new, and half a microsecond for each of the others. The
unit of work is a new action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from itertools import accumulate, pairwise

from pipefit.cost.stage import Costs
from pipefit.cost.time import layer_seconds
from pipefit.decisions import Decision
from pipefit.planner.degrees import Degree
from pipefit.planner.driver import plan_of
from pipefit.planner.hybrid.programme import Way
from pipefit.planner.hybrid.tables import DegreeTables
from pipefit.planner.question import Question, Split
from pipefit.schedule.recompute_settings import Recompute
from pipefit.simulator.assembled import Assembled, Parts

_KNOWN = 16  # actions of devices that are known take as long as a new one


class Simulations:
    """Simulates splits of a question; `work` is what that has taken."""

    def __init__(self, question: Question) -> None:
        self.question, self.work = question, 0
        self._tables: dict[Degree, DegreeTables] = {}

    def share_of(self, work: int) -> int:
        """The part of a budget of work that the question's effort allows."""
        return round(work * self.question.options.effort)

    def of(self, split: Split, decisions: tuple[Decision, ...] = ()) -> Assembled:
        """The simulation of a split with these decisions, or those that the question asks for.

        Raises:
            UsageError: it cannot be carried out, as where what replicas exchange cannot be divided.
        """
        before = self._parts.actions
        try:
            found = Assembled(plan_of(self.question, split, decisions=decisions or None), self._parts)
        finally:
            self.work += self._parts.actions - before
        self.work += found.actions // _KNOWN
        return found

    def may_fit(self, split: Split, recompute: Recompute = "never") -> bool:
        """Whether stages that recompute so, and whose state stays on their devices, fit by lower bounds of their peaks.

        Costs nothing beside a simulation.
        """
        budgets = self.question.cluster.budgets
        needs = enumerate(self._least_bytes(split, recompute))
        return all(need <= min(budgets[device] for device in split.grid(number).devices) for number, need in needs)

    def least_bytes(self, split: Split, recompute: Recompute = "never") -> float:
        """The least that the fullest device of such stages needs."""
        return max(self._least_bytes(split, recompute))

    def _least_bytes(self, split: Split, recompute: Recompute) -> Iterator[float]:
        """Lower bounds of the peaks of stages."""
        stages = len(split.devices)
        for number, (start, stop) in enumerate(pairwise(split.edges)):
            grid = split.grid(number)
            degree = Degree.of(grid)
            if degree not in self._tables:
                self._tables[degree] = DegreeTables(self.question, degree)
            yield self._tables[degree].peak(stages - number, Way(grid.shard, recompute), start, stop)

    def least(self, split: Split) -> float:
        """What the passes of the slowest stage of a split take, on the fastest kind of device."""
        found = []
        for number, blocks in enumerate(pairwise(split.edges)):
            start, stop = self.question.layers(*blocks)
            before = self._before(Degree.of(split.grid(number)))
            found.append(before[stop] - before[start])
        return self.question.training.microbatches * max(found)

    @cached_property
    def _before(self) -> Callable[[Degree], Sequence[float]]:
        """Seconds of the passes through all layers before each, on the fastest kind of device; by degree."""
        question = self.question
        kinds = {device.kind.key: device.kind for device in question.cluster.devices}.values()

        @cache
        def before(degree: Degree) -> Sequence[float]:
            measured = question.measured(degree)
            of_kinds = zip(*(layer_seconds(measured, kind, question.training.dtype) for kind in kinds), strict=True)
            fewest = [min(of.forward + of.backward for of in times) for times in of_kinds]
            return [0.0, *accumulate(fewest[: len(question.profile.layers)])]

        return before

    @cached_property
    def _parts(self) -> Parts:
        question = self.question
        return Parts(Costs(question.measurement, question.training, question.profile.measurements))
