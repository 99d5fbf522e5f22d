"""One microbatch on its way through a stage: the values that wait, the pieces that went forward, the gradients so far.

Memory is part of the contract: nothing else refers to these tensors, so what a flight drops is freed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pipefit.capture.chain import ChainLayer
from pipefit.profiles import Value
from pipefit.runtime.boundary import Cell


@dataclass(slots=True)
class Piece:
    """Layers `first` to `end - 1`, which went forward in one action.

    A piece without a graph keeps what it needs to go forward again. `copies` are those of its buffers that the second
    forward worked on; its graph may refer to them.
    """

    first: int
    end: int
    cell: Cell = field(default_factory=Cell)
    inputs: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    has_graph: bool = False
    copies: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class Flight:
    """One microbatch in one stage.

    `layers` are the stage's for microbatches like this one, and `boundaries` the values before every layer of the model
    and behind the last. `values` wait for the next piece; `gradients`, one for each value or None, belong to the
    boundary that the backward has reached.
    """

    microbatch: int
    layers: Sequence[ChainLayer]
    boundaries: Sequence[Sequence[Value]]
    values: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    pieces: dict[int, Piece] = field(default_factory=dict)  # by their first layer

    def abandon(self) -> None:
        """Let go of everything, graphs included: the step did not happen."""
        for piece in self.pieces.values():
            piece.cell.root = piece.cell.incoming = None
            piece.cell.outgoing = ()
        self.pieces.clear()
        self.values.clear()
        self.targets.clear()
        self.gradients.clear()


def take(box: list[Tensor]) -> tuple[Tensor, ...]:
    """The tensors in `box`, which no longer holds them."""
    values = tuple(box)
    box.clear()
    return values
