"""Value checks inside torch's functions do not prevent a profile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.runtime import Trainer
from pipefit.torch_internals.patches import no_negative_variance
from support.random_trainings import Case, accounts
from support.small_tasks import SGD, batch_of, plan_of


class Guess(nn.Module):
    """A model of mean and variance that computes its loss itself if it is `own`."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self._own = own

    def forward(self, x: Tensor, y: Tensor) -> Any:
        mean, variance = self.head(self.body(x).tanh()).chunk(2, 1)
        return (
            F.gaussian_nll_loss(mean, y, F.softplus(variance)) if self._own else (mean, F.softplus(variance))
        )


def task_of_guesses(own: bool) -> Task:
    """Build a task with torch's loss inside the model, or outside as a module."""
    likelihood = nn.GaussianNLLLoss()

    def batch(size: int) -> Any:
        inputs, wanted = torch.randn(size, 6), torch.randn(size, 2)
        return (inputs, wanted), None if own else wanted.clone()

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        mean, variance = outputs
        return likelihood(mean, targets, variance)

    torch.manual_seed(3)
    return Task(Guess(own), batch=batch, loss=None if own else loss, optimizer=SGD, name="guess")


@pytest.mark.sample(1)
@pytest.mark.parametrize("own", [True, False])
def test_the_gaussian_likelihood_is_trained(own: bool) -> None:
    """The step equals plain training, and the peaks equal the allocator's."""
    task = task_of_guesses(own)
    plan = plan_of(task, [1, ...])
    batch = batch_of(task, plan)
    plain, (inputs, targets) = task_of_guesses(own), batch
    assert isinstance(plain.module, nn.Module)
    losses = []
    for part in (slice(0, 2), slice(2, 4)):
        outputs = plain.module(*(tensor[part] for tensor in inputs))
        loss = outputs if plain.loss is None else plain.loss(outputs, targets[part])
        (loss / 2).backward()
        losses.append(loss.item())
    optimizer = SGD(plain.module.parameters())
    optimizer.step()
    assert Trainer(task, plan).step(batch) == pytest.approx(sum(losses) / 2)
    assert isinstance(task.module, nn.Module)
    for name, tensor in plain.module.state_dict().items():
        assert torch.equal(task.module.state_dict()[name], tensor), name
    for account in accounts(Case(name="guess", settings={}, task=task_of_guesses(own), plan=plan)):
        assert account.simulated_bytes == account.dry_run_bytes == account.oracle_bytes


def test_elsewhere_variances_are_checked() -> None:
    """torch's checks on real numbers still work, also after a profile."""
    with no_negative_variance():
        pass
    with pytest.raises(ValueError, match="negative"):
        F.gaussian_nll_loss(torch.ones(2), torch.ones(2), -torch.ones(2))
