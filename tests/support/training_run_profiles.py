"""Made-up chains with made-up training runs, for tests of mCAP's planners."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from pipefit.schema.profile import AdditiveCosts, ModelProfile
from support.synthetic_models import plain, profile, training

GPIPE = training("gpipe", 3)


def with_runs(rng: Random, layers: int) -> ModelProfile:
    """Return a profile of that many layers, with runs under `GPIPE`; small numbers, some negative, so that
    peaks tie.
    """
    costs = AdditiveCosts(
        mem_isolated=tuple(rng.randrange(9, 99) for _ in range(layers)),
        mem_added=tuple(rng.randrange(-3, 60) for _ in range(layers)),
        training=GPIPE,
    )
    return replace(profile(plain(rng, layers)), additive=costs)
