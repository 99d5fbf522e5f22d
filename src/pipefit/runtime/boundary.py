"""The two ends of a piece of the autograd graph: how gradients come in and go out without holding activations.

Ordinarily a pipeline stage keeps its output alive until the backward, because the output is where the backward starts,
and the gradient it received until the backward ends, because the caller holds it. Both are dead weight: megabytes for
each microbatch in flight. Here the graph of a stage hangs between an `enter` and a `leave`:

- `leave` turns the outputs into a root of no bytes. The outputs may be freed as soon as they are sent. When the
backward of
  the root runs, it takes the received gradients out of the microbatch's `Cell`, so that the engine alone holds them and
  frees each when it is used up.
- `enter` hands the inputs on as fresh aliases and, in the backward, puts their gradients into the cell. No leaf, so
nothing
  pins the inputs either, and in-place layers may work on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Values = tuple[Tensor, ...]


@dataclass(slots=True)
class Cell:
    """One microbatch's mail at a piece of graph: its root, gradients to go in, gradients that came out."""

    root: Tensor | None = None
    incoming: Sequence[Tensor | None] | None = None
    outgoing: tuple[Tensor | None, ...] = ()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cell: Cell, differentiable: tuple[bool, ...], anchor: Tensor, *values: Tensor) -> Values:
        ctx.cell = cell
        ctx.set_materialize_grads(False)
        aliases = tuple(value.detach() for value in values)
        ctx.mark_non_differentiable(*(a for a, wanted in zip(aliases, differentiable, strict=True) if not wanted))
        return aliases

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.cell.outgoing = gradients
        return (None, None, None, *(None for _ in gradients))


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cell: Cell, *outputs: Tensor) -> Tensor:
        ctx.cell = cell
        return outputs[0].new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        incoming, ctx.cell.incoming = ctx.cell.incoming, None
        return (None, *incoming)


def enter(cell: Cell, values: Values, differentiable: tuple[bool, ...], anchor: Tensor) -> Values:
    """`values` as the start of a graph; gradients of the `differentiable` ones will be put into `cell.outgoing`.

    `anchor` is any tensor that requires a gradient (it gets none): it makes autograd record.
    """
    entered: Values = _Enter.apply(cell, differentiable, anchor, *values)  # type: ignore[no-untyped-call]
    return entered


def leave(cell: Cell, outputs: Values) -> None:
    """End the graph at `outputs`; `cell.root` is where its backward will start, None when nothing needs a gradient."""
    root: Tensor = _Leave.apply(cell, *outputs)  # type: ignore[no-untyped-call]
    cell.root = root if root.requires_grad else None


def backward(cell: Cell) -> None:
    """Run the graph backward from `cell.incoming`, the gradients of its outputs; then `cell.outgoing` holds those of
    its inputs.

    For the engine to free a gradient as soon as it is used up, nothing but the cell may refer to it.
    """
    root, cell.root = cell.root, None
    if root is not None:
        torch.autograd.backward(root, root.detach())
    cell.incoming = None
