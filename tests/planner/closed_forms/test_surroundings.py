"""The surroundings of a stage's compute actions against the simulator's ledger."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipefit.planner.closed_forms.bands import stage_peak
from pipefit.planner.closed_forms.ranges import Ranges
from pipefit.planner.closed_forms.surroundings import surroundings
from pipefit.schedule import SCHEDULES
from pipefit.schedule.whole_stages import RECOMPUTE, Recompute
from pipefit.simulator import Simulation
from pipelines import make_plan, random_profile


@settings(max_examples=80, deadline=None)
@given(
    st.data(),
    st.sampled_from(sorted(SCHEDULES)),
    st.sampled_from(RECOMPUTE),
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(0, 1 << 30),
)
def test_surroundings_give_the_peak_that_the_simulator_finds(
    data: st.DataObject, schedule: str, recompute: Recompute, stages: int, microbatches: int, seed: int
) -> None:
    """For random layers and splits, what planners compute from surroundings is the peak of the program, to the byte."""
    split = [data.draw(st.integers(1, 3)) for _ in range(stages)]
    plan = make_plan(
        random_profile(sum(split), seed), split, microbatches=microbatches, schedule=schedule, recompute=recompute
    )
    band = Ranges(plan.measurement, microbatches=microbatches).band(max(split))
    expected = tuple(
        int(
            stage_peak(band, surroundings(schedule, n, stages, microbatches, recompute))[
                stage.stop - stage.start - 1, stage.start
            ]
        )
        for n, stage in enumerate(plan.stages)
    )
    assert Simulation(plan, steps=2).peak_bytes == expected


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_surroundings_are_few_however_many_microbatches(schedule: str, recompute: Recompute) -> None:
    """A thousand microbatches meet no more surroundings than fifty: a dozen, or 16 where forwards run twice."""
    for stage in range(8):
        many = surroundings(schedule, stage, 8, 1000, recompute)
        assert len(many) <= (12 if recompute == "never" else 16)
        assert len(many) == len(surroundings(schedule, stage, 8, 50, recompute))
