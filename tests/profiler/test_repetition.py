"""Profiles of repeated blocks, against those of traces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipefit.capture import Task
from pipefit.models import build
from pipefit.profiler import NotRepeated, OnDemand, Repeated, same_costs, stretched, with_few_blocks
from support.small_tasks import task_of

SMALL = {"hidden": 32, "heads": 2, "vocabulary": 64, "sequence": 8}


def gpt(layers: int, **settings: object) -> Task:
    """Build a small GPT."""
    return build("gpt", layers=layers, **SMALL, **settings)


def tied(layers: int) -> Task:
    """Build layers with biases shared between pairs of neighbours, and a buffer shared by all."""

    def chain() -> list[nn.Module]:
        made, common = [nn.BatchNorm1d(8) for _ in range(2 * layers)], nn.Linear(8, 8)
        for first, second in zip(made[::2], made[1::2], strict=True):
            second.bias = first.bias
        return [common, *made, nn.Linear(8, 8)]

    return task_of(chain, outputs=8)


def alternating(layers: int) -> Task:
    """Build narrow and wide layers in turn."""
    return task_of(lambda: [nn.Linear(8, 8, bias=number % 2 == 0) for number in range(layers)], outputs=8)


class Twice(nn.Module):
    """A linear layer that is used twice, with a norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, values: Tensor) -> Tensor:
        """Return the layer's outputs for its own, normed."""
        result: Tensor = self.linear(self.norm(self.linear(values)))
        return result


class Rows(nn.Module):
    """Equal blocks with a common factor, and then blocks of two kinds in turn."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.factor, self.between = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)
        self.equal = nn.ModuleList([Twice() for _ in range(count)])
        self.turns = nn.ModuleList([(nn.GELU, Twice)[number % 2]() for number in range(2 * count)])

    def forward(self, values: Tensor) -> Tensor:
        """Return the outputs of all blocks."""
        for block in self.equal:
            values = block(values) * self.factor
        values = self.between(values)
        for block in self.turns:
            values = block(values)
        return values


class Uneven(Rows):
    """Rows of which one block is called twice."""

    def forward(self, values: Tensor) -> Tensor:
        """Return the outputs of all blocks."""
        return super().forward(self.equal[-3](values))


def rows(count: int, kind: type[Rows] = Rows) -> Task:
    """Build a module with two lists of blocks."""
    return replace(task_of(lambda: [nn.Linear(8, 8)], outputs=8), module=partial(kind, count))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("make", "repeats"),
    [(partial(gpt, dropout=0.0, tied=True), True), (rows, True), (partial(rows, kind=Uneven), False)],
)
def test_other_precisions_follow_from_a_copy_with_few_blocks(
    make: Callable[[int], Task], repeats: bool
) -> None:
    """Where the copy stands for the model in one precision, it does in others; where it does not, it shows."""
    task = make(6)
    few = with_few_blocks(task, "cuda")
    assert few is not None

    def same(precision: Any) -> bool:
        one, other = (replace(each, precision=precision) for each in (few[0], task))
        return same_costs(
            stretched(OnDemand(one, target="cuda")(1), few[1]), OnDemand(other, target="cuda")(1)
        )

    precisions = ("float32", "mixed-bfloat16") if repeats else ("float32",)
    assert [same(precision) for precision in precisions] == [repeats] * len(precisions)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (gpt, (2, ())),
        pytest.param(partial(gpt, tied=True, dropout=0.0), (1, ()), marks=pytest.mark.gallery),
        pytest.param(partial(gpt, dropout=0.0), (1, (2,)), marks=pytest.mark.gallery),
        (tied, (3, ())),
    ],
)
def test_repeated_blocks_cost_what_traces_say(
    make: Callable[[int], Task], wanted: tuple[int, tuple[int, ...]]
) -> None:
    """Repeated blocks match traces in names, blocks, costs and shared tensors, for whole layers and
    tensor-parallel ranks.
    """
    size, ranks = wanted
    written = Repeated([OnDemand(make(layers), target="cuda") for layers in (2, 3, 4)], 4)
    traced = OnDemand(make(6), target="cuda")
    assert same_costs(written(size, ranks), traced(size, ranks))


@pytest.mark.parametrize(
    "make", [alternating, lambda width: task_of(lambda: [nn.Linear(8, width), nn.Linear(width, 4)])]
)
def test_what_is_no_repetition_is_refused(make: Callable[[int], Task]) -> None:
    """Layers that differ from those before, and settings other than a number of layers, are refused."""
    written = Repeated([OnDemand(make(value), target="cuda") for value in (2, 3, 4)], 9)
    with pytest.raises(NotRepeated):
        written(1)
