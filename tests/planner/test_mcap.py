"""mCAP's two searches over mCAP's predictor: brute force is right, and Bayesian optimisation agrees."""

from __future__ import annotations

import sys
from itertools import combinations, pairwise
from random import Random

import pytest

from pipefit.errors import UsageError
from pipefit.planner import bayesian, plan
from pipefit.planner.baselines.mcap import estimates
from support.gallery_samples import seeds
from support.synthetic_models import devices, plain, profile
from support.training_run_profiles import GPIPE, with_runs


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(30))
def test_brute_force_finds_the_split_of_dynamic_programming(seed: int) -> None:
    """Two searches that share only the costs agree, down to the tie-break; the value is the
    highest estimate.
    """
    rng = Random(seed)
    layers = rng.randrange(2, 10)
    count = rng.randrange(1, layers + 1)
    found = with_runs(rng, layers)
    ways = [
        plan(found, devices(*[1 << 40] * count), GPIPE, planner=planner)
        for planner in ("mcap_bf", "additive")
    ]
    assert ways[0].stages == ways[1].stages
    assert ways[0].provenance.value == ways[1].provenance.value == ways[0].provenance.bound


@pytest.mark.gallery
@pytest.mark.parametrize("seed", seeds(1, of=3))
def test_bayesian_optimisation_finds_what_brute_force_finds(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bayesian optimisation agrees with brute force on seven layers and three devices with three seeds; its
    values are those of the splits. (With thousands of splits it evaluates 75, and may miss the best:
    `benchmarks/bench_mcap.py`.)
    """
    pytest.importorskip("skopt")
    monkeypatch.setattr(sys.modules[bayesian.__module__], "EVALUATIONS", 16)
    costs = with_runs(Random(7), 7).additive
    values = estimates(costs, 7, 3, seed=seed)
    every = {(0, *cuts, 7) for cuts in combinations(range(1, 7), 2)}
    assert set(values) <= every and len(values) < len(every)
    assert values == {edges: max(costs.peak(*stage) for stage in pairwise(edges)) for edges in values}
    assert min(values.values()) == min(
        max(costs.peak(*stage) for stage in pairwise(edges)) for edges in every
    )


@pytest.mark.parametrize("planner", ["mcap_bf", "mcap_bo"])
def test_without_training_runs_both_are_refused(planner: str) -> None:
    """Profiles without training runs are refused, with the command that makes them."""
    with pytest.raises(UsageError, match="synthetic does not have any: profile it with --runs incremental"):
        plan(profile(plain(Random(0), 4)), devices(1 << 40), GPIPE, planner=planner)


def test_brute_force_refuses_what_it_cannot_finish() -> None:
    """Brute force refuses too many splits, with their number and a planner that finds the same."""
    with pytest.raises(UsageError, match=r"split in 22,\d{3},\d{3} ways.*use the additive planner"):
        plan(with_runs(Random(0), 42), devices(*[1 << 40] * 8), GPIPE, planner="mcap_bf")
