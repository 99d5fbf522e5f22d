"""The Bayesian planner: the paper's settings, the repair of proposals, and the error without
scikit-optimize.
"""

from __future__ import annotations

import sys
from itertools import pairwise, product
from random import Random

import pytest

from pipefit.errors import UsageError
from pipefit.planner import PlanOptions, bayesian, exact, plan
from pipefit.planner.baselines.mcap import scaled
from pipefit.schema.plan import Plan
from support.gallery_samples import seeds
from support.planner_calls import asked
from support.synthetic_models import devices, hostile, plain, profile, training, vgg_like

AMPLE = 1 << 40
OPTIONS = PlanOptions(allow_infeasible=True)


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a few evaluations in place of 75, which take a quarter of a minute."""
    pytest.importorskip("skopt")
    monkeypatch.setattr(sys.modules[bayesian.__module__], "EVALUATIONS", 12)


@pytest.mark.parametrize("seed", seeds(1, of=4))
@pytest.mark.usefixtures("briefly")
def test_it_is_never_better_than_exact_and_always_the_same(seed: int) -> None:
    """The planner never beats exact on random chains, is deterministic, and claims no proof."""
    rng = Random(seed)
    chain = rng.choice((plain, hostile))(rng, rng.randrange(5, 12))
    question = (profile(chain), devices(*[AMPLE] * 3), training("1f1b", 4), OPTIONS)
    found, again, best = asked(bayesian, *question), asked(bayesian, *question), asked(exact, *question)
    assert found.stages == again.stages
    assert found.provenance and best.provenance
    assert found.provenance.bound is None
    assert found.provenance.value >= best.provenance.value


def test_it_asks_scikit_optimize_as_the_paper_does_and_keeps_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Settings are those of the paper: one dimension per device, 75 evaluations, gp_hedge, sampling, xi =
    kappa = 1000, a seed. The plan is the proposed split with the lowest peak.
    """
    asked: dict[str, object] = {}
    proposals = [(1, 1, 1, 27), (7, 8, 8, 7), (12, 12, 3, 3)]
    seen: list[float] = []

    def minimise(value, dimensions, **settings) -> None:
        asked.update(settings, dimensions=dimensions)
        seen.extend(value(lengths) for lengths in proposals)

    monkeypatch.setattr(sys.modules[bayesian.__module__], "minimiser", lambda: minimise)
    made: Plan = plan(profile(vgg_like()), devices(*[AMPLE] * 4), training("gpipe", 12), planner="bayesian")
    assert asked == {
        "dimensions": [(1, 27)] * 4, "n_calls": 75, "acq_func": "gp_hedge", "acq_optimizer": "sampling",
        "xi": 1000, "kappa": 1000, "random_state": 0,
    }  # fmt: skip
    assert made.split == proposals[seen.index(min(seen))]
    assert made.prediction and max(made.prediction.peak_bytes) == min(seen)
    assert made.provenance and made.provenance.evaluated == 3


def test_proposals_become_splits() -> None:
    """Every proposal for four devices deals out all layers, leaves no stage empty, and keeps counts that add
    up.
    """
    for lengths in product(range(1, 5), repeat=4):
        edges = scaled(lengths, 10)
        split = tuple(stop - start for start, stop in pairwise(edges))
        assert sum(split) == 10 and min(split) >= 1
        assert sum(lengths) != 10 or split == lengths


def test_without_scikit_optimize_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without scikit-optimize the error is one sentence with the install command, before any work."""
    monkeypatch.setitem(sys.modules, "skopt", None)
    with pytest.raises(UsageError, match=r"pip install 'pipefit\[bayes\]'"):
        plan(profile(vgg_like()), devices(*[AMPLE] * 4), training(), planner="bayesian")
