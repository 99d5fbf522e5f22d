"""Losses computed inside the model, or passed on: peaks equal the allocator's to the byte."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.largest.task_plans import plan as planned
from pipefit.models.hugging_face import hf
from pipefit.runtime import Trainer, certify
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.training import Training
from pipefit.simulator import simulate
from support.allocator_events import measured_peaks
from support.gallery_samples import sampled
from support.huggingface_models import TINY
from support.known_profiles import profile
from support.small_tasks import SGD

STEPS = 2


# Workspaces of kernels depend on the threads; profiles assume one
pytestmark = pytest.mark.usefixtures("one_thread")


class Named(nn.Module):
    """A module that takes named inputs of a data loader and computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, given: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(self.head(torch.tanh(self.body(given))), wanted)


class Own(nn.Module):
    """A module that computes its own loss in its small last layer."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.reduce, self.body, self.head = reduce, nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(self.head(torch.tanh(self.body(x))))


class Apply(nn.Module):
    """A function as a layer of a chain."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Dropping(nn.Module):
    """A layer that discards one of its results."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        hidden.tanh()
        return hidden


def chain(*ends: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1), *ends)


def alone(size: int) -> tuple[Tensor, None]:
    return torch.randn(size, 8), None


def aimed(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 8), torch.randn(size, 1)


def squared(outputs: Any, targets: Any) -> Tensor:
    found: Tensor = (outputs - targets).pow(2).mean()
    return found


TASKS: dict[str, Callable[[], Task]] = {
    "mean inside": lambda: Task(lambda: Own(torch.mean), batch=alone, loss=None, optimizer=SGD),
    "sum inside": lambda: Task(lambda: Own(torch.sum), batch=alone, loss=None, optimizer=SGD),
    "a part that sums": lambda: Task(chain(Apply(torch.sum)), batch=alone, loss=None, optimizer=SGD),
    "a part that averages": lambda: Task(chain(Apply(torch.mean)), batch=alone, loss=None, optimizer=SGD),
    "parts behind the loss": lambda: Task(
        chain(Apply(torch.mean), Apply(lambda x: x.view(1)), Apply(torch.neg)),
        batch=alone,
        loss=None,
        optimizer=SGD,
    ),
    "in double precision": lambda: Task(
        chain(Apply(lambda x: x.double().pow(2).mean())), batch=alone, loss=None, optimizer=SGD
    ),
    "in half precision": lambda: Task(
        chain(), batch=aimed, loss=squared, optimizer=SGD, precision="bfloat16"
    ),
    "mixed": lambda: Task(chain(), batch=aimed, loss=squared, optimizer=SGD, precision="mixed-bfloat16"),
    "a loss outside that only takes the value": lambda: Task(
        chain(Apply(torch.mean)), batch=aimed, loss=lambda output, target: output, optimizer=SGD
    ),
    "a loss outside": lambda: Task(chain(), batch=aimed, loss=F.mse_loss, optimizer=SGD),
    "a result that is dropped": lambda: Task(
        lambda: nn.Sequential(Dropping(), nn.Linear(8, 1)), batch=aimed, loss=F.mse_loss, optimizer=SGD
    ),
    "gpt2": lambda: hf("gpt2", **TINY["gpt2"]),
}


def plans(task: Task) -> Iterator[Plan]:
    """Return plans with one stage, and with the last layer alone."""
    found = profile(task, microbatch_size=2)
    count = len(found.layers)
    for edges in ((0, count), (0, count - 1, count)):
        yield Plan(
            profile=found,
            cluster=Cluster.emulated((len(edges) - 1, 1 << 30)),
            training=Training(batch_size=6, microbatches=3, precision=found.assumptions.precision),
            stages=tuple(Stage(start=a, stop=b, grid=Grid.of(n)) for n, (a, b) in enumerate(pairwise(edges))),
        )


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", sampled(TASKS, often=TASKS.keys() - {"gpt2"}))
def test_the_seed_of_a_backward_is_counted_as_it_lives(name: str) -> None:
    """The gradient of the loss has the loss's dtype and is freed after its last use, in any layer: simulator,
    dry run and meter equal the allocator on every stage and in every step.
    """
    task = TASKS[name]()
    for plan in plans(task):
        dry, predicted, trainer = certify(task, plan), simulate(plan, steps=STEPS), Trainer(task, plan)
        for step in range(STEPS):
            torch.manual_seed(step)
            trainer.step(task.batch(plan.training.batch_size))
        for stage, peaks in enumerate(measured_peaks(task, plan, steps=STEPS)):
            for step, nbytes in enumerate(peaks):
                found = [
                    trace.devices[stage].step_peak_bytes(step) for trace in (predicted, dry, trainer.trace)
                ]
                assert found == [nbytes] * 3, f"{plan.split}, stage {stage}, step {step}"


@pytest.mark.gallery
def test_a_plan_that_just_fits_trains() -> None:
    """A GPT-2 with its own loss trains with budgets of exactly the predicted peaks."""
    task = TASKS["gpt2"]()
    *_, plan = plans(task)
    peaks = simulate(plan, steps=STEPS).peak_bytes
    cluster = Cluster.emulated(*((1, peak) for peak in peaks))
    tight = Plan(profile=plan.profile, cluster=cluster, training=plan.training, stages=plan.stages)
    trainer = Trainer(task, tight)
    for _ in range(STEPS):
        trainer.step(task.batch(plan.training.batch_size))
    assert trainer.trace.peak_bytes == peaks


def test_a_dictionary_alone_is_a_batch_of_a_model_with_its_own_loss() -> None:
    """A batch may be a dictionary if the model computes its own loss; the losses equal a plain loop's."""
    rows = [{"given": torch.randn(8), "wanted": torch.randn(1)} for _ in range(8)]
    loader = DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    torch.manual_seed(0)
    module = Named()
    plain, task = (
        copy.deepcopy(module),
        Task(
            module,
            batch=lambda size: next(iter(DataLoader(rows, batch_size=size))),
            loss=None,
            optimizer=SGD,  # type: ignore[arg-type]
        ),
    )
    made = planned(
        task, "emulated:2x1MiB", batch_size=4, microbatches=1, stages=2, data=1, tensor=1, planner="exact"
    )
    trainer, optimizer = Trainer(task, made), SGD(plain.parameters())
    for batch in loader:
        optimizer.zero_grad()
        loss = plain(**batch)
        loss.backward()
        optimizer.step()
        assert trainer.step(batch) == loss.item()
    assert trainer.evaluate(batch) == plain(**batch).item()


def test_a_dictionary_alone_has_no_targets_for_a_loss() -> None:
    """A dictionary without targets is refused if the task has a loss."""
    task = Task(Named, batch=lambda size: {"given": torch.zeros(size, 8)}, loss=F.mse_loss)
    with pytest.raises(UsageError, match="is only a dictionary, but the task's loss takes targets: return"):
        profile(task, microbatch_size=1)
