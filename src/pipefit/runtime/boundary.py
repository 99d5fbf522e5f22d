"""The two ends of a piece of the autograd graph: gradients enter and leave it without keeping activations alive.

Ordinarily a pipeline stage keeps its outputs until the backward, because the backward starts from them, and it keeps
the gradients that it received until the backward ends, because the caller of the backward holds them. Neither is needed
for the result, and both cost memory for each microbatch in flight. Here the graph of a stage lies between an `enter`
and a `leave`:

- `leave` ends the graph in a root of no bytes, so that the outputs may be freed as soon as they are sent. The backward
  starts at the root. There it takes the received gradients out of the `GraphEnds`, so that only the autograd engine
  holds them, and frees each as soon as it is used up.
- `enter` passes the inputs on as aliases and, in the backward, puts their gradients into the `GraphEnds`. The inputs
  are no leaves of the graph, so that it does not keep them alive, and layers may work on them in place.

Within a piece, `apart` does the same for what a layer works on in place and the one before returned as a view.
Otherwise autograd would rewrite the graph of what it is a view of, and copy its gradient twice in the backward.

The backward of a piece goes through the graphs of all its outputs, also of those on which the loss does not depend:
so each layer's memory is freed in its turn. Autograd's own operations pass on that nothing arrives. A custom function
would be given zeros, or add a gradient of its own; where nothing arrives it is not called, as in plain training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from pipefit.capture.structure import Values


@dataclass(slots=True)
class GraphEnds:
    """The ends of one piece of graph: its root, the gradients that go in there, and those that come out."""

    root: Tensor | None = None
    incoming: Sequence[Tensor | None] | None = None
    outgoing: tuple[Tensor | None, ...] = ()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, graph: GraphEnds, differentiable: tuple[bool, ...], anchor: Tensor, *values: Tensor
    ) -> Values:
        ctx.graph = graph
        ctx.set_materialize_grads(False)
        aliases = tuple(value.detach() for value in values)
        ctx.mark_non_differentiable(*(a for a, wanted in zip(aliases, differentiable, strict=True) if not wanted))
        return aliases

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.graph.outgoing = gradients
        return (None, None, None, *(None for _ in gradients))


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: GraphEnds, *outputs: Tensor) -> Tensor:
        ctx.graph = graph
        return outputs[0].new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        incoming, ctx.graph.incoming = ctx.graph.incoming, None
        return (None, *incoming)


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def enter(graph: GraphEnds, values: Values, differentiable: tuple[bool, ...], anchor: Tensor) -> Values:
    """`values` as the start of a graph; its backward puts gradients of the `differentiable` ones into `graph.outgoing`.

    `anchor` is any tensor that requires a gradient. It gets none, but makes autograd record the graph.
    """
    entered: Values = _Enter.apply(graph, differentiable, anchor, *values)  # type: ignore[no-untyped-call]
    return entered


def apart(values: Values) -> Values:
    """`values`, with aliases in place of those that are views in a graph, for a layer that works on them in place.

    Numbers and memory are shared, and gradients pass; nothing else may read what shares the memory of such a value.
    """
    return tuple(_Apart.apply(v) if v._is_view() and v.requires_grad else v for v in values)  # type: ignore[no-untyped-call]


def leave(graph: GraphEnds, outputs: Values) -> None:
    """End the graph at `outputs`; its backward starts at `graph.root`, which is None if nothing requires a gradient."""
    root: Tensor = _Leave.apply(graph, *outputs)  # type: ignore[no-untyped-call]
    graph.root = root if root.requires_grad else None


def backward(graph: GraphEnds) -> None:
    """Run the graph backward: `graph.incoming`, the gradients of its outputs, become `graph.outgoing`, of its inputs.

    Nothing but `graph` may refer to the incoming gradients: then the engine frees each as soon as it is used up.
    """
    root, graph.root = graph.root, None
    if root is not None:
        _pass_over(root, graph.incoming or ())
        torch.autograd.backward(root, root.detach())
    graph.incoming = None


def _pass_over(root: Tensor, incoming: Sequence[Tensor | None]) -> None:
    """Let custom functions that only outputs without a gradient depend on pass on that nothing arrives."""
    assert root.grad_fn is not None
    ends = [node for node, _ in root.grad_fn.next_functions]  # of all outputs, in order
    aside = [node for node, gradient in zip(ends, incoming, strict=True) if gradient is None]
    functions = [node for node in _behind(aside) if isinstance(node, BackwardCFunction)]
    if not functions:
        return
    called = set(_behind([node for node, gradient in zip(ends, incoming, strict=True) if gradient is not None]))
    for function in functions:
        if function not in called:
            function.set_materialize_grads(False)
            function.apply = partial(_nothing, len(function.needs_input_grad))  # type: ignore[method-assign]


def _behind(ends: Iterable[Node | None]) -> Iterator[Any]:
    """Every operation that these depend on, and they themselves."""
    met, waiting = set[Node](), [node for node in ends if node is not None]
    while waiting:
        node = waiting.pop()
        if node not in met:
            met.add(node)
            yield node
            waiting += [before for before, _ in node.next_functions if before is not None]


def _nothing(count: int, *gradients: Tensor | None) -> tuple[None, ...]:
    """The gradients of so many arguments of a function to whose results none arrives."""
    return (None,) * count
