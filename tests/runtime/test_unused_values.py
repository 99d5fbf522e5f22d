"""Values that are computed from parameters, and on which the loss does not depend: they get no gradient anywhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.profiler import profile
from step_peaks import step_peaks
from tiny import alone, batch_of, plan_of, task_of, trainer_of

WIDTH, SIZE = 16, 4
DECAYING = partial(torch.optim.SGD, lr=0.1, weight_decay=0.5)


class Beside(nn.Module):
    """Returns a value, and one more from another weight."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.aside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.main(x), torch.tanh(self.aside(x))


class First(nn.Module):
    """A layer for the first value; the others pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (self.layer(values[0]), *values[1:])


class Sometimes(nn.Module):
    """Uses the second value where the first is negative, which a profile assumes it never is."""

    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        if (values[0].detach() > 1e6).all():
            return values[0]
        return values[0] + values[1]


def first_alone(outputs: Any, target: Tensor) -> Tensor:
    return F.mse_loss(outputs[0], target)


def beside() -> list[nn.Module]:
    """Two values through three layers, and a weight that only the second depends on."""
    return [nn.Linear(WIDTH, WIDTH), Beside(), First(nn.Tanh()), First(nn.Linear(WIDTH, 4))]


def task() -> Task:
    """It is trained by an optimizer that changes every weight that has a gradient, be it zero."""
    return task_of(beside, inputs=WIDTH, loss=first_alone, optimizer=DECAYING)


@pytest.mark.parametrize("split", [[4], [2, 2], [3, 1]])
def test_they_need_what_was_foretold(split: list[int]) -> None:
    """Wherever stages end, simulator, dry run and meter equal the allocator in every step."""
    found = profile(task(), microbatch_size=SIZE, threads=torch.get_num_threads())
    peaks = step_peaks(task(), plan_of(task(), split, size=SIZE, profiled=found))
    assert peaks.dry == peaks.metered == peaks.allocated
    if len(split) > 1:
        assert peaks.simulated == peaks.allocated
    else:  # a graph that nobody needs goes with its value, which the loss drops
        assert all(told >= seen for told, seen in zip(peaks.simulated[0], peaks.allocated[0], strict=True))


@pytest.mark.parametrize("split", [[4], [2, 2], [1, 3]])
def test_weights_behind_them_alone_stay(split: list[int]) -> None:
    """Weights after two steps are plain training's, which does not update what has no gradient."""
    trainer = trainer_of(task(), split, size=SIZE)
    for step in range(2):
        trainer.step(batch_of(task(), trainer.plan, step))
    _, expected = alone(task(), trainer.plan, steps=2)
    found = trainer.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_gradient_that_nobody_expects_is_refused() -> None:
    """A layer that takes a branch at run time which its profile did not, and so uses such a value, is refused there."""
    layers = [Beside, Sometimes, partial(nn.Linear, WIDTH, 4)]
    odd = task_of(lambda: [make() for make in layers], inputs=WIDTH)
    trainer = trainer_of(odd, [1, 2], size=SIZE)
    with pytest.raises(UsageError, match=r"has a gradient for a value of shape .* when the model was profiled"):
        trainer.step(batch_of(odd, trainer.plan))
