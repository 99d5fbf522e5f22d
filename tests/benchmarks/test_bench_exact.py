"""The exact solver of `benchmarks/bench_exact.py`, against every plan."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from bench_exact import case, plan_of, recomputations, solve
from pipefit.schema.decisions import Decision, Run, What
from pipefit.simulator import Simulation


@pytest.mark.parametrize("seed", [1, 4])
def test_the_optimum_is_that_of_all_plans_by_simulation(seed: int) -> None:
    """The optimum is that of all plans for four layers on two devices: all cuts, all recomputed runs."""
    chain, on, how = case(seed, 4, 2)
    found = solve(chain, on, how)
    assert found is not None
    fitting = []
    for edges in ([0, cut, 4] for cut in (1, 2, 3)):
        for runs in product(*(recomputations(*stage) for stage in pairwise(edges))):
            again = ((stage, run) for stage, own in enumerate(runs) for run in own)
            decisions = [
                Decision(stage=s, subject=Run(start=a, stop=b), what=What.RECOMPUTE) for s, (a, b) in again
            ]
            simulation = Simulation(plan_of(chain, on, how, edges, decisions))
            if max(simulation.peak_bytes) <= on.budgets[0]:
                fitting.append(simulation.step_seconds[-1])
    assert found.seconds == pytest.approx(min(fitting))
    assert Simulation(found.plan).step_seconds[-1] == pytest.approx(found.seconds)
