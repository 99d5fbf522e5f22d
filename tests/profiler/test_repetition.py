"""Profiles of repeated blocks, against those of traces."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from torch import nn

from pipefit.capture import Task
from pipefit.models import build
from pipefit.profiler.on_demand import NotRepeated, OnDemand, Repeated, same_costs
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
