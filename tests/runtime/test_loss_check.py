"""A loss that is no mean over samples is told before it is trained in microbatches."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.profiler import profile
from pipefit.runtime import Trainer, certify_numbers
from tiny import plan_of

ROWS = torch.arange(1.0, 7.0)[:, None] / 10


def rows(size: int) -> tuple[Tensor, Tensor]:
    """The same samples in every microbatch."""
    return ROWS[:size].clone(), 2 * ROWS[:size]


def of_loss(loss: Any) -> Task:
    """A chain by hand: its layers return what comes into them, until it is trained."""
    layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    return Task(nn.Sequential(*layers), batch=rows, loss=loss, optimizer=torch.optim.SGD, name="small")


class Pairs(nn.Module):
    """Each image has one right text, and those of the other samples are wrong ones (CLIP)."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        products = self.image(image) @ self.text(text).t()
        right = torch.arange(len(products))
        return {"loss": (F.cross_entropy(products, right) + F.cross_entropy(products.t(), right)) / 2}


def told(task: Task, **options: Any) -> str:
    """What the certificate says of the numbers of a chain by hand."""
    return str(certify_numbers(task, plan_of(task, [1, 1], **options))).partition("; but ")[2]


def words_that_count(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean over those samples that are above a limit: of `rows`, the same number in every microbatch."""
    counts = (targets > 0.3).float()
    return (outputs * counts).sum() / counts.sum()


def test_a_sum_is_told() -> None:
    """Two samples add up to 0.1 + 0.2 less what is wanted, twice that; four to twice as much."""
    task = of_loss(lambda outputs, targets: (targets - outputs).sum())
    sentence = told(task)
    assert "two of 2 have 0.3 on average, and their 4 samples together 0.6" in sentence
    assert "microbatches=1" in sentence


def test_negatives_among_the_samples_are_told() -> None:
    """Of a traced model, by a trainer and by a certificate, where there are several microbatches."""

    def batch(size: int) -> Any:
        return {"image": torch.randn(size, 4), "text": torch.randn(size, 5)}, None

    task = Task(Pairs, batch=batch, loss=None, optimizer=torch.optim.SGD, name="pairs")
    layers = len(profile(task, microbatch_size=2).layers)
    for microbatches in (1, 2):
        plan = plan_of(task, [layers], microbatches=microbatches)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Trainer(task, plan)
        for sentence in ("".join(map(str, caught)), str(certify_numbers(task, plan))):
            assert ("the loss of pairs depends on the size of microbatches: two of 2 have" in sentence) == (
                microbatches > 1
            )


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (F.mse_loss, {}),
        (words_that_count, {}),  # as many in each microbatch
        (lambda outputs, targets: (targets - outputs).sum(), {"microbatches": 1}),
        (
            lambda outputs, targets: (targets - outputs).sum(),
            {"schedule": "pipedream"},
        ),  # an update for each of them
        (lambda outputs, targets: outputs.sum() * torch.rand(()), {}),  # another loss in every call
        (lambda outputs, targets: outputs.sum() / 0, {}),
    ],
)
def test_nothing_is_said_without_a_difference(loss: Any, options: dict[str, Any]) -> None:
    """Of a mean over samples, of one microbatch, of updates for each of them, and where it cannot be known."""
    assert told(of_loss(loss), **options) == ""


def test_a_weighted_mean_is_told() -> None:
    """Samples count by their weights, which add up to another number in each microbatch."""
    task = replace(
        of_loss(lambda outputs, weights: (outputs * weights).sum() / weights.sum()),
        batch=lambda size: (torch.randn(size, 1), torch.rand(size, 1)),
    )
    assert "a mean over other things than samples" in told(task)
