"""The capture planner: the lowest peak as CAPTURE predicts it, over cuts and the degree of every stage.

What a worker needs is predicted from profile runs, as in mCAP: of every block alone, and of what it adds to the one
before it. They are made for every number of tensor-parallel shards at several batch sizes, through which a straight
line is laid, for the number of microbatches of the training; so the target's own batch size need not have been run. A
stage of d replicas is predicted at a d-th of the batch. Then the partitioning and the degrees with the lowest
predicted peak of the fullest worker are found; dynamic programming finds what CAPTURE searches.

The runs keep all microbatches of a step, as GPipe does. CAPTURE predicts 1F1B from them too, blind to activations that
are released early. With `early_release`, the runs have as many microbatches as a stage holds in flight.

Good for comparison; `exact` has true peaks. Costs: milliseconds, because runs are read from the exact closed forms
instead of being made. (Dreuning, Verstoep, Bal and van Nieuwpoort, HiPC 2023.)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

import numpy as np

from pipefit.planner.bounds import in_flight
from pipefit.planner.choices import ranges
from pipefit.planner.closed_forms.bands import stage_peak
from pipefit.planner.closed_forms.ranges import ranges_of
from pipefit.planner.closed_forms.surroundings import surroundings
from pipefit.planner.degrees import Degree
from pipefit.planner.hybrid import Search
from pipefit.planner.hybrid.programme import Choice, Cost, Floats
from pipefit.planner.problem import Found, Question
from pipefit.schema.plan import Objective
from pipefit.schema.profile import Measurement

_RUN = 1, 3  # runs read the peak of the second of three stages, which receives and sends


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """Whether what 1F1B releases early is predicted, as CAPTURE does not."""

    early_release: bool = False


def capture(question: Question, options: CaptureOptions | None = None) -> Found:
    """The plan with the lowest predicted peak of the fullest worker. All devices count as alike."""
    search, runs = Search(question, shards=question.shards[:1]), Runs(question)
    early = options is not None and options.early_release

    def cost(left: int, choice: Choice) -> Cost:
        how = question.training
        held = in_flight(how, 0, left) if early else how.microbatches
        return Cost.of(runs.predicted(choice.degree, held) + search.barred_ranges(choice))

    found = search.best(cost)
    return Found(found.split, Objective.ESTIMATED_PEAK, found.value, found.evaluated)


class Runs:
    """Profile runs of single blocks and of pairs, and the lines through them: of all sizes of microbatches that the
    profile has, or of some `sizes`.
    """

    def __init__(self, question: Question, sizes: Collection[int] | None = None) -> None:
        self.question, self.sizes = question, sizes
        self._lines = cache(self._lines_of)

    def predicted(self, degree: Degree, microbatches: int) -> Floats:
        """The predicted peak of a worker, for all ranges of blocks, that keeps so many microbatches."""
        samples = self.question.training.microbatch_size / degree.data
        isolated, added = (
            fixed + slope * samples for fixed, slope in self._lines(degree.tensor, degree.sequences, microbatches)
        )
        found: Floats = isolated[:, None] - added[:, None] + ranges(np.concatenate(([0.0], np.cumsum(added))))
        rows, columns = np.ogrid[: found.shape[0], : found.shape[1]]
        return np.where(columns <= rows, np.inf, found)

    def _lines_of(
        self,
        tensor: int,
        sequences: bool,
        microbatches: int,
    ) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """Of every block, alone and added: the fixed part and the slope over samples in a microbatch."""
        of_degree = [one for one in self.question.profile.measurements if one.way[1:] == (tensor, sequences)]
        measured = [one for one in of_degree if self.sizes is None or one.microbatch_size in self.sizes]
        runs = [self._run(one, microbatches) for one in measured]
        sizes = np.array([one.microbatch_size for one in measured], float)
        return _line(sizes, np.array([alone for alone, _ in runs])), _line(sizes, np.array([more for _, more in runs]))

    def _run(self, measurement: Measurement, microbatches: int) -> tuple[Floats, Floats]:
        """Peaks of every block alone, and what each adds to the one before it; the first adds what it has alone."""
        band = ranges_of(measurement, self.question.edges, microbatches).band(2)
        peaks = stage_peak(band, surroundings("gpipe", *_RUN, microbatches)).astype(float)
        alone = peaks[0]
        pairs = peaks[1, :-1] if len(peaks) > 1 else alone[:0]
        return alone, np.concatenate((alone[:1], pairs - alone[:-1]))


def _line(sizes: Floats, peaks: Floats) -> tuple[Floats, Floats]:
    """The straight line through peaks at these sizes, by least squares; a constant where there is one size alone."""
    middle, mean = sizes - sizes.mean(), peaks.mean(axis=0)
    spread = float(middle @ middle)
    slope: Floats = middle @ peaks / spread if spread else np.zeros_like(mean)
    return mean - slope * sizes.mean(), slope
