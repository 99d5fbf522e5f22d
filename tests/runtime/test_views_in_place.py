"""In-place layers on views returned by the layer before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.profiler import profile
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
