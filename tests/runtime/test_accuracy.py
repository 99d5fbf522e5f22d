"""Predicted peaks equal the allocator's: the promise of the product."""

from __future__ import annotations

from functools import cache, partial
from random import Random

import pytest
import torch
from torch import nn

import gallery
from gallery import CHAINS
from pipefit.runtime import certify
from pipefit.simulator import simulate
from support.allocator_events import measured_peaks
from support.gallery_samples import sampled
from support.random_trainings import MODELS, SCHEDULES, Case, accounts, plan_for, random_case
from support.small_tasks import plan_of, task_of

NAMES = [f"{model}-{seed}" for model in (*MODELS, *CHAINS) for seed in range(4 if model in MODELS else 2)]

OFTEN = (  # `test_the_cases_of_a_run_cover_every_kind_of_plan` checks that these are of all kinds
    *("mlp-1", "mlp-2", "gpt-0", "bert-1", "bert-2", "vgg11-1"),
    *("strided-0", "skips-0", "time major-1", "encoder-0"),
)


@cache
def draw(name: str) -> Case:
    """Return the random case of that name: a model and a seed."""
    model, _, seed = name.partition("-")
    rng = Random(f"{model} {seed}")
    return (
        plan_for(gallery.task(model), rng, name=model) if model in CHAINS else random_case(rng, model=model)
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", sampled(NAMES, often=OFTEN))
def test_dry_run_and_simulator_are_exact(name: str) -> None:
    """The dry run and the simulator match the allocator's peak of every device in both steps, to the byte."""
    for account in accounts(draw(name)):
        assert account.dry_run_bytes == account.simulated_bytes == account.oracle_bytes, account.case


@pytest.mark.gallery
def test_the_cases_of_a_run_cover_every_kind_of_plan() -> None:
    """The named cases cover all schedules, one to four devices with one or several stages, recomputed
    runs and recomputed whole stages, both kinds of attention, dropout on and off.
    """
    cases = [draw(name) for name in OFTEN]
    assert {case.plan.training.schedule for case in cases} == set(SCHEDULES)
    assert {len(case.plan.ranks) for case in cases} == {1, 2, 3, 4}
    assert {len(case.plan.ranks[0]) for case in cases} == {1, 2, 3}
    runs = [(one, case.plan.stages[one.stage]) for case in cases for one in case.plan.decisions]
    assert {(one.subject.start, one.subject.stop) == (stage.start, stage.stop) for one, stage in runs} == {
        False,
        True,
    }
    assert {one.ahead for one, _ in runs} == {0, 1, 2}
    assert {case.settings.get("attention") for case in cases} == {None, "sdpa", "eager"}
    assert {bool(case.settings.get("dropout")) for case in cases} == {False, True}


class Halves(nn.Module):
    """A layer that returns two views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8192)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.linear(x).unflatten(1, (2, 4096)).transpose(0, 1).contiguous().unbind(0)


class Sines(nn.Module):
    """A layer that saves both inputs and releases the second one first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4096, 4)

    def forward(self, halves: tuple[torch.Tensor, ...]) -> torch.Tensor:
        first, second = halves
        return self.linear(torch.sin(first) + torch.sin(second))


@pytest.mark.parametrize("split", [[2], [1, 1]])
def test_a_storage_goes_with_the_last_of_its_views(split: list[int]) -> None:
    """Two values in one storage are freed together on one device; after a transfer each is freed separately."""
    task = task_of(lambda: [Halves(), Sines()])
    plan = plan_of(task, split, size=64)
    measured = tuple(max(steps) for steps in measured_peaks(task, plan))
    assert certify(task, plan, steps=2).peak_bytes == simulate(plan, steps=2).peak_bytes == measured


def test_a_longer_warm_up_is_exact_too() -> None:
    """Eager 1F1B, with more microbatches in flight than stages, is exact: allocator, dry run and simulator
    agree in each step.
    """
    task = task_of(lambda: [Halves(), Sines(), nn.Linear(4, 4), nn.Tanh()])
    plan = plan_of(task, [1, 2, 1], size=8, microbatches=6, schedule="eager-1f1b")
    traces = certify(task, plan), simulate(plan)
    for device, measured in enumerate(measured_peaks(task, plan)):
        for trace in traces:
            assert [trace.devices[device].step_peak_bytes(step) for step in range(2)] == measured


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.Adam])
def test_state_of_a_shared_parameter_counts_once(optimizer: type[torch.optim.Optimizer]) -> None:
    """Optimizer state of a weight shared by two layers on one device counts once, whether it is made early or
    late.
    """
    task = task_of(tied, inputs=64, outputs=64, optimizer=partial(optimizer, lr=0.1))
    plan = plan_of(task, [3], size=256)
    measured = measured_peaks(task, plan)[0]
    simulated = simulate(plan, steps=2).devices[0]
    assert [simulated.step_peak_bytes(step) for step in range(2)] == measured


def tied() -> list[nn.Module]:
    """Return two linear layers that share their weight."""
    first, last = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    last.weight = first.weight
    return [first, nn.Tanh(), last]
