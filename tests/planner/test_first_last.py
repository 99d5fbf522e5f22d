"""The first/last minus one baseline."""

from __future__ import annotations

import pytest

from pipefit.planner import plan
from support.synthetic_models import alike, devices, profile


@pytest.mark.parametrize(
    ("layers", "stages", "split"),
    [
        (10, 4, (2, 3, 3, 2)),
        (30, 4, (7, 8, 8, 7)),
        (32, 4, (8, 9, 8, 7)),
        (6, 1, (6,)),
        (5, 2, (3, 2)),
        (4, 4, (1, 1, 1, 1)),
        (5, 4, (1, 1, 2, 1)),
    ],
)
def test_the_first_and_the_last_stage_hold_one_layer_less(
    layers: int, stages: int, split: tuple[int, ...]
) -> None:
    """The rule matches one worked out by hand: L + 2 dealt evenly, one less at both ends, no stage empty."""
    assert plan(profile(alike(layers)), devices(*[1 << 40] * stages), planner="first_last").split == split


@pytest.mark.sample(4)
@pytest.mark.parametrize("layers", range(1, 14))
def test_every_layer_is_dealt_and_no_stage_is_empty(layers: int) -> None:
    """All layers are dealt out for every number of stages, however short the chain."""
    for stages in range(1, layers + 1):
        split = plan(profile(alike(layers)), devices(*[1 << 40] * stages), planner="first_last").split
        assert sum(split) == layers and min(split) >= 1
