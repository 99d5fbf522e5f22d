"""Models of all kinds, trained by plans with random memory decisions, need the predicted memory. Under every
synchronous schedule they train as a plain loop does, under every asynchronous one as the same split without
decisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import ge
from random import Random

import pytest
import torch

from gallery import MODELS
from gallery.plain import Step
from gallery.planned import SEED, STEPS, Prepared, Run, prepared, train
from gallery.test_gallery import EXACT, describe, differences, plainly
from pipefit.lowering import ENDLESS, SCHEDULES, distinct_steps, lower
from pipefit.memory.arenas import arenas_of, lent_bytes
from pipefit.runtime import Trainer, certify
from pipefit.schema.devices import Member
from pipefit.schema.plan import Plan
from pipefit.schema.trace import Trace
from pipefit.simulator import simulate
from support.allocator_events import measured_peaks
from support.random_decisions import compacted
from support.random_trainings import random_plan

SAMPLE = (("strided", "torchgpipe"),)  # for every run of the tests

# Sums do not depend on the number of cores
pytestmark = pytest.mark.usefixtures("one_thread")


def plan_for(found: Prepared, schedule: str) -> Plan:
    """Build a random plan with random decisions, deterministically."""
    rng = Random(f"{found.model.name} {schedule}")
    return compacted(random_plan(found.profile, rng, microbatches=rng.randint(2, 5), schedule=schedule), rng)


def unlike(run: Run, steps: Sequence[Step]) -> list[str]:
    """Return the differences from these steps' numbers, bit by bit."""
    pairs = zip(run.steps, steps, strict=True)
    return [difference for pair in pairs for difference in differences(*pair, EXACT)]


def excesses(found: Prepared, run: Run) -> Iterator[tuple[int, int]]:
    """Return for every device in use and the first steps the excess of the simulator's peak over the dry
    run's, and of that over the allocator's, which excludes lent non-tensor memory.
    """
    plan = run.plan
    dry, virtual = certify(found.copied(), plan, steps=STEPS), simulate(plan, steps=STEPS)
    assert samples(dry) == samples(run.trace), "every sample that was measured is the dry run's"
    lent, allocated = arenas_of(plan, lower(plan)), measured_peaks(found.copied(), plan, steps=2)
    for rank, stages in enumerate(plan.ranks):
        device = plan.stages[stages[0]].device
        here = lent_bytes(lent, Member.device(device))
        for step, tensors in enumerate(allocated[rank]):
            peak = dry.devices[device].step_peak_bytes(step)
            above = virtual.devices[device].step_peak_bytes(step) - peak
            assert above >= 0, f"the simulator is {-above} bytes too low: {plan.split}"
            yield above, peak - here - tensors


def samples(trace: Trace) -> list[list[tuple[int, str, int]]]:
    """Return step, action and bytes of every sample of every device."""
    return [[(s.step, s.action, s.total_bytes) for s in device.memory] for device in trace.devices]


def is_dense(found: Prepared) -> bool:
    """Return whether every gradient between layers is dense. A gradient that is a view of a larger one
    becomes dense at the start of a piece, which the simulator counts as the higher of two peaks.
    """
    costs = found.profile.measurements[0].costs
    return all(origin.contiguous for cost in costs for origin in cost.input_gradients)


def assert_as_foretold(name: str, schedule: str) -> None:
    """Check that a random plan trains the plain loop's numbers, bit by bit, in the predicted bytes.

    A difference must also occur for the same split without decisions, for a reason of `gallery.model`:
    numbers are then those of the split, bit by bit. With non-dense gradients, the simulator may be above
    because of a decision.
    """
    found = prepared(name)
    run = train(found, plan_for(found, schedule))
    words = str(describe(found, run.plan))
    simulated, metered = map(any, zip(*excesses(found, run), strict=True))
    different = unlike(run, plainly(found, run))
    if not (different or simulated or metered):
        return
    still = train(found, replace(run.plan, decisions=()))
    assert not different or unlike(run, still.steps) == [], words
    alone = [*map(any, zip(*excesses(found, still), strict=True))]
    assert not simulated or alone[0] or not is_dense(found), f"simulator: {words}"
    assert not metered or alone[1], f"meter: {words}"


@pytest.mark.parametrize(("name", "schedule"), SAMPLE)
def test_decisions_change_no_number_and_take_the_bytes_foretold(name: str, schedule: str) -> None:
    """Losses, gradients, parameters and buffers are the plain loop's, bit by bit; every sample of memory is
    the dry run's, and its peaks are the simulator's and the allocator's.
    """
    assert_as_foretold(name, schedule)


@pytest.mark.gallery
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS, scope="module")
def test_so_do_decisions_about_every_model_under_every_schedule(name: str, schedule: str) -> None:
    """Decisions change no number in the whole gallery, under every schedule."""
    assert_as_foretold(name, schedule)


# -------------------------------------------------------------------- schedules without end


def endless_plan(found: Prepared, schedule: str) -> Plan:
    """Build a random plan with random decisions, also about older weights, optimizer state and gradients."""
    rng = Random(f"{found.model.name} {schedule}")
    plan = random_plan(found.profile, rng, microbatches=rng.randint(4, 5), schedule="1f1b")
    plan = replace(plan, training=replace(plan.training, schedule=schedule), decisions=())
    if plan.summed:  # a parameter of several stages is refused
        plan = replace(plan, stages=(replace(plan.stages[0], start=0, stop=len(found.profile.layers)),))
    return compacted(plan, rng)


def assert_endless_as_foretold(name: str, schedule: str) -> None:
    """Check that losses, parameters and buffers do not depend on decisions; bytes are the dry run's, at most
    the simulator's.
    """
    found = prepared(name)
    plan = endless_plan(found, schedule)
    still, one = (Trainer(found.copied(), each, seed=SEED) for each in (replace(plan, decisions=()), plan))
    steps = distinct_steps(plan)
    torch.manual_seed(SEED)
    batches = [found.model.batch(plan.training.batch_size) for _ in range(steps)]
    expected, losses = ([*map(trainer.step, batches)] for trainer in (still, one))
    assert samples(one.trace) == samples(dry := certify(found.copied(), plan, steps=steps))
    assert all(map(ge, simulate(plan, steps=steps).peak_bytes, dry.peak_bytes))
    late = one.late
    assert [*losses, *one.finish()][late:] == [*expected, *still.finish()][late:], str(describe(found, plan))
    assert all(map(torch.equal, one.state_dict().values(), still.state_dict().values())), str(
        describe(found, plan)
    )


@pytest.mark.gallery
@pytest.mark.parametrize(("name", "schedule"), [("skips", "pipedream")])
def test_decisions_change_no_number_under_an_endless_schedule(name: str, schedule: str) -> None:
    """Losses, parameters and buffers are those of the split alone, bit by bit, and bytes are as predicted."""
    assert_endless_as_foretold(name, schedule)


@pytest.mark.gallery
@pytest.mark.parametrize("schedule", ENDLESS)
@pytest.mark.parametrize("name", MODELS, scope="module")
def test_so_do_no_decisions_about_every_model_under_every_endless_schedule(name: str, schedule: str) -> None:
    """Decisions change no number in the whole gallery, under every asynchronous schedule."""
    assert_endless_as_foretold(name, schedule)
