"""The programs of a trainer's steps, each made once, because runners keep what they have run."""

from __future__ import annotations

from pipefit.plans import Plan
from pipefit.program import Program
from pipefit.schedule import as_early, lower, lower_drain, lower_evaluation


class Programs:
    """The programs of a plan for steps of any number of microbatches."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._training: dict[tuple[int, bool, int], Program] = {}
        self._evaluations: dict[int, Program] = {}

    def training(self, microbatches: int, entered: int, *, update: bool) -> Program:
        """The program that trains so many microbatches, or ends those in flight for none.

        `entered` is the number of microbatches since the pipeline was empty, under an endless schedule.
        """
        entered = as_early(self._plan, entered)
        key = microbatches, update, entered
        if key not in self._training:
            self._training[key] = (
                lower(self._plan, microbatches=microbatches, update=update, entered=entered)
                if microbatches
                else lower_drain(self._plan, entered=entered)
            )
        return self._training[key]

    def evaluation(self, microbatches: int) -> Program:
        """The program that evaluates so many microbatches."""
        if microbatches not in self._evaluations:
            self._evaluations[microbatches] = lower_evaluation(self._plan, microbatches=microbatches)
        return self._evaluations[microbatches]
