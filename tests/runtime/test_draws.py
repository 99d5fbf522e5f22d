"""Random draws depend on (seed, step, microbatch, layer) only."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipefit.runtime import certify
from pipefit.runtime.engine.forward_backward import draw_seed, seed_layer
from support.small_tasks import batch_of, plan_of, task_of, trainer_of

CPU = torch.device("cpu")
numbers = st.integers(0, 2**63 - 1)


@given(numbers, numbers, numbers, numbers)
def test_a_seed_fits_every_generator(seed: int, step: int, microbatch: int, layer: int) -> None:
    """A derived seed always has 63 bits."""
    assert 0 <= draw_seed(seed, step, microbatch, layer) < 2**63


def test_no_two_layers_share_a_seed() -> None:
    """All seeds of 10 000 neighbours differ, also for permutations of the same four numbers."""
    seeds = {draw_seed(*four) for four in itertools.product(range(10), repeat=4)}
    assert len(seeds) == 10**4


def test_neighbours_are_unlike() -> None:
    """Seeds of neighbouring layers differ in about half of their bits."""
    changed = [(draw_seed(0, 0, 0, n) ^ draw_seed(0, 0, 0, n + 1)).bit_count() for n in range(200)]
    assert 28 < sum(changed) / len(changed) < 35


def test_the_past_does_not_matter() -> None:
    """A layer's draws do not depend on earlier draws; another layer draws other numbers."""
    seed_layer(CPU, 1, 2, 3, 4)
    first = torch.rand(5)
    torch.rand(17)
    seed_layer(CPU, 1, 2, 3, 4)
    assert torch.equal(torch.rand(5), first)
    seed_layer(CPU, 1, 2, 3, 5)
    assert not torch.equal(torch.rand(5), first)


def test_a_step_leaves_the_callers_draws_alone() -> None:
    """A step leaves the training script's draws, and so its data, unchanged."""
    task = task_of(lambda: [nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 4)])
    trainer = trainer_of(task, [2, 1])
    batch = batch_of(task, trainer.plan)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    trainer.step(batch)
    assert torch.equal(torch.rand(3), expected)


def test_a_dry_run_leaves_the_callers_draws_alone() -> None:
    """Profiling and certifying do not change the default generator."""
    task = task_of(lambda: [nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 4)])
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    certify(task, plan_of(task, [2, 1]))
    assert torch.equal(torch.rand(3), expected)
