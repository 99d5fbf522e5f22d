"""The optimizer state of parameters shared by several layers, with any layers measured twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.errors import UsageError
from pipefit.profiler import profile


class Steps(nn.Module):
    """Two layers of different width that run alternately on a part of the output."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.enter, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, wide), nn.Linear(wide, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        found = [x]
        for _ in range(3):
            x = self.second(self.first(x))
            found.append(x)
        return torch.stack(found, 1)


class Cells(nn.Module):
    """A cell whose parameters have other names than those of the layers between."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.cell, self.gate = nn.Linear(8, 8), nn.GRUCell(8, 4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        state, found = x.new_zeros(len(x), 4), [x]
        for _ in range(3):
            state = self.cell(x, state)
            x = x * torch.sigmoid(self.gate(state))
            found.append(x)
        return torch.stack(found, 1)


MODELS = {"narrow": lambda: Steps(4), "wide": lambda: Steps(16), "cells": Cells}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_state_is_that_of_plain_training(name: str) -> None:
    """AdamW's state for each shared parameter has its size in a plain loop."""
    module = MODELS[name]()
    task = Task(
        MODELS[name],
        batch=lambda size: (torch.randn(size, 8), None),
        loss=lambda found, _: found.sin().mean(),
    )
    shared = profile(task, microbatch_size=2).measurements[0].shared
    updates = torch.optim.AdamW(module.parameters())
    module(torch.randn(2, 8)).sin().mean().backward()
    updates.step()
    kept = {
        path: sum(tensor.nbytes for tensor in updates.state[parameter].values())
        for path, parameter in module.named_parameters()
        if not path.startswith("enter")
    }
    assert {one.name.replace("@1", ""): one.state_bytes for one in shared} == kept


def test_a_learning_rate_that_is_a_tensor_is_not_state_of_every_parameter() -> None:
    """A tensor that the optimizer has once belongs to no shared parameter."""

    def states(rate: Callable[[], float | Tensor]) -> list[int]:
        task = Task(
            MODELS["narrow"],
            batch=lambda size: (torch.randn(size, 8), None),
            loss=lambda found, _: found.sin().mean(),
            optimizer=lambda groups: torch.optim.AdamW(groups, lr=rate()),
        )
        return [one.state_bytes for one in profile(task, microbatch_size=2).measurements[0].shared]

    rate = torch.tensor(1e-3)
    assert states(lambda: torch.tensor(1e-3)) == states(lambda: 1e-3)
    with pytest.raises(UsageError, match="make its tensors, such as a learning rate, inside the function"):
        states(lambda: rate)
