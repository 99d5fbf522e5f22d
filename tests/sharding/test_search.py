"""The search for forms, against the costs of all combinations of strategies."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from pipefit.capture import Task, capture
from pipefit.tensor_parallel import Prices
from pipefit.tensor_parallel.forms import DimSplit, Form, R
from pipefit.tensor_parallel.operations import Strategy
from pipefit.tensor_parallel.search import FormCosts, _options, _trained, choose, keeps_operands, keeps_result
from pipefit.tensor_parallel.tracing import TracedStage, is_stored, trace

WIDTH = 8


class Gated(nn.Module):
    """Two projections of one value; the second has a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.one(x) * self.two(x))


class Tied(nn.Module):
    """One weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weight).relu(), self.weight.T).tanh()


class Heads(nn.Module):
    """A fused projection, cut in two."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.both(x).chunk(2, -1)
        return self.out(a.sigmoid() * b)


def staged(module: nn.Module, tokens: int) -> TracedStage:
    """Trace a module as a stage."""
    values = (torch.randn(2, tokens, WIDTH),)
    chain = capture(
        Task(nn.Sequential(module), batch=lambda size: (values[0], values[0]), loss=F.mse_loss), *values
    )
    return trace(chain.layers, values, chain=None, targets=(), is_first=False)


def price(stage: TracedStage, ways: dict[fx.Node, Strategy], costs: FormCosts) -> float:
    """Return the cost of one combination of strategies.

    Every value is converted into a form once, from its replicated form if available, and kept once whole and
    once in each split.
    """
    kept = set()

    def keep(node: fx.Node, form: Form) -> float:
        form = form if isinstance(form, DimSplit) else R
        is_new = (node, form) not in kept and not is_stored(node)
        kept.add((node, form))
        return costs.kept(node, form) if is_new else 0.0

    had, total = {node: [R] for node in stage.inputs}, 0.0
    needs = [(node, way.operands.items()) for node, way in ways.items()]
    output = stage.graph.output_node()
    for node, operands in [*needs, (output, [(source, R) for source in output.all_input_nodes])]:
        for source, form in operands:
            if source not in had:
                had[source] = [form if isinstance(form, DimSplit) else R]
                total += costs.stored(source, had[source][0])
            if form not in had[source]:
                total += costs.conversion(source, R if R in had[source] else had[source][0], form)
                had[source].append(form)
            if node in costs.trained and keeps_operands(node):
                total += keep(source, form)
        if node in ways:
            if node in costs.trained and keeps_result(node):
                total += keep(node, ways[node].result)
            had[node] = [ways[node].result]
            total += costs.done(node, ways[node])
    return total


@pytest.mark.sample(6)
@pytest.mark.parametrize("stored", [0.01, 0.1, 0.3, 1.0, 10.0])
@pytest.mark.parametrize("tokens", [2, 64])
@pytest.mark.parametrize("module", [Gated, Tied, Heads])
def test_no_choice_is_cheaper(module: type[nn.Module], tokens: int, stored: float) -> None:
    """The search finds the cheapest of all combinations of strategies, and its cost."""
    stage, prices = staged(module(), tokens), Prices(stored=stored)
    trained = _trained(stage)
    costs = FormCosts(ranks=2, prices=prices, trained=trained)
    options = _options(stage, 2, trained, frozenset())
    operations = [node for node in stage.graph.nodes if node in options]
    every = itertools.product(*(options[node] for node in operations))
    least = min(price(stage, dict(zip(operations, ways, strict=True)), costs) for ways in every)
    found = choose(stage, 2, prices)
    assert math.isclose(found.cost, least, rel_tol=1e-12)
    assert math.isclose(price(stage, found.ways, costs), least, rel_tol=1e-12)


def test_what_is_dear_to_store_is_divided_and_what_is_dear_to_send_is_whole() -> None:
    """A higher price of a stored byte turns the search from no communication to the least memory."""
    forms = []
    for stored in (0.0, 100.0):
        found = choose(staged(Gated(), 64), 2, Prices(stored=stored, flops=math.inf))
        forms.append([isinstance(form, DimSplit) for node, form in found.home.items() if is_stored(node)])
    assert forms == [[False] * 3, [True] * 3]
