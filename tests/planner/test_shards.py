"""Plans of stages with tensor shards and replicas, from a real profile, against all plans."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import accumulate, combinations, pairwise, product

import pytest

from pipefit import models
from pipefit.errors import UsageError
from pipefit.planner import plan, plan_again
from pipefit.planner.hybrid.search import searches
from pipefit.planner.problem import Degree, Question
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from support.gallery_samples import sampled
from support.known_profiles import profile
from support.synthetic_models import AMPLE, devices

HOW = Training(batch_size=8, microbatches=2)
EVERY = sorted(
    [Degree(1, 1), Degree(2, 1), *(Degree(data, 2, also) for data in (1, 2) for also in (False, True))]
)


@cache
def costs(*, tied: bool = False) -> ModelProfile:
    task = models.build(
        "gpt", layers=1, hidden=16, heads=2, vocabulary=32, sequence=8, dropout=0.0, tied=tied
    )
    return profile(task, microbatch_size=(4, 2), tensor=(2,), sequences=True, target="cuda")


def written(of: ModelProfile, edges: tuple[int, ...], degrees: tuple[Degree, ...]) -> Plan:
    firsts = [0, *accumulate(degree.devices for degree in degrees)]
    layers = [of.edges[edge] for edge in edges]
    stages = tuple(
        Stage(start=start, stop=stop, grid=Grid(devices=tuple(range(*ends)), **degree.pins))
        for (start, stop), ends, degree in zip(pairwise(layers), pairwise(firsts), degrees, strict=True)
    )
    return Plan(profile=of, cluster=devices(*[AMPLE] * 3), training=HOW, stages=stages)


def lowest(of: ModelProfile) -> int:
    """Return the lowest simulated peak of all plans on three devices."""
    found, blocks = [], len(of.edges) - 1
    for stages in range(1, min(blocks, 3) + 1):
        for cuts in combinations(range(1, blocks), stages - 1):
            for degrees in product(EVERY, repeat=stages):
                if sum(degree.devices for degree in degrees) <= 3:
                    try:
                        found.append(max(Simulation(written(of, (0, *cuts, blocks), degrees)).peak_bytes))
                    except UsageError:  # stages with a shared parameter hold different parts of it
                        continue
    return min(found)


@pytest.mark.parametrize("tied", sampled([False, True], often=[True]))
def test_no_plan_of_replicas_and_shards_has_a_lower_peak(tied: bool) -> None:
    """No cut or degree of any stage has a lower peak, with and without sequence parallelism, also with an
    embedding shared by two stages.
    """
    of = costs(tied=tied)
    found = plan(of, devices(*[AMPLE] * 3), HOW, objective="peak", shard="none")
    assert found.provenance and found.prediction
    assert found.prediction.peak_bytes == Simulation(found).peak_bytes
    assert max(found.prediction.peak_bytes) == lowest(of)
    assert found.provenance.bound == lowest(of)


def test_shards_are_chosen_and_pinned() -> None:
    """Shards need less than whole layers on as many devices, and every stage gets the requested number."""
    of, on = costs(), devices(*[AMPLE] * 4)
    for planner in ("joint", "exact", "uniform"):
        made = plan(of, on, HOW, planner=planner, data=1, tensor=2, stages=2)
        assert [(stage.grid.data, stage.grid.tensor) for stage in made.stages] == [(1, 2), (1, 2)]
        assert made.prediction and made.prediction.peak_bytes == Simulation(made).peak_bytes
    with pytest.raises(UsageError, match="profile it again with --tensor 4"):
        plan(of, on, HOW, tensor=4)


def test_sequence_parallelism_is_chosen_where_it_saves_and_pinned() -> None:
    """With pinned sequence parallelism all stages have it or none; otherwise the leanest plan of few stages
    uses it.
    """
    of, on = costs(), devices(*[AMPLE] * 2)
    peaks = dict[bool | None, int]()
    for asked in (None, False, True):
        made = plan(of, on, HOW, objective="peak", data=1, tensor=2, sequences=asked)
        assert [stage.grid.sequences for stage in made.stages] == [asked is not False]
        assert made.prediction
        peaks[asked] = max(made.prediction.peak_bytes)
    assert peaks[None] == peaks[True] < peaks[False]
    again = plan_again(plan(of, on, HOW, tensor=2, sequences=True), replace(on, name="another"))
    assert all(stage.grid.sequences for stage in again.stages)
    without = replace(of, measurements=tuple(m for m in of.measurements if not m.sequences))
    with pytest.raises(UsageError, match="profile it, or plan the model, with --tensor 2 --sequences"):
        plan(without, on, HOW, sequences=True)
    with pytest.raises(UsageError, match="sequence parallelism needs several shards"):
        plan(of, on, HOW, tensor=1, sequences=True)


def test_degrees_that_divide_a_shared_parameter_otherwise_are_searched_apart() -> None:
    """Stages with a shared parameter need the same degree: local batches of other sizes may be divided
    otherwise.
    """
    of = costs(tied=True)
    forms = [
        [replace(one, form=str(m.microbatch_size)) for one in m.shared]
        for m in of.measurements
        if m.tensor == 2
    ]
    by_size = [replace(m, shared=tuple(forms.pop(0))) if m.tensor == 2 else m for m in of.measurements]
    one, other = (
        Question(profile=replace(of, measurements=tuple(made)), cluster=devices(*[AMPLE] * 6), training=HOW)
        for made in (of.measurements, by_size)
    )
    degrees = [sorted(search.tables) for search in searches(one)]
    assert degrees == [sorted(one for one in EVERY if one.tensor == tensor) for tensor in (1, 2)]
    assert [sorted(search.tables) for search in searches(other)] == [
        degrees[0],
        *[[one for one in EVERY if one.data == data and one.tensor == 2] for data in (1, 2)],
    ]
