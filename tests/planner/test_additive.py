"""The additive planner: the best split by two numbers per layer in the profile, judged by true peaks."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

import pytest

from pipefit.errors import InfeasibleError, UsageError
from pipefit.planner import plan
from pipefit.schema.json_io import dumps, load, save
from pipefit.schema.plan import Plan
from pipefit.schema.profile import AdditiveCosts, ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import simulate
from support.synthetic_models import devices, plain, profile, training
from support.training_run_profiles import GPIPE, with_runs


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(30))
def test_no_split_has_a_lower_estimate(seed: int) -> None:
    """No split has a lower estimate, comparing peaks in descending order; the plan reports the estimate and
    predicts true peaks.
    """
    rng = Random(seed)
    layers = rng.randrange(2, 10)
    count = rng.randrange(1, layers + 1)
    found = with_runs(rng, layers)
    made = plan(found, devices(*[1 << 40] * count), training("gpipe", 3), planner="additive")
    costs = found.additive
    assert costs is not None and made.provenance is not None and made.prediction is not None

    def estimates(edges: tuple[int, ...]) -> list[int]:
        return sorted((costs.peak(*ends) for ends in pairwise(edges)), reverse=True)

    splits = [(0, *cuts, layers) for cuts in combinations(range(1, layers), count - 1)]
    best = estimates((0, *made.boundaries, layers))
    assert best == min(map(estimates, splits))
    assert made.provenance.value == best[0]
    assert made.prediction.peak_bytes == simulate(made, steps=2).peak_bytes


def test_without_training_runs_it_is_refused() -> None:
    """A profile without training runs is refused, with the command that makes them."""
    with pytest.raises(UsageError, match="synthetic does not have any: profile it with --runs incremental"):
        plan(profile(plain(Random(0), 4)), devices(1 << 40), training("gpipe", 3), planner="additive")


@pytest.mark.parametrize("planner", ["additive", "mcap_bf", "mcap_bo"])
@pytest.mark.parametrize(
    ("asked", "recompute", "says"),
    [
        (training("1f1b", 3), "never", "gpipe, not 1f1b"),
        (training("gpipe", 4), "never", "3 microbatches of 1, not 4 microbatches of 1"),
        (GPIPE, "always", "recompute never, not recompute always"),
        (replace(GPIPE, clip_norm=1.0), "never", "unclipped gradients, not clipped gradients"),
    ],
    ids=["schedule", "microbatches", "recompute", "clipping"],
)
def test_runs_under_another_training_are_refused(
    planner: str, asked: Training, recompute: str, says: str
) -> None:
    """Runs under another training are refused: the error says which settings differ and what to do."""
    found = with_runs(Random(1), 4)
    with pytest.raises(UsageError, match=f"used {says}: plan for that training, profile with"):
        plan(found, devices(1 << 40, 1 << 40), asked, planner=planner, recompute=recompute)


def test_true_peaks_decide_whether_it_fits() -> None:
    """A plan does not fit if its true peak exceeds the memory, even when the estimate is far below."""
    costs = AdditiveCosts(mem_isolated=(1,) * 4, mem_added=(1,) * 4, training=GPIPE)
    found = replace(profile(plain(Random(0), 4)), additive=costs)
    with pytest.raises(InfeasibleError, match=r"stage 1 .*over its 10 B"):
        plan(found, devices(10, 10), training("gpipe", 3), planner="additive")


def test_the_numbers_are_kept_in_files(tmp_path) -> None:
    """Profiles with and without training runs, and their plans, load as saved."""
    found = with_runs(Random(1), 5)
    made = plan(found, devices(1 << 40, 1 << 40), training("gpipe", 3), planner="additive")
    for number, (document, kind) in enumerate(
        ((found, ModelProfile), (replace(found, additive=None), ModelProfile), (made, Plan))
    ):
        path = tmp_path / f"{number}.json"
        save(document, path)
        assert load(path, kind) == document
        assert dumps(document) == path.read_text()


def test_runs_of_another_number_of_layers_are_refused() -> None:
    """Training runs of another number of layers are refused by the profile."""
    with pytest.raises(UsageError, match="has 4 layers, but the training runs measured 3"):
        replace(
            profile(plain(Random(0), 4)),
            additive=AdditiveCosts(mem_isolated=(1,) * 3, mem_added=(1,) * 3, training=GPIPE),
        )
