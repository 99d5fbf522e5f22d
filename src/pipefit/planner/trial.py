"""What a question leaves open, chosen: an arrangement; and what a search of it has found so far, a trial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipefit.planner.degrees import SINGLE, Degree
from pipefit.planner.joint import Search, Searched
from pipefit.planner.question import Question
from pipefit.predictions import is_tight


class Arrangement(NamedTuple):
    """A schedule, a number of stages, a microbatch size, and how many replicas and shards every stage has."""

    schedule: str
    stages: int
    microbatch_size: int
    degree: Degree = SINGLE


class Trial(NamedTuple):
    """An arrangement that was searched, its best plan so far, and how much work that took.

    Of replicas, the question, the search and its plan are those of one of them (`planner.replicas`), and they take
    `apart` seconds to add their gradients up.
    """

    arrangement: Arrangement
    question: Question
    search: Search
    searched: Searched
    work: int
    apart: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether the plan fits."""
        return self.searched.evaluation.fits

    @property
    def order(self) -> tuple[int, float, int]:
        """Lower is better."""
        missing, seconds, _, peak = self.searched.evaluation.order
        return missing, seconds + self.apart, peak

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.order[1]

    @property
    def tight(self) -> bool:
        """Whether the plan leaves a GPU hardly any room."""
        return leaves_no_room(self.question, self.searched.evaluation.peaks)

    def longer(self) -> Trial:
        """The same after a search with the effort that the question asks for."""
        return self._replace(searched=self.search.best(self.question.options.effort), work=self.search.work)


def leaves_no_room(question: Question, peaks: Sequence[int]) -> bool:
    """Whether these peaks leave a GPU hardly any room."""
    return any(is_tight(question.cluster, device, peak) for device, peak in enumerate(peaks))
