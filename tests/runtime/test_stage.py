"""Stages with odd layers at their ends and odd values between them; memory is freed after its last use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.runtime import certify
from pipefit.schema.trace import Category, MemorySample
from support.gallery_samples import sampled
from support.known_profiles import profile
from support.small_tasks import alone, batch_of, plan_of, task_of, trainer_of

STEPS = 3


class Split(nn.Module):
    """x to (linear(x), x's sign as booleans, a count of the layers so far)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x), x > 0, torch.ones(len(x), 1, dtype=torch.int64)


class Masked(nn.Module):
    """A layer that uses the mask, increments the count and passes on all three."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, values: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, mask, count = values
        return self.linear(x) * mask, mask, count + 1


class Merge(nn.Module):
    """A layer that uses the number and the count."""

    def forward(self, values: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return values[0] / values[2]


class Two(nn.Module):
    """A layer with two outputs that both need a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(x), self.right(x)


class First(nn.Module):
    """A layer that uses only the first of its inputs."""

    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        return values[0]


def frozen(layer: nn.Module) -> nn.Module:
    """Freeze the layer's parameters."""
    return layer.requires_grad_(False)


ODD: dict[str, tuple[Callable[[], Sequence[nn.Module]], tuple[int, ...]]] = {
    "in place first": (lambda: [nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)], (1, 2)),
    "in place last": (lambda: [nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)], (2, 1)),
    "in place on the data": (lambda: [nn.ReLU(inplace=True), nn.Linear(8, 4)], (1, 1)),
    "in place alone": (lambda: [nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)], (1, 1, 1)),
    "masks and counts": (lambda: [Split(), Masked(), Masked(), Merge(), nn.Linear(8, 4)], (1, 1, 1, 1, 1)),
    "unused output": (lambda: [nn.Linear(8, 8), Two(), First(), nn.Linear(8, 4)], (1, 1, 1, 1)),
    "frozen first": (lambda: [frozen(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 4)], (1, 1, 1)),
    "frozen between": (lambda: [nn.Linear(8, 8), frozen(nn.Linear(8, 8)), nn.Linear(8, 4)], (1, 1, 1)),
    "frozen last": (lambda: [nn.Linear(8, 8), frozen(nn.Linear(8, 4))], (1, 1)),
    "frozen weight": (lambda: [nn.Linear(8, 8), _frozen_weight(), nn.Linear(8, 4)], (1, 2)),
    "no parameters": (lambda: [nn.Identity(), nn.Linear(8, 4), nn.Tanh()], (1, 1, 1)),
    "views": (lambda: [nn.Unflatten(1, (2, 4)), nn.Flatten(), nn.Linear(8, 4), nn.Identity()], (1, 1, 1, 1)),
}


def _frozen_weight() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.weight.requires_grad_(False)
    return layer


@pytest.mark.sample(5)
@pytest.mark.parametrize("schedule", sampled(["gpipe", "1f1b"], often=["1f1b"]))
@pytest.mark.parametrize("name", ODD)
def test_odd_stages_train_as_one_device_does(name: str, schedule: str) -> None:
    """Parameters after three steps of odd stages equal plain training bit by bit; mean losses up to the last
    bit.
    """
    layers, split = ODD[name]
    task = task_of(layers)
    trainer = trainer_of(task, split, microbatches=3, schedule=schedule)
    losses = [trainer.step(batch_of(task, trainer.plan, step)) for step in range(STEPS)]
    expected, state = alone(task, trainer.plan, STEPS)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert all(torch.equal(trainer.state_dict()[name], tensor) for name, tensor in state.items())


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ODD)
def test_odd_stages_are_certified(name: str) -> None:
    """The dry run's samples equal the real run's, action by action and byte by byte."""
    layers, split = ODD[name]
    task = task_of(layers)
    trainer = trainer_of(task, split, microbatches=3)
    predicted = certify(task, trainer.plan)
    for step in range(2):
        trainer.step(batch_of(task, trainer.plan, step))

    def rows(samples: Sequence[MemorySample]) -> list[tuple[str, int]]:
        return [(sample.action, sample.total_bytes) for sample in samples]

    measured = trainer.trace
    for ours, real in zip(predicted.devices, measured.devices, strict=True):
        assert rows(ours.memory) == rows(real.memory)


