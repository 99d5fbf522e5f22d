"""Peaks from closed forms of a stage's surroundings, checked against the simulator."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from pipefit.errors import UsageError
from pipefit.lowering import ENDLESS, SCHEDULES, following_of, schedule_named
from pipefit.lowering.passes.recomputation import Recompute
from pipefit.planner.closed_forms.bands import stage_peak
from pipefit.planner.closed_forms.ranges import ranges_of
from pipefit.planner.closed_forms.surroundings import _Walk, surroundings, whole_stage_order
from pipefit.schema.layer_costs import Span
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Measurement
from pipefit.schema.trace import Category
from pipefit.simulator import Simulation
from support.gallery_samples import seeds
from support.synthetic_models import (
    WHOLE_STAGES,
    any_plan,
    any_training,
    hostile,
    layer,
    measurement,
    plain,
    small_first,
    training,
    value,
)


def predicted(plan: Plan, recompute: Recompute) -> dict[int, int]:
    """Return the peak of every device that holds a stage, from closed forms."""
    how, count = plan.training, len(plan.stages)
    band = ranges_of(plan.measurement, plan.profile.edges, how.microbatches, recompute).band(max(plan.split))
    found = {}
    for number, stage in enumerate(plan.stages):
        met = surroundings(how.schedule, number, count, how.microbatches, recompute, how.versions)
        found[stage.device] = int(stage_peak(band, met)[stage.stop - stage.start - 1, stage.start])
    return found


@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", seeds(90, of=150))
def test_surroundings_give_the_peak_that_the_simulator_finds(seed: int) -> None:
    """Closed forms and simulator agree to the byte for every split, training and recomputation."""
    rng = Random(seed)
    recompute = rng.choice(WHOLE_STAGES)
    plan = any_plan(rng, hostile(rng, small_first(seed, largest=8)), any_training(rng), recompute=recompute)
    simulated = Simulation(plan, steps=2).peak_bytes
    assert predicted(plan, recompute) == {stage.device: simulated[stage.device] for stage in plan.stages}


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", [95, 193, 291, *seeds(60, of=1000)])
def test_stages_recomputed_block_by_block_need_no_less_than_the_closed_form_says(seed: int) -> None:
    """Closed forms never exceed the simulator; for plain layers on one device they are equal."""
    rng = Random(seed)
    is_plain = seed % 2 == 0
    count = small_first(seed, largest=8)
    model = plain(rng, count) if is_plain else hostile(rng, count)
    plan = any_plan(rng, model, any_training(rng), stages=1 if is_plain else None, recompute="always")
    simulated, bound = Simulation(plan, steps=2).peak_bytes, predicted(plan, "always")
    for device, nbytes in bound.items():
        assert nbytes == simulated[device] if is_plain else nbytes <= simulated[device]


def heavy_inputs() -> Measurement:
    """Build layers that save nothing, so that retained inputs dominate a microbatch in flight."""
    small, large = value(1), value(100)
    layers = [layer((large,), (large,), saved=()) for _ in range(6)]
    return measurement(layers, layer((large,), (small,), saved=()))


@pytest.mark.sample(8)
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("recompute", WHOLE_STAGES)
@pytest.mark.parametrize("model", [hostile(Random(7), 6), heavy_inputs()], ids=["hostile", "heavy inputs"])
def test_they_do_so_for_every_number_of_stages_and_microbatches(
    schedule: str, recompute: Recompute, model: Measurement
) -> None:
    """Closed forms match under every schedule and recomputation, with few and many stages and
    microbatches.
    """
    for stages, microbatches in product((1, 2, 3, 5), (1, 2, 3, 8)):
        how = training(schedule, microbatches)
        plan = any_plan(Random(stages), model, how, stages=stages, recompute=recompute)
        simulated = Simulation(plan, steps=2).peak_bytes
        assert predicted(plan, recompute) == {stage.device: simulated[stage.device] for stage in plan.stages}


@pytest.mark.sample(20)
@pytest.mark.parametrize("schedule", ENDLESS)
@pytest.mark.parametrize("seed", seeds(50, of=80))
def test_they_do_so_for_endless_schedules(schedule: str, seed: int) -> None:
    """Closed forms match in all steps up to the steady state, with updates among microbatches in flight and
    several weight versions.
    """
    rng = Random(seed)
    recompute: Recompute = rng.choice(("never", "stages"))
    model = hostile(rng, small_first(seed, largest=8))
    stages = rng.randrange(1, min(4, len(model.layers)) + 1)
    how = training(schedule, rng.randrange(stages if schedule == "pipedream-2bw" else 1, 9))
    how = replace(how, versions=rng.choice(("weights", "everything")))
    plan = any_plan(rng, model, how, stages=stages, recompute=recompute)
    if plan.summed:
        plan = any_plan(rng, replace(model, shared=()), how, stages=stages, recompute=recompute)
    simulated = Simulation(plan).peak_bytes
    assert predicted(plan, recompute) == {stage.device: simulated[stage.device] for stage in plan.stages}


def test_a_stage_may_be_fullest_before_its_first_update() -> None:
    """Masks without gradients travel both ways only while an asynchronous pipeline fills, before any
    optimizer state exists; some state may exist from the beginning.
    """
    passed = (value(8), value(100, requires_grad=False))
    chain = [
        layer(passed, passed, parameter_bytes=8, state_bytes=60, early_state_bytes=k) for k in (0, 5, 7, 0)
    ]
    model = measurement(chain, layer(passed, (value(4),)))
    plan = any_plan(Random(0), model, training("pipedream", 4), stages=4, recompute="never")
    simulation = Simulation(plan)
    assert predicted(plan, "never") == {s.device: simulation.peak_bytes[s.device] for s in plan.stages}
    fullest = simulation.trace().devices[plan.stages[1].device].peak
    assert fullest
    assert Category.OPTIMIZER not in fullest.by_category or fullest.by_category[Category.OPTIMIZER] < 60


def test_a_second_forward_counts_copies_of_the_buffers_that_it_leaves_as_they_are() -> None:
    """Recomputation copies buffers, the first forward does not: the stage peaks in the recomputation when
    forward scratch is large and the backward small.
    """
    one, little = (value(8),), (Span(peak_bytes=8),)
    eager = layer(
        one, one, buffer_bytes=100, scratch_bytes=1000, checkpoint_peak_bytes=8, first=little, later=little
    )
    model = measurement([eager], layer(one, (value(4),)))
    plan = any_plan(Random(0), model, training("gpipe", 1), stages=1, recompute="stages")
    simulation = Simulation(plan, steps=2)
    device = plan.stages[0].device
    fullest = simulation.trace().devices[device].peak
    assert fullest and fullest.action == "0R0"
    assert predicted(plan, "stages") == {device: simulation.peak_bytes[device]}


@pytest.mark.parametrize("schedule", ENDLESS)
def test_a_recomputation_of_all_but_one_is_refused_where_steps_overlap(schedule: str) -> None:
    """An asynchronous step ends without a last microbatch; the error names the alternatives."""
    with pytest.raises(
        UsageError, match=r"recompute except_last exempts a microbatch of each step, .*: use recompute always"
    ):
        surroundings(schedule, 0, 2, 4, "except_last")


@pytest.mark.sample(4)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("recompute", WHOLE_STAGES)
def test_surroundings_are_few_however_many_microbatches(schedule: str, recompute: Recompute) -> None:
    """A thousand microbatches have no more distinct surroundings than fifty: under two dozen."""
    for stage in range(8):
        many = surroundings(schedule, stage, 8, 1000, recompute)
        assert len(many) <= 24
        assert len(many) == len(surroundings(schedule, stage, 8, 50, recompute))


@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b"])
@pytest.mark.parametrize("recompute", WHOLE_STAGES)
def test_many_microbatches_bring_nothing_new(schedule: str, recompute: Recompute) -> None:
    """Surroundings of a step of 40 microbatches, derived from a few, equal those of a walk through all 40."""
    for stages, stage in ((1, 0), (3, 0), (3, 2), (6, 1)):
        following = following_of(schedule_named(schedule), stages, 1, 40)
        walk = _Walk(endless=False, rooms=False, following=following)
        met = {*walk.through([whole_stage_order(schedule, stage, stages, 40, recompute)])}
        told = surroundings(schedule, stage, stages, 40, recompute)
        assert {*told} <= met
        for one in met:
            assert any(
                one.alone == other.alone
                and one.in_flight <= other.in_flight
                and one.checkpoints <= other.checkpoints
                for other in told
            )
