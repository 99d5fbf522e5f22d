"""Models that fit under no split of a cluster but train on it with memory decisions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import isqrt

import pytest
import torch

import gallery
import pipefit
from pipefit.capture import Task
from pipefit.errors import InfeasibleError
from pipefit.memory.storages import StageStorages
from pipefit.runtime import Trainer, certify
from pipefit.schema.actions import Subject
from pipefit.schema.cluster import Cluster
from pipefit.schema.decisions import Decision, Run, SavedTensors, What
from pipefit.schema.devices import parse_place
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile
from pipefit.schema.trace import Trace
from pipefit.schema.training import Training
from pipefit.simulator import Simulation
from support.known_profiles import profile
from support.small_tasks import batch_of

DEVICES, SIZE, MICROBATCHES, STEPS = 2, 8, 6, 3
LEAST_SAVED = 0.1  # of the lowest peak of all splits
MODELS = ("keywords", "masked", "resnet", "diagonal", "vit", "unet", "conformer")
SCHEDULES = ("gpipe", "1f1b")
SAMPLE = (("keywords", "gpipe"),)  # for every run of the tests

# Sums and kernel workspaces do not depend on the number of cores
pytestmark = pytest.mark.usefixtures("one_thread")


def planned(found: ModelProfile, memory_bytes: int, schedule: str, *, stages: int = DEVICES) -> Plan:
    """Return the split with the lowest peak.

    Raises: InfeasibleError: No split fits.
    """
    cluster = Cluster.emulated((DEVICES, memory_bytes))
    training = Training(batch_size=SIZE * MICROBATCHES, microbatches=MICROBATCHES, schedule=schedule)
    return pipefit.plan(found, cluster, training, planner="exhaustive", stages=stages)


def compacted(plan: Plan) -> Plan:
    """Return the plan with as much memory freed as possible.

    Under GPipe, with all microbatches in flight, every stage offloads its saved tensors early. Under 1F1B,
    every stage is recomputed in several runs and keeps little more than one of them.
    """
    written = _moves if plan.training.schedule == "gpipe" else _runs
    decisions = [decision for stage in range(len(plan.stages)) for decision in written(plan, stage)]
    return replace(plan, decisions=tuple(decisions))


def _runs(plan: Plan, stage: int) -> Iterator[Decision]:
    """Yield runs of about sqrt(n) of the stage's n layers, recomputed separately."""
    first, end = plan.stages[stage].start, plan.stages[stage].stop
    every = isqrt(end - first)
    for start in range(first, end, every):
        run = Run(start=start, stop=min(start + every, end))
        yield Decision(stage=stage, subject=run, what=What.RECOMPUTE)


def _moves(plan: Plan, stage: int) -> Iterator[Decision]:
    """Yield an offload decision for each storage that the stage saves."""
    storages, seen = StageStorages.of(plan, stage), set[int]()
    for layer in range(plan.stages[stage].start, plan.stages[stage].stop):
        for saved in plan.measurement.costs[layer].saved:
            if saved.origin.kind == "parameter" or saved.hidden or saved.lasting:
                continue
            number = storages.storage(Subject(layer, saved.index))
            if number not in seen:
                tensor = SavedTensors(tensors=((layer, saved.index),))
                yield Decision(
                    stage=stage, subject=tensor, what=What.OFFLOAD, place=parse_place("host"), behind=0
                )
            seen.add(number)


def assert_trains_where_no_split_fits(name: str, schedule: str) -> None:
    """Assert that a cluster with just the memory of the compacted plan fits no split into one or two stages,
    and that the plan trains there with the losses of an uncapped split.
    """
    task = gallery.task(name)
    found = profile(task, microbatch_size=SIZE)
    roomy = planned(found, 1 << 40, schedule)
    lean = compacted(roomy)
    cap, least = (max(Simulation(plan).peak_bytes) for plan in (lean, roomy))
    assert cap < (1 - LEAST_SAVED) * least
    for stages in range(1, DEVICES + 1):
        with pytest.raises(InfeasibleError):
            planned(found, cap, schedule, stages=stages)
    tight = replace(lean, cluster=Cluster.emulated((DEVICES, cap)))
    losses, trace = trained(task, tight)
    assert losses == trained(task, roomy)[0]
    assert max(trace.peak_bytes) <= cap
    assert trace.peak_bytes == certify(task, tight).peak_bytes


def trained(task: Task, plan: Plan) -> tuple[list[float], Trace]:
    """Return the losses of some steps on emulated devices, and their trace."""
    torch.manual_seed(0)
    trainer = Trainer(task, plan)
    return [trainer.step(batch_of(task, plan, step)) for step in range(STEPS)], trainer.trace


@pytest.mark.parametrize(("name", "schedule"), SAMPLE)
def test_what_fits_under_no_split_trains_compacted(name: str, schedule: str) -> None:
    """A model too large for every split trains with memory decisions."""
    assert_trains_where_no_split_fits(name, schedule)


@pytest.mark.gallery
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_so_do_models_of_other_kinds(name: str, schedule: str) -> None:
    """Networks with convolutions, attention, recurrence, skips and scans train with memory decisions too."""
    assert_trains_where_no_split_fits(name, schedule)