def test_nothing_learns_where_all_is_frozen() -> None:
    """A model without trainable parameters runs, reports its loss, and does not change."""
    task = task_of(lambda: [frozen(nn.Linear(8, 8)), frozen(nn.Linear(8, 4))])
    trainer = trainer_of(task, [1, 1])
    before = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    losses = [trainer.step(batch_of(task, trainer.plan)) for _ in range(2)]
    assert losses[0] == losses[1] == pytest.approx(alone(task, trainer.plan)[0][0], rel=1e-6)
    assert all(torch.equal(before[name], tensor) for name, tensor in trainer.state_dict().items())


def samples(task: Task, split: Sequence[int], **training: Any) -> list[list[MemorySample]]:
    """Return the dry run's samples of every device in the steady step."""
    trace = certify(task, plan_of(task, split, **training))
    return [[sample for sample in device.memory if sample.step == 1] for device in trace.devices]


def test_outputs_go_when_they_are_sent() -> None:
    """A stage holds its large outputs only until they are sent, with any number of microbatches in flight."""
    task = task_of(lambda: [nn.Linear(8, 1000, bias=False), nn.Linear(1000, 4)])
    first, _ = samples(task, [1, 1], size=2, microbatches=8, schedule="gpipe")
    output, weights, row = 2 * 1000 * 4, 8 * 1000 * 4, 2 * 8 * 4
    forwards = [sample.total_bytes for sample in first if "0F" in sample.action]
    held = [min(number, 2) for number in range(1, 8)] + [
        3
    ]  # the last time a gradient, as large, is expected too
    assert forwards == [weights + number * row + large * output for number, large in enumerate(held, 1)]


def test_received_gradients_go_when_they_are_used() -> None:
    """A backward of thin layers after a wide output peaks with one wide gradient: the received one is freed
    before the rest.
    """
    task = task_of(lambda: [nn.Linear(8, 8), nn.Linear(8, 2000, bias=False), Expand(), nn.Linear(2000, 4)])
    first, _ = samples(task, [3, 1], size=2, microbatches=1)
    wide, weights = 2 * 2000 * 4, 8 * 2000 * 4
    (backward,) = [sample for sample in first if sample.action == "0B0"]
    parameters = backward.by_category[Category.PARAMETERS]
    # the wide gradients of Expand's output and of its input exist together once, then only the second with
    # the weights'
    assert backward.total_bytes - parameters < 2 * wide + weights
    assert backward.total_bytes - parameters >= wide + weights


class Expand(nn.Module):
    """A layer that multiplies by three and saves no tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.mul(x, 3.0)


def test_a_step_leaves_what_it_found() -> None:
    """After a step a device holds only parameters, buffers, optimizer state and the losses' buffers."""
    task = task_of(
        lambda: [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 4)],
        optimizer=torch.optim.AdamW,
    )
    trainer = trainer_of(task, [1, 3], microbatches=3)
    for step in range(3):
        trainer.step(batch_of(task, trainer.plan, step))
        for runner, stage in zip(trainer.runners, trainer.stages, strict=True):
            kept = [*stage.parameters, *stage.held, *stage.kept_losses, *stage.optimizer_state()]
            assert runner.meter.total == sum(tensor.nbytes for tensor in kept)


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (lambda output, target: (output - target) ** 2, r"a tensor of shape \(2, 4\)"),
        (lambda output, target: 3.0, "a float"),
        (lambda output, target: (F.mse_loss(output, target), 1), "a tuple"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(loss: Callable[[Any, Any], Any], what: str) -> None:
    """A loss that is not a scalar is refused by the profiler, and by the runtime if it becomes one later."""
    task = task_of(lambda: [nn.Linear(8, 4)], loss=loss)
    with pytest.raises(UsageError, match="the loss must be a scalar tensor"):
        profile(task, microbatch_size=2)
    mood = {"loss": F.mse_loss}

    def by_mood(output: Tensor, target: Tensor) -> Any:
        return mood["loss"](output, target)

    fickle = task_of(lambda: [nn.Linear(8, 4)], loss=by_mood)
    trainer = trainer_of(fickle, [1])
    mood["loss"] = loss
    with pytest.raises(UsageError, match=f"the loss must be a scalar tensor, not {what}"):
        trainer.step(batch_of(fickle, trainer.plan))
