"""Coupled samples of a batch, by any operation: default plans avoid replicas that would change
the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit import Cluster, Task, Trainer, plan, profile
from pipefit.errors import UsageError
from pipefit.profiler import feedback
from pipefit.report.plan import sentences
from pipefit.runtime.engine.forward_backward import seed_layer

WIDTH, CLASSES = 64, 8
SIZE = 128  # samples in a microbatch, enough for replicas to be fastest
TWO = Cluster.emulated((2, 64 << 20))


def with_between(*between: nn.Module) -> list[nn.Module]:
    """Build wide layers, so that replicas are faster than stages, with `between` two of them."""
    wide = (nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    return [nn.Linear(WIDTH, WIDTH), *between, *wide, nn.Linear(WIDTH, CLASSES)]


def classes(size: int) -> tuple[Tensor, Tensor]:
    """Return samples and their classes."""
    return torch.randn(size, WIDTH), torch.randint(CLASSES, (size,))


def some_ignored(size: int) -> tuple[Tensor, Tensor]:
    """Return samples and their classes, some with the ignored index."""
    inputs, targets = classes(size)
    return inputs, targets.masked_fill(torch.rand(size) < 0.4, -100)


def some_not_counted(size: int) -> tuple[Tensor, Tensor]:
    """Return samples and their classes, some with a custom ignored index."""
    inputs, targets = classes(size)
    return inputs, targets.masked_fill(torch.rand(size) < 0.4, -1)


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute InfoNCE, with the other samples as negatives."""
    there = F.one_hot(targets, CLASSES).float() + torch.linspace(0, 1, CLASSES)
    return F.cross_entropy(F.normalize(outputs) @ F.normalize(there).T, torch.arange(len(outputs)))


