"""Whatever is decided under an endless schedule, numbers are those of a replay, and bytes those that were foretold."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import pairwise
from random import Random

import pytest
import torch

from endless_plans import decided
from endless_training import SEED, TASKS, batches_of, differences, trained
from pipefit.capture import Task
from pipefit.plans import Plan
from pipefit.profiler import profile
from pipefit.profiles import ModelProfile
from pipefit.runtime import Trainer, certify
from pipefit.schedule import ENDLESS, distinct_steps
from pipefit.schedule.endless import period
from pipefit.simulator import simulate
from pipefit.trace import Trace
from replay import replayed
from tiny import batch_of, plan_of


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums over threads may be taken in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def found(name: str) -> ModelProfile:
    """What a model costs."""
    return profile(TASKS[name](), microbatch_size=2, threads=1)


def random_plan(name: str, schedule: str, rng: Random) -> tuple[Task, Plan]:
    """A model in one to four stages, with random decisions."""
    task, layers = TASKS[name](), len(found(name).layers)
    free = range(3 if name == "tied" else 1, layers)  # layers that share a weight stay together
    stages = rng.randint(1, 4)
    cuts = [0, *sorted(rng.sample(free, stages - 1)), layers]
    split = [stop - start for start, stop in pairwise(cuts)]
    microbatches = rng.randint(stages if schedule == "pipedream-2bw" else 1, 6)
    plan = plan_of(
        task, split, microbatches=microbatches, schedule=schedule, profiled=found(name), devices=max(stages, 2)
    )
    return task, decided(plan, rng)


def samples(trace: Trace) -> list[list[tuple[int, str, tuple[int, ...]]]]:
    """Step, action and bytes of every sample of every device."""
    return [[(s.step, s.action, s.bytes) for s in device.memory] for device in trace.devices]


def step_peaks_of(trace: Trace) -> list[list[int]]:
    """The peak of every device in every step."""
    return [[device.step_peak_bytes(step) for step in range(trace.steps)] for device in trace.devices]


def assert_replayed(name: str, schedule: str, seed: int, patch: pytest.MonkeyPatch) -> None:
    """A random plan trains the numbers of the replay, drained at random, also where its last batch is smaller."""
    rng = Random(f"{name} {schedule} {seed}")
    task, plan = random_plan(name, schedule, rng)
    count, turn, least = plan.training.microbatches, period(plan), len(plan.stages) if "2bw" in schedule else 1
    smaller = [n for n in range(least, count + 1) if n % turn == 0]
    sizes = [2 * rng.choice([count, *smaller]) for _ in range(rng.randint(2, 7))]
    sizes[-1] = rng.randint(2 * least - 1, 2 * count)
    drains = [step for step in range(len(sizes)) if rng.random() < 0.2 or step == len(sizes) - 1]
    given = batches_of(task, sizes)
    ours = trained(task, plan, given, drains, patch)
    assert differences(ours, replayed(task, plan, given, seed=SEED, drains=drains)) == []


def assert_foretold(name: str, schedule: str, seed: int) -> None:
    """A random plan takes the bytes of the dry run, folded or not, in every sample, and of the simulator."""
    rng = Random(f"{name} {schedule} {seed}")
    task, plan = random_plan(name, schedule, rng)
    steps = distinct_steps(plan) + 1
    trainer = Trainer(task, plan)
    for step in range(steps):
        trainer.step(batch_of(task, plan, step))
    dry = certify(task, plan, steps=steps)
    assert samples(trainer.trace) == samples(dry) == samples(certify(task, plan, steps=steps, fold=False))
    told = step_peaks_of(simulate(plan, steps=steps))
    if name == "tied":  # the simulator's is an upper bound there, as under any schedule
        pairs = zip(step_peaks_of(dry), told, strict=True)
        assert all(real <= bound for reals, bounds in pairs for real, bound in zip(reals, bounds, strict=True))
    else:
        assert step_peaks_of(dry) == told
    trainer.finish()
    assert not any(runner.mover.borrowed.in_use for runner in trainer.runners)


@pytest.mark.parametrize("schedule", ENDLESS)
@pytest.mark.parametrize("name", TASKS)
def test_whatever_is_decided_numbers_and_bytes_are_as_told(
    name: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, gradients of every update, parameters and buffers are bitwise the replay's; all samples are foretold."""
    assert_foretold(name, schedule, 0)
    assert_replayed(name, schedule, 0, monkeypatch)


@pytest.mark.gallery
@pytest.mark.parametrize("seed", range(1, 21))
@pytest.mark.parametrize("schedule", ENDLESS)
@pytest.mark.parametrize("name", TASKS)
def test_more_decisions_are_as_told(name: str, schedule: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same of many plans."""
    assert_foretold(name, schedule, seed)
    assert_replayed(name, schedule, seed, monkeypatch)
