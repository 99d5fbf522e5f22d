"""The planners of CAPTURE and Alpa: their predictions, their objectives, and the cost of ignoring early
release.
"""

from __future__ import annotations

from itertools import combinations, pairwise, product
from random import Random

import numpy as np
import pytest

from pipefit.planner import Question, alpa, capture, plan
from pipefit.planner.baselines.capture import BlockRuns, CaptureOptions
from pipefit.planner.problem import Degree
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from support.microbatch_size_profiles import sized, written
from support.synthetic_models import AMPLE, devices, even, keeping, plain


def question(seed: int, schedule: str = "gpipe", layers: int = 4, count: int = 4) -> Question:
    rng = Random(seed)
    profile = sized(rng.choice((plain, even))(rng, layers), 8, 4, 2)
    how = Training(batch_size=24, microbatches=3, schedule=schedule)
    return Question(profile=profile, cluster=devices(*[AMPLE] * count), training=how)


def by_hand(
    asked: Question, runs: BlockRuns, edges: tuple[int, ...], degrees: tuple[int, ...], held: list[int]
) -> float:
    return max(
        float(runs.predicted(Degree(degree, 1), n)[start, stop])
        for (start, stop), degree, n in zip(pairwise(edges), degrees, held, strict=True)
    )


@pytest.mark.parametrize(("seed", "early"), list(product(range(8), (False, True))))
def test_no_plan_is_predicted_to_have_a_lower_peak(seed: int, early: bool) -> None:
    """No plan over all cuts, numbers of stages and degrees has a lower prediction, with and without 1F1B's
    early release.
    """
    asked = question(seed, "1f1b")
    runs, found = BlockRuns(asked), capture(asked, CaptureOptions(early_release=early))
    lowest = float("inf")
    for stages in range(1, 5):
        held = [min(3, stages - stage) if early else 3 for stage in range(stages)]
        for cuts in combinations(range(1, 4), stages - 1):
            for degrees in product((1, 2, 4), repeat=stages):
                if sum(degrees) <= 4:
                    lowest = min(lowest, by_hand(asked, runs, (0, *cuts, 4), degrees, held))
    assert found.value == pytest.approx(lowest)


@pytest.mark.parametrize("seed", range(10))
def test_runs_of_one_block_and_of_two_are_predicted_as_they_are(seed: int) -> None:
    """The line interpolates the measured peaks, which are linear here: it is exact between them."""
    asked = question(seed, layers=3, count=3)
    made = written(asked.profile, asked.cluster, asked.training, (0, 1, 2, 3), (1, 1, 1))
    peak = Simulation(made).peak_bytes[1]
    predicted = BlockRuns(asked).predicted(Degree(1, 1), 3)
    assert predicted[1, 2] == pytest.approx(peak)


def test_a_line_through_peaks_at_several_sizes_foretells_another() -> None:
    """Runs at two microbatch sizes predict a third, to the byte if bytes are linear."""
    rng = Random(4)
    chain = keeping(rng, widths=[8, 6, 9, 4], weights=[5, 7, 3])
    few, all_sizes = sized(chain, 8, 2), sized(chain, 8, 4, 2)
    how = Training(batch_size=16, microbatches=2, schedule="gpipe")
    predicted = [
        BlockRuns(Question(profile=one, cluster=devices(AMPLE, AMPLE), training=how)).predicted(
            Degree(2, 1), 2
        )
        for one in (few, all_sizes)
    ]
    assert np.allclose(*[one[np.isfinite(one)] for one in predicted])


def test_being_blind_to_early_release_costs_memory_under_1f1b() -> None:
    """A plan that knows that early 1F1B stages hold more microbatches has a lower true peak."""
    profile = sized(keeping(Random(1), widths=[20] * 9, weights=[4] * 8), 4, 2)
    how = Training(batch_size=64, microbatches=16)
    asked = Question(profile=profile, cluster=devices(*[AMPLE] * 4), training=how)
    peaks = {}
    for early in (False, True):
        split = capture(asked, CaptureOptions(early_release=early)).split
        degrees = [grid.data for grid in split.grids]
        peaks[early] = max(Simulation(written(profile, asked.cluster, how, split.edges, degrees)).peak_bytes)
    best = plan(profile, asked.cluster, how, objective="peak").prediction
    assert best and max(best.peak_bytes) <= peaks[True] < peaks[False]


def formula(asked: Question, edges: tuple[int, ...], degrees: tuple[int, ...]) -> float:
    """Return the sum of the stages' seconds plus M - 1 times the slowest, without gradient
    sums and updates.
    """
    parts = []
    for (start, stop), degree in zip(pairwise(edges), degrees, strict=True):
        of = asked.measured(Degree(degree, 1))
        costs = [*of.costs, of.loss][start : stop + (stop == len(of.costs))]
        parts.append(sum(work.seconds or 0.0 for cost in costs for work in (cost.forward, cost.backward)))
    return sum(parts) + (asked.training.microbatches - 1) * max(parts)


@pytest.mark.parametrize("seed", range(8))
def test_alpa_finds_nearly_the_lowest_by_its_formula(seed: int) -> None:
    """Alpa's plan is near the best of all plans by its formula, within the resolution of its candidate values
    for the slowest stage, sums and updates.
    """
    asked = question(seed)
    found = alpa(asked)
    lowest = min(
        formula(asked, (0, *cuts, 4), degrees)
        for stages in range(1, 5)
        for cuts in combinations(range(1, 4), stages - 1)
        for degrees in product((1, 2, 4), repeat=stages)
        if sum(degrees) <= 4
    )
    own = formula(asked, found.split.edges, tuple(grid.data for grid in found.split.grids))
    assert lowest <= own <= lowest * 1.25


def test_memory_only_decides_whether_a_plan_of_alpa_fits() -> None:
    """With less memory Alpa's plan has a lower peak, and takes longer."""
    chain = keeping(Random(3), widths=[2] * 5, weights=[400] * 4)
    how = Training(batch_size=24, microbatches=3)
    asked = Question(profile=sized(chain, 8, 4, 2), cluster=devices(*[AMPLE] * 4), training=how)
    free = plan(asked.profile, asked.cluster, asked.training, planner="alpa")
    assert free.prediction
    tight = devices(*[max(free.prediction.peak_bytes) - 1] * 4)
    made = plan(asked.profile, tight, asked.training, planner="alpa")
    assert made.prediction and free.provenance and made.provenance
    assert max(made.prediction.peak_bytes) < max(free.prediction.peak_bytes)
    assert made.provenance.value >= free.provenance.value