def masked(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a mean over the samples that count, by hand."""
    counts = (targets >= 0).float()
    return (F.cross_entropy(outputs, targets.clamp(min=0), reduction="none") * counts).sum() / counts.sum()


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a sum over the samples."""
    return F.cross_entropy(outputs, targets, reduction="sum")


class FromTheBatch(nn.Module):
    """A layer that gives each sample the variation of the batch, as the discriminators of some GANs do."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.std(0, unbiased=False).mean()


class Critic(nn.Module):
    """A GAN in one module: the generator's batch norm sees all samples of a microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        )
        self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.critic(x) - self.critic(self.generator(x))


def task_of(make: Callable[[], Any], loss: Any = F.cross_entropy, batch: Any = classes) -> Task:
    """Build a task of layers, or of a module."""

    def built() -> nn.Module:
        made = make()
        return made if isinstance(made, nn.Module) else nn.Sequential(*made)

    return Task(built, batch=batch, loss=loss, optimizer=partial(torch.optim.SGD, lr=0.1), name="model")


COUPLED: dict[str, tuple[Task, str]] = {
    "batch norm": (
        task_of(lambda: with_between(nn.BatchNorm1d(WIDTH))),
        "layer 1 normalizes over the batch",
    ),
    "a GAN": (task_of(Critic), "layer generator.1 normalizes over the batch"),
    "weights of classes": (
        task_of(with_between, nn.CrossEntropyLoss(weight=torch.arange(1.0, 1 + CLASSES))),
        "the loss divides by the weights",
    ),
    "negatives": (task_of(with_between, contrastive), "the loss differs between a microbatch and"),
    "a sum": (task_of(with_between, summed), "the loss differs between a microbatch and"),
    "targets that do not count": (
        task_of(with_between, batch=some_ignored),
        "the loss is a mean over targets",
    ),
    "a masked mean": (
        task_of(with_between, masked, some_not_counted),
        "the loss differs between a microbatch and",
    ),
    "statistics by hand": (
        task_of(lambda: with_between(FromTheBatch())),
        "the loss differs between a microbatch and",
    ),
}
APART: dict[str, Task] = {
    "plain": task_of(with_between),
    "layer norm": task_of(lambda: with_between(nn.LayerNorm(WIDTH))),
    "group norm": task_of(
        lambda: with_between(nn.Unflatten(1, (WIDTH, 1)), nn.GroupNorm(4, WIDTH), nn.Flatten())
    ),
    "instance norm": task_of(
        lambda: with_between(nn.Unflatten(1, (8, 8)), nn.InstanceNorm1d(8), nn.Flatten())
    ),
    "frozen batch norm": task_of(lambda: with_between(nn.BatchNorm1d(WIDTH).eval())),
    "no dropout": task_of(lambda: with_between(nn.Dropout(0.0))),
}
DRAWING = task_of(lambda: with_between(nn.Dropout(0.3)))


profiled = cache(partial(profile, microbatch_size=(SIZE, SIZE // 2)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", COUPLED)
def test_coupled_samples_have_no_replicas_unless_asked_for(name: str) -> None:
    """The profile says why samples are coupled; a default plan avoids replicas and says so; requested
    replicas come with a warning.
    """
    task, reason = COUPLED[name]
    found = profiled(task)
    assert found.coupled.startswith(reason)
    made = plan(found, TWO, batch_size=2 * SIZE, microbatches=2, effort=0.1)
    assert not made.is_sliced
    assert f"Replicas are not considered, because {found.coupled}" in str(made.provenance)
    assert "Replicas train to other numbers" not in " ".join(sentences(made))
    asked = plan(found, TWO, batch_size=2 * SIZE, microbatches=2, data=2, effort=0.1)
    assert asked.is_sliced
    assert f"because {found.coupled}: the numbers of 4 microbatches of {SIZE // 2} samples." in " ".join(
        sentences(asked)
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", APART)
def test_replicas_of_other_samples_are_considered(name: str) -> None:
    """Per-sample operations do not count as coupled."""
    found = profiled(APART[name])
    assert (found.coupled, found.draws) == ("", "")
    made = plan(found, TWO, batch_size=2 * SIZE, microbatches=2, effort=0.1)
    assert made.is_sliced
    assert "Replicas" not in str(made.provenance)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["negatives", "a sum", "targets that do not count", "a masked mean"])
def test_a_loss_is_seen_where_the_module_is_too_large(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random outputs go through the loss alone if the module is too large."""
    monkeypatch.setattr(feedback, "LONGEST_SECONDS", 0.0)
    task, reason = COUPLED[name]
    assert profile(task, microbatch_size=(8, 4)).coupled.startswith(reason)
    assert not profile(APART["plain"], microbatch_size=(8, 4)).coupled


def test_draws_of_replicas_are_those_of_smaller_microbatches() -> None:
    """Replicas with random draws are considered for default microbatches, but change the numbers of a
    requested size.
    """
    found = profiled(DRAWING)
    assert (found.coupled, found.draws) == ("", "layer 1 draws random numbers")
    asked = plan(found, TWO, batch_size=2 * SIZE, microbatches=2, effort=0.1)
    assert not asked.is_sliced
    assert "because layer 1 draws random numbers" in str(asked.provenance)
    free = plan(found, TWO, batch_size=SIZE, effort=0.1)
    assert free.is_sliced
    assert f"the numbers of 2 microbatches of {SIZE // 2} samples" in " ".join(sentences(free))
    halved = plan(found, TWO, batch_size=SIZE, microbatches=2, stages=1)
    plain, trainer = Trainer(DRAWING, halved), Trainer(DRAWING, free)
    for batch in batches(DRAWING, SIZE):
        assert trainer.step(batch) == pytest.approx(plain.step(batch), rel=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("task", [COUPLED["a GAN"][0], COUPLED["a masked mean"][0], APART["plain"], DRAWING])
def test_default_plans_train_as_a_plain_loop(task: Task) -> None:
    """Default plans train to the losses and weights of a loop over the requested microbatches, for every
    model.
    """
    trainer = Trainer(task, plan(profiled(task), TWO, batch_size=2 * SIZE, microbatches=2, effort=0.1))
    torch.manual_seed(0)
    module: Any = task.module()  # type: ignore[operator]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step, (inputs, targets) in enumerate(batches(task, 2 * SIZE)):
        losses = []
        for number in range(2):
            rows = slice(SIZE * number, SIZE * number + SIZE)
            outputs = inputs[rows]
            for layer, part in enumerate(module if isinstance(module, nn.Sequential) else [module]):
                seed_layer(torch.device("cpu"), 0, step, number, layer)
                outputs = part(outputs)
            losses.append(task.loss(outputs, targets[rows]) / 2)  # type: ignore[misc]
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        assert trainer.step((inputs, targets)) == pytest.approx(float(sum(losses).detach()), rel=1e-4)
    trained = trainer.state_dict()
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-3, atol=1e-5)


def test_a_batch_whose_slices_leave_out_other_numbers_of_targets_is_refused() -> None:
    """Local batches with different numbers of ignored targets are refused; the task's sample batches have
    none, so replicas were chosen. With explicit replicas, each replica's mean is used.
    """
    found = profiled(APART["plain"])
    trainer = Trainer(APART["plain"], plan(found, TWO, batch_size=2 * SIZE, microbatches=2, effort=0.1))
    inputs, targets = classes(2 * SIZE)
    targets[[0, 1, SIZE // 2]] = -100
    with pytest.raises(
        UsageError, match=r"in microbatch 0 of this batch their local batches ignore 2, 1 targets \(-100\)"
    ):
        trainer.step((inputs, targets))
    targets[SIZE // 2 + 1] = -100
    loss = trainer.step((inputs, targets))
    asked = Trainer(APART["plain"], plan(found, TWO, batch_size=2 * SIZE, microbatches=2, effort=0.1, data=2))
    assert asked.step((inputs, targets)) == pytest.approx(loss)
    targets[0] = 0
    asked.step((inputs, targets))


def batches(task: Task, size: int) -> Iterable[Any]:
    """Return three batches."""
    torch.manual_seed(1)
    return [task.batch(size) for _ in range(3)]
