"""The programs of a trainer's steps, each made once, because runners keep what they have run."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypedDict

from pipefit.plans import Plan
from pipefit.program import Program
from pipefit.schedule import Entered, as_early, lower, lower_drain, lower_evaluation


class _Before(TypedDict):
    """What has entered a pipeline, as `lower` takes it."""

    entered: int
    steps: int
    smaller: tuple[tuple[int, int], ...]


class Programs:
    """The programs of a plan for steps of any number of microbatches."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._training: dict[Hashable, Program] = {}
        self._evaluations: dict[tuple[int, int | None], Program] = {}

    def training(self, microbatches: int, entered: Entered, *, update: bool, last: int | None = None) -> Program:
        """The program that trains so many microbatches, or ends those in flight for none.

        `last` are the samples of the last one; the plan's unless given. `entered` is what has entered under an endless
        schedule.
        """
        count, steps = as_early(self._plan, entered.microbatches), min(entered.steps, 2)
        last = self._rows(last)
        key = microbatches, update, count, steps, last, entered.smaller
        if key not in self._training:
            before: _Before = {"entered": count, "steps": steps, "smaller": entered.smaller}
            self._training[key] = (
                lower(self._plan, microbatches=microbatches, last=last, update=update, **before)
                if microbatches
                else lower_drain(self._plan, **before)
            )
        return self._training[key]

    def then(self, entered: Entered, sizes: Sequence[int]) -> Entered:
        """What has entered after a step of microbatches of so many samples."""
        count, last, stages = len(sizes), self._rows(sizes[-1]), len(self._plan.stages)
        before = [(number - count, samples) for number, samples in entered.smaller]
        own = [] if last is None else [(-1, last)]
        smaller = [one for one in (*before, *own) if one[0] >= -stages]  # no more are ever in flight
        return Entered(entered.microbatches + count, entered.steps + 1, tuple(smaller))

    def evaluation(self, microbatches: int, *, last: int | None = None) -> Program:
        """The program that evaluates so many microbatches, the `last` of so many samples."""
        key = microbatches, self._rows(last)
        if key not in self._evaluations:
            self._evaluations[key] = lower_evaluation(self._plan, microbatches=microbatches, last=key[1])
        return self._evaluations[key]

    def _rows(self, last: int | None) -> int | None:
        """The samples of the last microbatch, if it has others than all, and the program depends on them."""
        plan = self._plan
        return last if plan.names_rows and last != plan.training.microbatch_size else None
