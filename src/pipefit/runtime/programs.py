"""The programs of a trainer's steps, each made once, because runners keep what they have run."""

from __future__ import annotations

from pipefit.plans import Plan
from pipefit.program import Program
from pipefit.schedule import Entered, as_early, lower, lower_drain, lower_evaluation


class Programs:
    """The programs of a plan for steps of any number of microbatches."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._training: dict[tuple[int, bool, int, int, int | None], Program] = {}
        self._evaluations: dict[tuple[int, int | None], Program] = {}

    def training(self, microbatches: int, entered: Entered, *, update: bool, last: int | None = None) -> Program:
        """The program that trains so many microbatches, or ends those in flight for none.

        `last` are the samples of the last one; the plan's unless given. `entered` is what has entered under an endless
        schedule.
        """
        count, steps = as_early(self._plan, entered.microbatches), min(entered.steps, 2)
        last = self._rows(last)
        key = microbatches, update, count, steps, last
        if key not in self._training:
            self._training[key] = (
                lower(self._plan, microbatches=microbatches, last=last, update=update, entered=count, steps=steps)
                if microbatches
                else lower_drain(self._plan, entered=count, steps=steps)
            )
        return self._training[key]

    def evaluation(self, microbatches: int, *, last: int | None = None) -> Program:
        """The program that evaluates so many microbatches, the `last` of so many samples."""
        key = microbatches, self._rows(last)
        if key not in self._evaluations:
            self._evaluations[key] = lower_evaluation(self._plan, microbatches=microbatches, last=key[1])
        return self._evaluations[key]

    def _rows(self, last: int | None) -> int | None:
        """The samples of the last microbatch, if the program depends on them: where replicas divide these."""
        plan = self._plan
        return last if plan.is_sliced and last != plan.training.microbatch_size else None
