"""Refusals of asynchronous schedules: weights without versions, and steps that cannot be trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pipefit.errors import UsageError
from pipefit.lowering import lower
from pipefit.runtime import Trainer, certify
from pipefit.schema.actions import Kind
from support.asynchronous_training import TASKS
from support.small_tasks import plan_of, task_of


class Aside(nn.Module):
    """A layer that reads its weight from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.aside = [self.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.aside[0]


def hooked() -> list[nn.Module]:
    """Register a hook on the gradient of a weight."""
    layer = nn.Linear(8, 8)
    layer.weight.register_hook(lambda gradient: 2 * gradient)
    return [layer, nn.Linear(8, 4)]


def watched_after() -> list[nn.Module]:
    """Register a hook after the accumulation of a weight's gradient."""
    layer = nn.Linear(8, 8)
    layer.weight.register_post_accumulate_grad_hook(lambda weight: None)
    return [layer, nn.Linear(8, 4)]


def side_by_side() -> list[nn.Module]:
    """Place two weights in one storage."""
    (first, last), room = (nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(16, 8)
    first.weight, last.weight = nn.Parameter(room[:8]), nn.Parameter(room[8:])
    return [first, last, nn.Linear(8, 4)]


@pytest.mark.parametrize(
    ("layers", "split", "message"),
    [
        (
            lambda: [Aside(), nn.Linear(8, 4)],
            [1, 1],
            "parameter weight of layer 0 was used other than through its attribute",
        ),
        (hooked, [1, 1], "parameter weight of layer 0 has a hook on its gradient"),
        (watched_after, [1, 1], "parameter weight of layer 0 has a hook on its gradient"),
        (side_by_side, [2, 1], "parameters weight of layer 0 and weight of layer 1 share memory"),
    ],
)
def test_weights_that_have_no_versions_are_refused(
    layers: Callable[[], list[nn.Module]], split: list[int], message: str
) -> None:
    """Weights that cannot have versions are refused by name, with the schedule that can train them."""
    task = task_of(layers)
    plan = plan_of(task, split, schedule="pipedream")
    with pytest.raises(UsageError, match=message):
        Trainer(task, plan).step(task.batch(4))


def test_a_dry_run_finds_weights_that_have_no_versions() -> None:
    """A dry run with fake parameters finds weights that cannot have versions."""
    task = task_of(lambda: [Aside(), nn.Linear(8, 4)])
    with pytest.raises(UsageError, match="was used other than through its attribute"):
        certify(task, plan_of(task, [1, 1], schedule="pipedream"))


def test_an_update_of_weights_that_are_needed_is_refused() -> None:
    """A program without the copy stops at the update of weights in use, in simulation and in training."""
    task = TASKS["perceptrons"]()
    plan = plan_of(task, [3, 3], microbatches=1, schedule="pipedream")
    trainer = Trainer(task, plan)
    trainer.step(task.batch(2))
    program = lower(plan, entered=1)
    without = replace(
        program, actions=tuple(tuple(a for a in own if a.kind is not Kind.STASH) for own in program.actions)
    )
    with pytest.raises(UsageError, match="the weights of 1 microbatch in flight"):
        trainer._run_program(without, inputs=[[torch.randn(2, 8)]], targets=[[torch.randn(2, 4)]])


def test_a_step_that_two_versions_are_too_few_for_is_refused() -> None:
    """Steps that need more than two versions are refused: fewer microbatches than stages, and batches whose
    gradients wait for each other.
    """
    task = TASKS["perceptrons"]()
    plan = plan_of(task, [2, 2, 2], microbatches=3, schedule="pipedream-2bw")
    trainer = Trainer(task, plan)
    trainer.step(task.batch(6))
    with pytest.raises(
        UsageError, match="needs at least 3 microbatches in a step, one for each stage, not 2"
    ):
        trainer.step(task.batch(4))
    trainer.step(task.batch(5))
    with pytest.raises(UsageError, match="cannot accumulate gradients over several batches"):
        Trainer(task, plan, accumulate=2).step(task.batch(6))
