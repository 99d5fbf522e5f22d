"""The capture planner: the lowest peak as CAPTURE predicts it, over cuts and the degree of every stage.

The memory of a worker is predicted from profile runs, as in mCAP: of every single block, and of its addition
to the block before. Runs for every tensor-parallel degree at several batch sizes, with the training's number
of microbatches, give a straight line over the batch size, so the target batch size need not have been run. A
stage of d replicas is predicted at a d-th of the batch. Dynamic programming then finds the cuts and degrees
with the lowest predicted peak of the fullest worker, which CAPTURE searches for.

The runs keep all microbatches of a step, as GPipe does. CAPTURE predicts 1F1B from them too, without its
early release of activations. With `early_release`, the runs have the number of microbatches that a stage
holds in flight.

For comparison; `exact` has true peaks. Cost: milliseconds, because runs are read from the exact closed forms.
(Dreuning, Verstoep, Bal and van Nieuwpoort, HiPC 2023.)
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

import numpy as np

from pipefit.planner.bounds import in_flight
from pipefit.planner.closed_forms.bands import stage_peak
from pipefit.planner.closed_forms.ranges import ranges_of
from pipefit.planner.closed_forms.surroundings import surroundings
from pipefit.planner.hybrid import HybridSearch
from pipefit.planner.hybrid.programme import Cost, Floats, StageRequest
from pipefit.planner.memory_choices import ranges
from pipefit.planner.problem import Degree, PlannerResult, Question
from pipefit.schema.plan import Objective
from pipefit.schema.profile import Measurement

_RUN = 1, 3  # position of the run: the second of three stages, which receives and sends


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """Options of the prediction: whether it includes the early release of 1F1B, unlike CAPTURE."""

    early_release: bool = False


def capture(question: Question, options: CaptureOptions | None = None) -> PlannerResult:
    """Return the plan with the lowest predicted peak of the fullest worker; all devices count as equal."""
    search, runs = HybridSearch(question, shards=question.shards[:1]), BlockRuns(question)
    early = options is not None and options.early_release

    def cost(left: int, choice: StageRequest) -> Cost:
        how = question.training
        held = in_flight(how, 0, left) if early else how.microbatches
        return Cost.of(runs.predicted(choice.degree, held) + search.barred_ranges(choice))

    result = search.best(cost)
    return PlannerResult(result.split, Objective.ESTIMATED_PEAK, result.value, result.evaluated)


class BlockRuns:
    """Profile runs of single blocks and of pairs, and the lines through them.

    Runs at all microbatch sizes of the profile, or at some `sizes`.
    """

    def __init__(self, question: Question, sizes: Collection[int] | None = None) -> None:
        self.question, self.sizes = question, sizes
        self._lines = cache(self._lines_of)

    def predicted(self, degree: Degree, microbatches: int) -> Floats:
        """Return the predicted peaks of a worker that keeps these microbatches, for all ranges of blocks."""
        samples = self.question.training.microbatch_size / degree.data
        isolated, added = (
            fixed + slope * samples
            for fixed, slope in self._lines(degree.tensor, degree.sequences, microbatches)
        )
        result: Floats = (
            isolated[:, None] - added[:, None] + ranges(np.concatenate(([0.0], np.cumsum(added))))
        )
        rows, columns = np.ogrid[: result.shape[0], : result.shape[1]]
        return np.where(columns <= rows, np.inf, result)

    def _lines_of(
        self,
        tensor: int,
        sequences: bool,
        microbatches: int,
    ) -> tuple[tuple[Floats, Floats], tuple[Floats, Floats]]:
        """Return lines (fixed part, slope over samples in a microbatch) of every block, alone and added."""
        of_degree = [
            measurement
            for measurement in self.question.profile.measurements
            if measurement.way[1:] == (tensor, sequences)
        ]
        measured = [one for one in of_degree if self.sizes is None or one.microbatch_size in self.sizes]
        runs = [self._run(one, microbatches) for one in measured]
        sizes = np.array([one.microbatch_size for one in measured], float)
        return _line(sizes, np.array([alone for alone, _ in runs])), _line(
            sizes, np.array([more for _, more in runs])
        )

    def _run(self, measurement: Measurement, microbatches: int) -> tuple[Floats, Floats]:
        """Return the peak of every single block, and its addition to the block before.

        The first block adds its own peak.
        """
        band = ranges_of(measurement, self.question.edges, microbatches).band(2)
        peaks = stage_peak(band, surroundings("gpipe", *_RUN, microbatches)).astype(float)
        alone = peaks[0]
        pairs = peaks[1, :-1] if len(peaks) > 1 else alone[:0]
        return alone, np.concatenate((alone[:1], pairs - alone[:-1]))


def _line(sizes: Floats, peaks: Floats) -> tuple[Floats, Floats]:
    """Return the least-squares line through peaks at these sizes; a constant for a single size."""
    middle, mean = sizes - sizes.mean(), peaks.mean(axis=0)
    spread = float(middle @ middle)
    slope: Floats = middle @ peaks / spread if spread else np.zeros_like(mean)
    return mean - slope * sizes.mean(), slope
