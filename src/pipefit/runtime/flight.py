"""One microbatch in one stage: values that wait, pieces that ran forward, gradients that the backward has reached.

Nothing else refers to these tensors, so that what a flight drops is freed at once, as `pipefit.cost` predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipefit.actions import Action
from pipefit.capture.chain import ChainLayer
from pipefit.capture.structure import Values
from pipefit.errors import UsageError
from pipefit.layer_costs import Value
from pipefit.runtime.boundary import GraphEnds
from pipefit.runtime.moving import Luggage
from pipefit.runtime.second_forward import Buffers
from pipefit.runtime.weights import Version
from pipefit.texts import counted, layers_text

Loss = Callable[[Values, Values], Tensor]  # of the last layer's values and the targets


@dataclass(slots=True)
class Piece:
    """Layers `first` to `end - 1`, whose forward was one action.

    A piece without a graph keeps its inputs and targets, to run forward again, and as `copies` those buffers that feed
    back. After that, `copies` are all buffers on which the second forward worked; its graph may refer to them.
    """

    first: int
    end: int
    graph: GraphEnds = field(default_factory=GraphEnds)
    inputs: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    has_graph: bool = False
    copies: Buffers = field(default_factory=dict)


@dataclass(slots=True)
class Flight:
    """One microbatch in one stage.

    `microbatch` is its number in its own step, and `batch_number` that step's. Where replicas divide microbatches into
    slices, `slice_number` counts these over the step; random draws depend on it, on the step and on `seed`. `samples`
    are those of the slice, or of the whole microbatch. `layers` and `loss` are the stage's for microbatches of this
    size, `boundaries` the values before every layer of the model and after the last, and `weight` is the factor on the
    microbatch's loss. `version` are the weights that it goes through, where stages are updated with microbatches in
    flight. `values` wait for the next piece. `gradients` has one gradient, or None, for each value at the boundary that
    the backward has reached. `luggage` are the saved tensors that the program moves away.
    """

    microbatch: int
    seed: int
    batch_number: int
    slice_number: int
    samples: int
    layers: Sequence[ChainLayer]
    loss: Loss
    boundaries: Sequence[Sequence[Value]]
    weight: float
    luggage: Luggage
    version: Version | None = None
    values: list[Tensor] = field(default_factory=list)
    targets: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    pieces: dict[int, Piece] = field(default_factory=dict)  # by their first layer

    def rows(self, load: Action, microbatches: Sequence[Sequence[Tensor]]) -> Sequence[Tensor]:
        """What a LOAD takes of the tensors of its microbatch: all, or the rows of a slice.

        Raises:
            UsageError: it takes more or fewer than the slice has.
        """
        tensors = microbatches[self.microbatch]
        if load.part is None:
            return tensors
        first, end = load.part
        if end - first != self.samples:
            raise UsageError(
                f"{load} takes {counted(end - first, 'row')}, and the slice of the microbatch has {self.samples}"
            )
        return [tensor[first:end] for tensor in tensors]

    def abandon(self) -> None:
        """Drop everything, graphs included, after a step has failed."""
        for piece in self.pieces.values():
            piece.graph.root = piece.graph.incoming = None
            piece.graph.outgoing = ()
        self.pieces.clear()
        self.values.clear()
        self.targets.clear()
        self.gradients.clear()


def take(box: list[Tensor]) -> tuple[Tensor, ...]:
    """The tensors in `box`, which is emptied so that it no longer keeps them alive."""
    values = tuple(box)
    box.clear()
    return values


def on_device(tensors: Sequence[Tensor], values: Sequence[Value], device: torch.device) -> list[Tensor]:
    """Copies of host tensors on the device, in the dtypes of the values that were profiled."""
    return [
        tensor.to(device, getattr(torch, value.dtype), non_blocking=True, copy=True)
        for tensor, value in zip(tensors, values, strict=True)
    ]


def gradients_to_send(gradients: Sequence[Tensor | None], values: Sequence[Value], layer: str) -> list[Tensor | None]:
    """A contiguous gradient for each of the values before `layer` that has one by the plan; None where there is none.

    Raises:
        UsageError: a value has a gradient that the plan does not know of.
    """
    for gradient, value in zip(gradients, values, strict=True):
        if gradient is not None and not value.has_gradient:
            raise UsageError(
                f"layer {layer} has a gradient for a value of shape {value.shape} on which the loss did not depend "
                "when the model was profiled, so that no stage expects it: the layers that use a value must not depend "
                "on numbers in tensors; multiply by zero instead of leaving a value out"
            )
    return [
        None if gradient is None else gradient.contiguous()
        for gradient, value in zip(gradients, values, strict=True)
        if value.has_gradient
    ]


@contextmanager
def naming_changes(flight: Flight, piece: Piece) -> Iterator[None]:
    """Inside, a piece goes backward.

    Raises:
        UsageError: what it saved has been changed since; autograd's own words name no layer.
    """
    try:
        yield
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise UsageError(
            f"microbatch {flight.microbatch} cannot go backward through {layers_text(piece.first, piece.end)}: what "
            "they saved has been changed in place since, as by a later microbatch's forward, where it is a buffer. Let "
            "the plan recompute these layers, or let them compute with a clone of what they change"
        ) from error
