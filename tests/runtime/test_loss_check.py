"""Reports of a loss that is not a mean over samples, before training in microbatches."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.runtime import Trainer, certify_numbers
from support.small_tasks import plan_of

ROWS = torch.arange(1.0, 7.0)[:, None] / 10


def rows(size: int) -> tuple[Tensor, Tensor]:
    """Return the same samples in every microbatch."""
    return ROWS[:size].clone(), 2 * ROWS[:size]


def of_loss(loss: Any) -> Task:
    """Return an explicit chain of layers that return their inputs until they are trained."""
    layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    return Task(nn.Sequential(*layers), batch=rows, loss=loss, optimizer=torch.optim.SGD, name="small")


class Pairs(nn.Module):
    """A loss in which each image has one right text, and the other samples' texts are wrong ones (CLIP)."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        products = self.image(image) @ self.text(text).t()
        right = torch.arange(len(products))
        return {"loss": (F.cross_entropy(products, right) + F.cross_entropy(products.t(), right)) / 2}


def told(task: Task, **options: Any) -> str:
    """Return the certificate's message on the numbers of an explicit chain."""
    return str(certify_numbers(task, plan_of(task, [1, 1], **options))).partition("; but ")[2]


def words_that_count(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute a mean over the samples above a limit; with `rows`, their number is the same in every
    microbatch.
    """
    counts = (targets > 0.3).float()
    return (outputs * counts).sum() / counts.sum()


def test_a_sum_is_told() -> None:
    """A sum is reported: two microbatches of two samples have 0.3 on average, and their four samples together
    0.6.
    """
    task = of_loss(lambda outputs, targets: (targets - outputs).sum())
    sentence = told(task)
    assert "two microbatches of 2 have 0.3 on average, but their 4 samples together have 0.6" in sentence
    assert "microbatches=1" in sentence


def test_negatives_among_the_samples_are_told() -> None:
    """Negatives from the same batch are reported for a traced model, by a trainer and by a certificate, if
    there are several microbatches.
    """

    def batch(size: int) -> Any:
        return {"image": torch.randn(size, 4), "text": torch.randn(size, 5)}, None

    task = Task(Pairs, batch=batch, loss=None, optimizer=torch.optim.SGD, name="pairs")
    for microbatches in (1, 2):
        plan = plan_of(task, [...], microbatches=microbatches)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Trainer(task, plan)
        for sentence in ("".join(map(str, caught)), str(certify_numbers(task, plan))):
            assert (
                "the loss of pairs depends on the microbatch size: two microbatches of 2 have" in sentence
            ) == (microbatches > 1)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (F.mse_loss, {}),
        (words_that_count, {}),  # the same number in each microbatch
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
    """A mean over samples, one microbatch, an update for each microbatch, and an undecidable loss give no
    report.
    """
    assert told(of_loss(loss), **options) == ""


def test_a_weighted_mean_is_told() -> None:
    """A weighted mean is reported, since the weights' sum differs between microbatches."""
    task = replace(
        of_loss(lambda outputs, weights: (outputs * weights).sum() / weights.sum()),
        batch=lambda size: (torch.randn(size, 1), torch.rand(size, 1)),
    )
    assert "a mean over something other than samples" in told(task)
