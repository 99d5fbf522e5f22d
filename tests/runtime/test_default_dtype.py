"""Scripts that set another default floating-point dtype than float32 before they build a model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.runtime import Trainer, certify
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.training import Training
from pipefit.simulator import simulate
from support.known_profiles import profile
from support.small_tasks import task_of

SGD = partial(torch.optim.SGD, lr=0.1)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def halves(task: Task, *, clip_norm: float | None = None) -> Plan:
    """Return two layers on the first device, and one on the second."""
    profiled = profile(task, microbatch_size=2)
    return Plan(
        profile=profiled,
        cluster=Cluster.emulated((2, 1 << 30)),
        training=Training(
            batch_size=8, microbatches=4, precision=profiled.assumptions.precision, clip_norm=clip_norm
        ),
        stages=(Stage(start=0, stop=2, grid=Grid.of(0)), Stage(start=2, stop=3, grid=Grid.of(1))),
    )


def test_bytes_are_those_simulated_and_numbers_those_of_plain_training() -> None:
    """For a model in double precision with clipped gradients, bytes are those simulated; losses are in double
    precision too.
    """
    task = task_of(lambda: [nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)], optimizer=SGD)
    plan = halves(task, clip_norm=0.5)
    trainer, batch = Trainer(task, plan), task.batch(8)
    loss = trainer.step(batch)
    torch.manual_seed(0)
    model = task.build()
    expected = F.mse_loss(model(batch[0]), batch[1])
    expected.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    SGD(model.parameters()).step()
    assert simulate(plan).peak_bytes == certify(task, plan).peak_bytes == trainer.trace.peak_bytes
    assert loss == pytest.approx(float(expected), rel=1e-14)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float64
        torch.testing.assert_close(trainer.state_dict()[name], parameter.data, rtol=1e-6, atol=1e-6)


def test_losses_are_scaled() -> None:
    """Overflows are found with a loss scale in single precision, as torch's kernel requires."""
    task = Task(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)),
        batch=lambda size: (torch.randn(size, 8), torch.randn(size, 4)),
        loss=lambda outputs, targets: F.mse_loss(outputs.float(), targets.float()),
        optimizer=SGD,
        precision="master-float16",
    )
    assert Trainer(task, halves(task)).step(task.batch(8)) > 0
