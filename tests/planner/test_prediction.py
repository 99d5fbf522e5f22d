"""The search over any predictor against enumeration, and the additive predictor against its formula."""

from __future__ import annotations

from itertools import combinations, pairwise
from random import Random

import pytest

from pipefit.errors import UsageError
from pipefit.planner import PlanOptions, best_split, exact, true_peaks
from pipefit.schema.profile import AdditiveCosts
from support.planner_calls import asked
from support.synthetic_models import WHOLE_STAGES, any_training, devices, hostile, plain, profile, training

GPIPE = training("gpipe", 4)


def enumerated(predictor, layers: int, count: int) -> tuple[int, ...]:
    """Enumerate splits: repeatedly leaving out the fullest device compares peaks in descending order."""
    splits = [(0, *cuts, layers) for cuts in combinations(range(1, layers), count - 1)]
    peaks = {
        s: sorted((predictor(n, *ends) for n, ends in enumerate(pairwise(s))), reverse=True) for s in splits
    }
    return min(splits, key=lambda split: (peaks[split], split[::-1]))


@pytest.mark.parametrize("seed", range(80))
def test_the_best_split_is_the_best_of_all(seed: int) -> None:
    """The search and brute force agree on small additive costs, some negative, so that peaks tie."""
    rng = Random(seed)
    layers = rng.randrange(1, 11)
    count = rng.randrange(1, layers + 1)
    costs = AdditiveCosts(
        mem_isolated=tuple(rng.randrange(12) for _ in range(layers)),
        mem_added=tuple(rng.randrange(-1, 6) for _ in range(layers)),
        training=GPIPE,
    )
    assert best_split(costs, layers, count) == enumerated(costs, layers, count)


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(40))
def test_by_our_predictor_it_is_the_plan_of_exact(seed: int) -> None:
    """Two unrelated searches agree, down to the tie-break, and predict the plan's peaks."""
    rng = Random(seed)
    layers = rng.randrange(2, 11)
    count, how, recompute = rng.randrange(1, layers + 1), any_training(rng), rng.choice(WHOLE_STAGES)
    chain = profile(rng.choice((plain, hostile))(rng, layers))
    made = asked(exact, chain, devices(*[1 << 40] * count), how, PlanOptions(recompute=recompute))
    predictor = true_peaks(chain, how, stages=count, recompute=recompute)
    edges = best_split(predictor, layers, count)
    assert edges == (0, *made.boundaries, layers)
    assert made.prediction
    assert made.prediction.peak_bytes == tuple(predictor(n, *ends) for n, ends in enumerate(pairwise(edges)))


def test_the_additive_peak_is_the_first_alone_and_the_rest_added() -> None:
    """The additive peak matches a computation by hand; the position of a stage in the pipeline does not
    matter.
    """
    costs = AdditiveCosts(mem_isolated=(10, 20, 30, 40), mem_added=(1, 2, 3, 4), training=GPIPE)
    assert costs.peak(1, 4) == 20 + 3 + 4
    assert [costs.peak(n, n + 1) for n in range(4)] == [10, 20, 30, 40]
    assert costs(0, 0, 3) == costs(7, 0, 3) == 10 + 2 + 3


@pytest.mark.parametrize(("start", "stop"), [(2, 2), (3, 1), (-1, 2), (0, 5)])
def test_what_is_no_stage_has_no_peak(start: int, stop: int) -> None:
    """The peak of an empty, reversed or out-of-range stage is refused."""
    with pytest.raises(UsageError, match="not a valid stage of 4 blocks"):
        AdditiveCosts(mem_isolated=(1,) * 4, mem_added=(1,) * 4, training=GPIPE).peak(start, stop)


def test_additive_costs_are_complete() -> None:
    """Additive costs need two numbers for every block, and at least one block."""
    with pytest.raises(UsageError, match="not 2 alone and 1 added"):
        AdditiveCosts(mem_isolated=(1, 2), mem_added=(1,), training=GPIPE)
    with pytest.raises(UsageError, match="not 0 alone"):
        AdditiveCosts(mem_isolated=(), mem_added=(), training=GPIPE)


@pytest.mark.parametrize("count", [0, 4])
def test_every_device_holds_a_block(count: int) -> None:
    """Zero devices, or more devices than blocks, are refused."""
    with pytest.raises(UsageError, match=f"3 blocks cannot be split over {count} devices"):
        best_split(AdditiveCosts(mem_isolated=(1,) * 3, mem_added=(1,) * 3, training=GPIPE), 3, count)
