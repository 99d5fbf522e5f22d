"""Keys that decide whether two layers share one measurement."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from pipefit.capture import Task, module_key
from pipefit.capture.model import capture
from pipefit.capture.sample import sample


class Own(nn.Module):
    """A module with user-defined settings."""

    def __init__(self, setting: object, part: nn.Module | None = None, *, private: object = None) -> None:
        super().__init__()
        self.setting, self.part, self._private = setting, part, private


def pair(*, shares: str = "") -> nn.Module:
    """Return two layers that may share a parameter, a buffer or everything."""
    parts = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    if shares == "weight":
        parts[1].weight = parts[0].weight
    elif shares == "buffer":
        parts[1].running_mean = parts[0].running_mean
    return nn.Sequential(parts[0], parts[0] if shares == "everything" else parts[1])


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
    lambda: Own(1, nn.Linear(2, 2), private="two"),
    lambda: nn.LSTM(4, 4),
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
    (Own(1), Own(1.0)),
    (Own((1,)), Own((True,))),
    (Own(1, private=2), Own(1, private=3)),
    *((pair(), pair(shares=shares)) for shares in ("weight", "buffer", "everything")),
]


@pytest.mark.parametrize("build", ALIKE)
def test_layers_built_alike_are_alike(build: Callable[[], nn.Module]) -> None:
    """Layers of one class, settings and shapes have one key, whatever their weights; so does a copy."""
    layer = build()
    assert module_key(layer) == module_key(build()) == module_key(copy.deepcopy(layer))
    assert hash(module_key(layer)) == hash(module_key(build()))


@pytest.mark.parametrize(("one", "other"), UNLIKE, ids=str)
def test_layers_that_may_cost_differently_are_not(one: nn.Module, other: nn.Module) -> None:
    """Another shape, dtype, class, setting, mode or part, or a frozen weight, makes another key."""
    assert module_key(one) != module_key(other)


@pytest.mark.parametrize(
    "build", [hooked, lambda: Own({"a": 1}), lambda: Own(lambda: 1), lambda: Own(torch.ones(2))]
)
def test_what_cannot_be_compared_is_like_itself_alone(build: Callable[[], nn.Module]) -> None:
    """A module with hooks, or with a setting other than a plain value, shares its key only with itself."""
    layer, other = build(), build()
    assert module_key(layer) == module_key(layer)
    assert module_key(layer) != module_key(other)


def test_one_object_as_a_setting_of_both_is_the_same_setting() -> None:
    """Layers that share an activation function, as torch's encoder layers do, have one key."""
    assert module_key(Own(torch.relu)) == module_key(Own(torch.relu))


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
        [module_key(layer.module) for layer in capture(task, *sample(task, 2)).layers]
        for task in map(deep, (2, 5))
    )
    assert len(few) < len(many)
    assert len(set(few)) == len(set(many)) == 3
