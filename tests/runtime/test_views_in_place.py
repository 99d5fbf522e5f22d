"""In-place layers on views returned by the layer before, and layers that return what is not theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.runtime import certify
from pipefit.schema.trace import Category
from pipefit.simulator import simulate
from support.known_profiles import profile
from support.small_tasks import alone, batch_of, plan_of, task_of, trainer_of
from support.step_peaks import step_peaks

WIDTH, ROWS, SIZE = 16, 12, 2


class Apply(nn.Module):
    """A function as a layer; `held` is a parameter that it may return."""

    def __init__(
        self, function: Callable[..., Tensor | tuple[Tensor, ...]], *, uses_held: bool = False
    ) -> None:
        super().__init__()
        self.function, self.held = function, nn.Parameter(torch.ones(ROWS, WIDTH)) if uses_held else None

    def forward(self, x: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        return self.function(x) if self.held is None else self.function(x, self.held)


class Before(nn.Linear):
    """A linear layer whose input a function changes first, in place or not."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.change(x))


Layers = Callable[[], Sequence[nn.Module]]
IN_PLACE: dict[str, Layers] = {
    "an activation behind a product": lambda: [linear(), linear(), nn.ReLU(inplace=True), linear()],
    "two behind another view": lambda: [
        linear(),
        nn.Flatten(),
        Apply(lambda x: x.mul_(2)),
        nn.ReLU(inplace=True),
        rows_of(),
    ],
    "a product with one number": lambda: [linear(), Apply(lambda x: x.mul_(2.0)), linear()],
    "before a product in the same layer": lambda: [linear(), Before(Tensor.relu_), linear()],
    "a number before a product": lambda: [linear(), Before(lambda x: x.mul_(2)), linear()],
    "a new number before a product": lambda: [linear(), Before(lambda x: x / 2.0), linear()],
}


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def rows_of() -> nn.Module:
    """Undo a flattening."""
    return nn.Unflatten(1, (ROWS, WIDTH))


def rows(layers: Layers) -> Task:
    """Return a task of these layers on three-dimensional values; a linear layer returns a view of them."""

    def batch(size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(size, ROWS, WIDTH), torch.randn(size, ROWS, WIDTH)

    return replace(task_of(layers), batch=batch)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", IN_PLACE)
def test_they_need_what_was_foretold(name: str) -> None:
    """On one stage and on two, simulator, dry run and meter equal the allocator in every step."""
    task = rows(IN_PLACE[name])
    found = profile(task, microbatch_size=SIZE, threads=torch.get_num_threads())
    count = len(found.layers)
    for split in ([count], [count - 1, 1]):
        peaks = step_peaks(task, plan_of(task, split, size=SIZE, profiled=found))
        assert peaks.simulated == peaks.dry == peaks.metered == peaks.allocated, split


@pytest.mark.parametrize("name", IN_PLACE)
def test_they_change_no_number(name: str) -> None:
    """Loss and weights after a step equal plain training bit by bit."""
    task = rows(IN_PLACE[name])
    trainer = trainer_of(task, [len(IN_PLACE[name]())], size=SIZE)
    loss = trainer.step(batch_of(task, trainer.plan))
    (expected,), state = alone(task, trainer.plan)
    assert loss == expected
    found = trainer.state_dict()
    assert all(torch.equal(found[key], tensor) for key, tensor in state.items())


def views() -> list[nn.Module]:
    """Return a value and a view of it; the next layer changes one of them."""
    changing = Apply(lambda pair: pair[0].relu_() + pair[1])
    return [linear(), Apply(lambda x: (x, x.view(x.shape))), changing, linear()]


def passed_on() -> list[nn.Module]:
    """Return both with a layer between that passes them on."""
    return [*views()[:2], Apply(lambda pair: (pair[1], pair[0])), *views()[2:]]


def a_parameter() -> list[nn.Module]:
    """Return a parameter as a value, which the next layer changes."""
    held = Apply(lambda x, held: (x, held[None]), uses_held=True)
    return [linear(), held, Apply(lambda pair: pair[0] + pair[1].detach().relu_()), linear()]


class Held(nn.Module):
    """A layer that returns a parameter or buffer of its own, or a view of it, after its input."""

    def __init__(self, *, buffer: bool, view: bool) -> None:
        super().__init__()
        self.view, held = view, torch.ones(ROWS, WIDTH)
        if buffer:
            self.register_buffer("held", held)
        else:
            self.held = nn.Parameter(held)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        held = self.held
        return x.add_(1.0), held[None] if self.view else held


@pytest.mark.sample(4)
@pytest.mark.parametrize("buffer", [False, True], ids=["parameter", "buffer"])
@pytest.mark.parametrize("view", [False, True], ids=["itself", "view"])
@pytest.mark.parametrize("schedule", ["1f1b", "torchgpipe"])
def test_a_parameter_as_a_value_stays_a_parameter(buffer: bool, view: bool, schedule: str) -> None:
    """All accounts equal the allocator's, and in both others a sent parameter counts as a parameter."""
    task = rows(lambda: [linear(), Held(buffer=buffer, view=view), Apply(lambda pair: pair[0] * pair[1])])
    plan = plan_of(task, [1, 1, 1], size=SIZE, microbatches=3, schedule=schedule)
    peaks = step_peaks(task, plan)
    assert peaks.simulated == peaks.dry == peaks.metered == peaks.allocated
    for trace in (simulate(plan), certify(task, plan)):
        held = [sample.by_category[Category.PARAMETERS] for sample in trace.devices[1].memory]
        assert set(held) == {4 * ROWS * WIDTH}


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (views, "layer 2 changes its input 0 in place, but that input shares memory with input 1"),
        (passed_on, "layer 3 changes its input 0 in place, but that input shares memory with input 1"),
        (
            a_parameter,
            "layer 2 changes its input 1 in place, but that input shares memory with a parameter or buffer",
        ),
    ],
)
def test_what_shares_memory_with_others_is_not_changed_in_place(layers: Layers, words: str) -> None:
    """At the end of a stage, an in-place change of shared memory is refused with a fix, because the other
    tensors would not change with it.
    """
    with pytest.raises(UsageError, match=rf"{words}.*return a clone\(\)"):
        profile(rows(layers), microbatch_size=SIZE)
