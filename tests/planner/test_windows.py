"""The bounds that prune the exact search, against splits that they must not exclude."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from pipefit.planner.driver import stage_peaks
from pipefit.planner.exact import Bounds, solve
from pipefit.planner.problem import PlanOptions, Question
from support.gallery_samples import seeds
from support.synthetic_models import WHOLE_STAGES, block_sizes, devices, hostile, profile, skewed, training


def question(seed: int, schedule: str, blocks: int, stages: int) -> Question:
    """Build blocks of one layer each, or of up to three on average."""
    layers = blocks * (1, 1, 3)[seed % 3]
    chain = hostile(Random(seed), layers) if seed % 3 == 0 else skewed(Random(seed), layers)
    return Question(
        profile=profile(chain, blocks=block_sizes(Random(seed), layers, blocks)),
        cluster=devices(*[1 << 40] * stages),
        training=training(schedule, 9),
        options=PlanOptions(recompute=WHOLE_STAGES[seed % len(WHOLE_STAGES)]),
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seed", seeds(12, of=40))
def test_no_split_is_excluded_at_the_level_that_it_reaches(seed: int, schedule: str) -> None:
    """At a split's highest peak, each of its stages lies within its window."""
    asked = question(seed, schedule, 40, 8)
    bounds = Bounds(asked)
    rng = Random(seed)
    for _ in range(10):
        edges = (0, *sorted(rng.sample(range(1, 40), 7)), 40)
        windows = bounds.windows(max(stage_peaks(asked, asked.in_order(edges))))
        assert windows is not None
        for window, (start, stop) in zip(windows, pairwise(edges), strict=True):
            assert window.first <= start <= window.last
            assert window.narrowest <= stop - start <= window.widest


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(40))
def test_the_best_split_is_not_excluded_at_the_best_level(seed: int) -> None:
    """A layer that fits only a late 1F1B stage, without spare memory, does not end the search early."""
    asked = question(3 * seed + 1, "1f1b", 40, 8)
    edges = solve(asked).split.edges
    bounds = Bounds(asked)
    windows = bounds.windows(max(stage_peaks(asked, asked.in_order(edges))))
    assert windows is not None
    for window, (start, stop) in zip(windows, pairwise(edges), strict=True):
        assert window.first <= start <= window.last
        assert window.narrowest <= stop - start <= window.widest


def test_a_level_below_every_parameter_is_impossible() -> None:
    """Bounds reject a level below every parameter without a search."""
    asked = question(1, "1f1b", 12, 4)
    assert Bounds(asked).windows(0.0) is None
