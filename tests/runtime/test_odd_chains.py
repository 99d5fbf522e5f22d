"""Random chains of odd layers: no peak exceeds the simulator's."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest
import torch

from pipefit.errors import UsageError
from pipefit.schema.plan import Plan
from support.gallery_samples import seeds
from support.known_profiles import profile
from support.random_layer_chains import odd_chain
from support.random_trainings import random_plan
from support.small_tasks import plan_of
from support.step_peaks import too_low

SIZE, PLANS = 2, 3
REFUSED = ("in place", "inplace", "does not require a gradient")  # what no plan can train


def plans(seed: int, *, traced: bool) -> Iterator[tuple[str, Plan, list[str]]]:
    """Return random plans of a random chain under every synchronous schedule, one of them with a single
    stage, each with the actions whose peak in the dry run exceeds the simulator's.
    """
    rng = Random(f"{seed} {traced}")
    task = odd_chain(rng, traced=traced)
    found = profile(task, microbatch_size=SIZE, threads=torch.get_num_threads())
    whole = plan_of(task, [len(found.layers)], size=SIZE, microbatches=3, profiled=found)
    for plan in (whole, *(random_plan(found, rng) for _ in range(PLANS))):
        yield task.name, plan, too_low(task, plan)


def assert_never_above(seed: int, *, traced: bool) -> None:
    """Assert that the case is refused for a known reason, or that no action needs more than simulated."""
    try:
        for name, plan, above in plans(seed, traced=traced):
            assert not above, f"{name}; {plan.split} {plan.training.schedule} {plan.decisions}"
    except UsageError as error:
        if not any(words in str(error) for words in REFUSED):
            raise


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", seeds(2, of=3))
@pytest.mark.parametrize("traced", [False, True], ids=["chain", "traced"])
def test_no_action_needs_more_than_was_simulated(seed: int, traced: bool) -> None:
    """Under random plans, no action of the first two steps peaks higher in the dry run than in simulation."""
    assert_never_above(seed, traced=traced)


@pytest.mark.gallery
@pytest.mark.parametrize("seed", range(3, 203))
@pytest.mark.parametrize("traced", [False, True], ids=["chain", "traced"])
def test_nor_in_many_more_chains(seed: int, traced: bool) -> None:
    """No action of many more random chains needs more than simulated."""
    assert_never_above(seed, traced=traced)
