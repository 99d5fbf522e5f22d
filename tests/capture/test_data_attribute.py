"""`tensor.data` in traced models: what is read there is followed, and what is written there is not lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.capture.model import build_chain
from pipefit.errors import UsageError
from pipefit.runtime import Trainer
from tiny import alone, batch_of, plan_of


class Average(nn.Module):
    """Subtracts a moving average, on which `.data` is used in some way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.update(x)
        return x - self.average

    def update(self, x: Tensor) -> None:
        """Nothing yet."""


class InPlace(Average):
    """The buffer is changed in place."""

    def update(self, x: Tensor) -> None:
        """By its data."""
        self.average.data.mul_(0.9).add_(x.data.mean(0), alpha=0.1)


class Assigned(Average):
    """The buffer gets other data."""

    def update(self, x: Tensor) -> None:
        """By assignment."""
        self.average.data = 0.9 * self.average.data + 0.1 * x.detach().mean(0)


class Clipped(Average):
    """A parameter is changed."""

    def update(self, x: Tensor) -> None:
        """For the next forward."""
        self.linear.bias.data.clamp_(-0.01, 0.01)


class Grown(Average):
    """The buffer gets data of another shape."""

    def update(self, x: Tensor) -> None:
        """By assignment."""
        self.average.data = torch.zeros(1, 6)


class Model(nn.Module):
    """A part between two layers."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(6, 6), part, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(self.first(x)))


def task_of(part: type[nn.Module]) -> Task:
    """A model that is traced."""
    return Task(
        lambda: Model(part()),
        batch=lambda size: (torch.randn(size, 6), torch.randn(size, 6)),
        loss=F.mse_loss,
        optimizer=torch.optim.SGD,
    )


@pytest.mark.parametrize("part", [InPlace, Assigned, Clipped])
def test_data_is_followed(part: type[nn.Module]) -> None:
    """Losses, parameters and buffers are those of plain training."""
    task = task_of(part)
    plan = plan_of(task, [1, 2], microbatches=2)
    losses, state = alone(task, plan, steps=2)
    trainer = Trainer(task, plan)
    assert [trainer.step(batch_of(task, plan, step)) for step in range(2)] == losses
    trained = trainer.state_dict()
    assert [name for name, tensor in state.items() if not torch.equal(tensor, trained[name])] == []


def test_data_of_another_shape_is_refused() -> None:
    """The error says what, and which way out there is."""
    with pytest.raises(UsageError, match="assigns to the data of a tensor what has another shape or type; make a new"):
        build_chain(task_of(Grown), 2)
