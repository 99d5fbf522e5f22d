"""Gradients that are expanded, or parts of larger ones, which the previous layer may copy first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipefit.capture import Task
from support.known_profiles import profile
from support.small_tasks import plan_of, task_of
from support.step_peaks import step_peaks, too_low

WIDTH, SIZE = 64, 32
Parts = tuple[Tensor, ...]


class Apply(nn.Module):
    """A function as a part of a chain."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class Pair(nn.Module):
    """Two results of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Parts:
        return F.gelu(self.first(x)), self.second(x)


def joined(join: Callable[[Parts], Tensor]) -> list[nn.Module]:
    """Return a pair joined into one tensor."""
    return [Pair(), Apply(join), nn.Flatten(), nn.Linear(2 * WIDTH, 4)]


def ending(*layers: nn.Module) -> list[nn.Module]:
    """Return a linear layer and the loss's input."""
    return [nn.Linear(WIDTH, WIDTH), *layers]


def summed(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


def columns(output: Tensor, target: Tensor) -> Tensor:
    return output.sum(0).pow(2).mean()


def part(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output[:, 0], target[:, 0])


Layers = Callable[[], Sequence[nn.Module]]
CASES: dict[str, tuple[Layers, Callable[[Tensor, Tensor], Tensor]]] = {
    "sum of a linear layer": (lambda: ending(nn.ReLU(), nn.Linear(WIDTH, WIDTH)), summed),
    "sum of a layer norm": (lambda: ending(nn.LayerNorm(WIDTH)), summed),
    "sum of a GELU": (lambda: ending(nn.GELU()), summed),
    "sum of a convolution": (lambda: ending(nn.Unflatten(1, (4, 16)), nn.Conv1d(4, 4, 3, padding=1)), summed),
    "sum of a batch norm": (lambda: ending(nn.BatchNorm1d(WIDTH)), summed),
    "sum of columns": (lambda: ending(nn.LayerNorm(WIDTH)), columns),
    "sum behind a view": (lambda: ending(nn.GELU(), nn.Unflatten(1, (8, 8)), nn.Flatten()), summed),
    "one column": (lambda: ending(nn.GELU()), part),
    "stacked": (lambda: joined(lambda parts: torch.stack(parts, -1)), F.mse_loss),
    "joined in rows": (lambda: joined(lambda parts: torch.cat(parts, 1)), F.mse_loss),
    "averaged": (lambda: ending(nn.GELU(), nn.Unflatten(1, (8, 8)), Apply(lambda x: x.mean(1))), F.mse_loss),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", CASES)
def test_gradients_that_are_not_dense_change_no_peak_unforeseen(name: str) -> None:
    """Non-dense gradients change no peak unexpectedly, on one stage or with the last layer on another, which
    sends a dense gradient: simulator, dry run and meter equal the allocator in every step. The simulator may
    be higher if the gradient passes a view on its way.
    """
    layers, loss = CASES[name]
    task = task_of(layers, inputs=WIDTH, outputs=8 if name == "averaged" else 4, loss=loss)
    profiled = profile(task, microbatch_size=SIZE, threads=torch.get_num_threads())
    count = len(profiled.layers)
    for split in ([count], [count - 1, 1]):
        found = step_peaks(task, plan_of(task, split, size=SIZE, profiled=profiled))
        assert found.dry == found.metered == found.allocated, split
        if name == "sum behind a view" and len(split) > 1:  # if the view hands on a dense gradient instead
            pairs = zip(found.simulated, found.allocated, strict=True)
            assert all(told >= seen for both in pairs for told, seen in zip(*both, strict=True))
        else:
            assert found.simulated == found.allocated, split


class Triple(nn.Module):
    """Three results of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Parts:
        return tuple(F.gelu(part(x)) for part in self.parts)


class Last(nn.Module):
    """A layer for the last of several values; the others pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Parts) -> Parts:
        return (*values[:-1], self.linear(values[-1]))


def assert_never_too_low(task: Task, splits: Sequence[Sequence[int]]) -> None:
    """Check that no action needs more than simulated, by each of these splits."""
    profiled = profile(task, microbatch_size=SIZE, threads=torch.get_num_threads())
    for split in splits:
        assert too_low(task, plan_of(task, split, size=SIZE, profiled=profiled)) == [], split


def test_gradients_that_are_parts_of_one_may_come_each_alone() -> None:
    """Gradients that are parts of one tensor arrive separately if a stage ends after the layer that values
    pass.
    """
    task = task_of(
        lambda: [nn.Linear(WIDTH, WIDTH), Triple(), Last(), Apply(joined_rows), nn.Linear(3 * WIDTH, 4)],
        inputs=WIDTH,
    )
    assert_never_too_low(task, [[3, 2], [2, 1, 2]])


def joined_rows(parts: Parts) -> Tensor:
    return torch.cat(parts, 1)


def turned(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def test_gradients_may_lie_otherwise_because_of_where_a_stage_ends() -> None:
    """A gradient's layout may depend on the split: it is transposed twice on its way to a linear layer, or
    once if a stage ends between.
    """
    functions = [turned, torch.neg, turned]
    rows = task_of(lambda: [nn.Linear(8, 8), *map(Apply, functions), nn.Linear(8, 8)])
    task = replace(rows, batch=lambda size: (torch.randn(size, 8, 8), torch.randn(size, 8, 8)))
    assert_never_too_low(task, [[5], [2, 3]])
