"""Evaluation of traced models that read other buffers in evaluation than in training."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipefit
from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.runtime import Trainer
from pipefit.schema.cluster import Cluster
from pipefit.schema.grids import Grid, Stage
from pipefit.schema.plan import Plan
from pipefit.schema.training import Training
from support.known_profiles import profile

pytestmark = pytest.mark.usefixtures("one_thread")


class Centred(nn.Linear):
    """A linear layer of the deviation from a mean, if it is given one."""

    def forward(self, x: Tensor, mean: Tensor | None = None) -> Tensor:
        return super().forward(x if mean is None else x - mean)


class Counting(nn.Module):
    """A model that counts steps after its last layer, and reads its features' mean in evaluation only,
    `early` or late.
    """

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Centred(8, 8) for _ in range(4))
        self.head, self.early = Centred(8, 3), early
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x, None if self.training or not self.early or number else self.mean))
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.5)
                self.steps.add_(1)
        return self.head(x, None if self.training or self.early else self.mean)


def batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 8), torch.randn(size, 3)


def evaluated(early: bool, cuts: list[int]) -> tuple[float, float, Any]:
    """Return the evaluation loss of a batch after a step, of a trainer and of a plain loop; and the trainer."""
    torch.manual_seed(1)
    plain = Counting(early)
    task = Task(
        lambda: Counting(early), batch=batch, loss=F.mse_loss, optimizer=lambda g: torch.optim.SGD(g, lr=0.1)
    )
    costs = profile(task, microbatch_size=2)
    edges = [0, *cuts, len(costs.layers)]
    plan = Plan(
        profile=costs,
        cluster=Cluster.emulated((len(edges) - 1, 1 << 30)),
        training=Training(batch_size=4, microbatches=2),
        stages=tuple(Stage(start=a, stop=b, grid=Grid.of(n)) for n, (a, b) in enumerate(pairwise(edges))),
    )
    trainer = Trainer(task, plan)
    plain.load_state_dict(trainer.state_dict())
    given, updates = batch(4), torch.optim.SGD(plain.parameters(), lr=0.1)
    trainer.step(given)
    parts = list(zip(*(tensor.split(2) for tensor in given), strict=True))
    for x, y in parts:
        (F.mse_loss(plain(x), y) / 2).backward()
    updates.step()
    plain.eval()
    with torch.no_grad():
        wanted = sum(F.mse_loss(plain(x), y).item() for x, y in parts) / 2
    return trainer.evaluate(given), wanted, trainer


@pytest.mark.sample(1)
@pytest.mark.parametrize("cuts", [[], [4], [2, 6]])
def test_buffers_that_only_training_reads_are_left_out_of_an_evaluation(cuts: list[int]) -> None:
    """Evaluation leaves out training-only buffers, whichever layer or stage would hold them: the loss is the
    plain module's.
    """
    found, wanted, trainer = evaluated(False, cuts)
    assert found == pytest.approx(wanted, rel=1e-6)
    assert trainer.state_dict()["steps"] == 2


def test_a_buffer_that_another_layer_of_the_stage_has_in_training_is_read() -> None:
    """An evaluation reads the training statistics, though another layer of the stage holds them in training."""
    found, wanted, _ = evaluated(True, [])
    assert found == pytest.approx(wanted, rel=1e-6)


def test_a_buffer_of_another_stage_is_refused() -> None:
    """A buffer of another stage is refused: the first stage does not have the last one's statistics."""
    with pytest.raises(
        UsageError, match=r"needs mean in this mode, which its stage does not hold in training"
    ):
        evaluated(True, [4])


class Scaled(nn.Module):
    """Layers that one buffer scales, which has three names and is in the state dict under two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.rand(8))
        self.first.register_buffer("own", self.scale)
        self.second.register_buffer("outside", self.scale, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * self.first.own) * self.second.outside * self.scale


def trained(module: nn.Module, stages: int = 1) -> tuple[Trainer, tuple[Tensor, Tensor]]:
    """Return a trainer of `module` and a batch of four samples."""
    task = Task(module, batch=lambda size: (torch.randn(size, 8),) * 2, loss=F.mse_loss)
    cluster = Cluster.emulated(*[(1, 1 << 30)] * stages)
    plan = pipefit.plan(
        profile(task, microbatch_size=2), cluster, batch_size=4, microbatches=2, stages=stages, certify=False
    )
    return Trainer(task, plan, numbers=False), task.batch(4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("stages", [1, 2])
def test_a_buffer_with_several_names_is_read_in_evaluation(stages: int) -> None:
    """Evaluation reads a buffer of several names, whichever of them a layer knows."""
    torch.manual_seed(0)
    module = Scaled()
    trainer, (x, y) = trained(module, stages)
    assert trainer.evaluate((x, y)) == pytest.approx(F.mse_loss(module(x), y).item(), rel=1e-6)


class Skipping(Scaled):
    """A model that leaves out its first layer in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else self.second(x)


def test_an_evaluation_of_other_layers_is_refused() -> None:
    """The refusal does not blame the size of the batch, and names a way."""
    trainer, batch = trained(Skipping())
    with pytest.raises(UsageError, match=r"has other layers than the plan: evaluate with a separate module"):
        trainer.evaluate(batch)


class Biased(nn.Module):
    """Layers that pass on a table of biases, whose memory is in another order than its dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(16, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.table(torch.arange(16).view(4, 4)).permute(2, 0, 1).unsqueeze(0)
        for layer in self.layers:
            x, bias = torch.tanh(layer(x)) + bias.mean(), bias * 2
        result: Tensor = self.head(x)
        return result


def test_smaller_batches_and_evaluations_keep_the_measured_order_of_memory() -> None:
    """A permuted value crosses a cut in the order of the profile, also from a model that is traced again."""
    torch.manual_seed(0)
    own = Biased()
    plain, task = copy.deepcopy(own), Task(own, batch=batch, loss=F.mse_loss, optimizer=torch.optim.SGD)
    costs = profile(task, microbatch_size=2)
    edges = 0, len(costs.layers) // 2, len(costs.layers)
    stages = (Stage(start=a, stop=b, grid=Grid(devices=(n,))) for n, (a, b) in enumerate(pairwise(edges)))
    plan = Plan(
        profile=costs,
        cluster=Cluster.emulated((2, 1 << 30)),
        training=Training(batch_size=4, microbatches=2),
        stages=tuple(stages),
    )
    trainer, (inputs, targets) = Trainer(task, plan), batch(3)
    assert not plan.decisions and len(costs.layers) > 3
    expected = F.mse_loss(plain.eval()(inputs[:2]), targets[:2]).item()
    assert trainer.evaluate((inputs[:2], targets[:2])) == pytest.approx(expected, rel=1e-6)
    losses = [F.mse_loss(plain(inputs[part]), targets[part]).item() for part in (slice(2), slice(2, 3))]
    assert trainer.step((inputs, targets)) == pytest.approx((2 * losses[0] + losses[1]) / 3, rel=1e-6)
