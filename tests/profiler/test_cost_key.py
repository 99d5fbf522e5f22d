"""Keys that decide whether two layers share one measurement."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipefit.capture import Task
from pipefit.capture.model import capture
from pipefit.capture.sample import sample
from pipefit.profiler.fake import cost_key


class Own(nn.Module):
    """A module with a user-defined setting."""

    def __init__(self, setting: object, part: nn.Module | None = None) -> None:
        super().__init__()
        self.setting, self.part = setting, part


def hooked() -> nn.Module:
    """Return a layer whose hook may do anything."""
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, inputs, output: output)
    return layer


ALIKE: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(4, 8),
    lambda: nn.Dropout(0.1),
    lambda: nn.BatchNorm2d(4),
    lambda: nn.Conv2d(3, 4, 3, padding=1),
    lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)),
    lambda: nn.TransformerEncoderLayer(8, 2, 16),
    lambda: Own((1, [2.0, "three"], None, torch.float16)),
    lambda: Own(1, nn.Linear(2, 2)),
]
UNLIKE: list[tuple[nn.Module, nn.Module]] = [
    (nn.Linear(4, 8), nn.Linear(8, 4)),
    (nn.Linear(4, 8), nn.Linear(4, 8, bias=False)),
    (nn.Linear(4, 8), nn.Linear(4, 8).requires_grad_(False)),
    (nn.Linear(4, 8), nn.Linear(4, 8).half()),
    (nn.Linear(4, 8), nn.Linear(4, 8).eval()),
    (nn.Dropout(0.1), nn.Dropout(0.2)),
    (nn.Dropout(0.1), nn.AlphaDropout(0.1)),
    (nn.ReLU(), nn.ReLU(inplace=True)),
    (nn.ReLU(), nn.Tanh()),
    (nn.BatchNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False)),
    (nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3, stride=2)),
    (nn.Sequential(nn.ReLU()), nn.Sequential(nn.Tanh())),
    (nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential(nn.Tanh(), nn.ReLU())),
    (Own([1]), Own((1,))),
    (Own(1, nn.ReLU()), Own(1)),
]


@pytest.mark.parametrize("build", ALIKE)
def test_layers_built_alike_are_alike(build: Callable[[], nn.Module]) -> None:
    """Layers of one class, settings and shapes have one key, whatever their weights; so does a copy."""
    layer = build()
    assert cost_key(layer) == cost_key(build()) == cost_key(copy.deepcopy(layer))
    assert hash(cost_key(layer)) == hash(cost_key(build()))


@pytest.mark.parametrize(("one", "other"), UNLIKE, ids=str)
def test_layers_that_may_cost_differently_are_not(one: nn.Module, other: nn.Module) -> None:
    """Another shape, dtype, class, setting, mode or part, or a frozen weight, makes another key."""
    assert cost_key(one) != cost_key(other)


@pytest.mark.parametrize(
    "build", [hooked, lambda: Own({"a": 1}), lambda: Own(lambda: 1), lambda: Own(torch.ones(2))]
)
def test_what_cannot_be_compared_is_like_itself_alone(build: Callable[[], nn.Module]) -> None:
    """A module with hooks, or with a setting other than a plain value, shares its key only with itself."""
    layer, other = build(), build()
    assert cost_key(layer) == cost_key(layer)
    assert cost_key(layer) != cost_key(other)


def test_one_object_as_a_setting_of_both_is_the_same_setting() -> None:
    """Layers that share an activation function, as torch's encoder layers do, have one key."""
    assert cost_key(Own(torch.relu)) == cost_key(Own(torch.relu))


class Deep(nn.Module):
    """A model of equal blocks, which a trace cuts into separate layers."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.GELU()]) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear, gelu in self.blocks:
            x = x + gelu(linear(x))
        return x


def deep(blocks: int) -> Task:
    """Trace a model of `blocks` blocks."""
    return Task(
        lambda: Deep(blocks),
        batch=lambda size: (torch.randn(size, 4), torch.randn(size, 4)),
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
    )


def test_equal_blocks_of_a_traced_model_are_alike() -> None:
    """Layers of any number of equal blocks have the keys of one block."""
    few, many = (
        [cost_key(layer.module) for layer in capture(task, *sample(task, 2)).layers]
        for task in map(deep, (2, 5))
    )
    assert len(few) < len(many)
    assert len(set(few)) == len(set(many)) == 3
