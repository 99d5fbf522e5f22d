"""Forward and backward passes of microbatches through the layers of a stage, on one device.

Memory use is part of the interface, because `memory` predicts it to the byte. Every reference to a tensor is
dropped as early as possible, in an order that depends on the calls alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from itertools import chain

import torch
from torch import Tensor, nn

from pipefit.capture import ChainLayer, Values
from pipefit.errors import UsageError
from pipefit.measure import saving_nothing
from pipefit.memory import StageStorages
from pipefit.runtime.comm.agreement import Agreement
from pipefit.runtime.engine.in_flight import (
    Flight,
    FlightPiece,
    GraphEnds,
    Waiting,
    apart,
    backward,
    born_apart,
    cut,
    enter,
    fed_back_copies,
    gradients_to_send,
    leave,
    naming_changes,
    take,
    working_copies,
)
from pipefit.runtime.optim.half_precision import Copied, WeightCopies, using
from pipefit.runtime.optim.weight_versions import Weights
from pipefit.texts import first_to_last, layers_text

# ---- Random draws
# Draws are the same under every plan: they depend on seed, step, microbatch and layer alone. Before a layer
# runs, the device's default generator is seeded from these four numbers. So dropout is the same on one device
# and on eight, under any schedule, and in a recomputation. An optimizer that draws is seeded in the same way,
# so that replicas of a stage draw equal numbers and stay equal.

_MASK = (1 << 64) - 1


def draw_seed(seed: int, step: int, microbatch: int, layer: int) -> int:
    """Mix four numbers into a 63-bit seed (the splitmix64 finaliser, Steele et al. 2014, applied in turn)."""
    return _mixed(_mixed_before(seed, step, microbatch), layer) >> 1


def _mixed(state: int, number: int) -> int:
    state = (state + number + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


@lru_cache(maxsize=64)
def _mixed_before(seed: int, step: int, microbatch: int) -> int:
    """Mix the numbers that all layers of a microbatch share."""
    return _mixed(_mixed(_mixed(0, seed), step), microbatch)


def seed_layer(device: torch.device, seed: int, step: int, microbatch: int, layer: int) -> None:
    """Seed the default generator of `device` for this layer of this microbatch of this step."""
    layer_seeds(device, seed, step, microbatch)(layer)


def layer_seeds(device: torch.device, seed: int, step: int, microbatch: int) -> Callable[[int], None]:
    """Return the function that seeds the default generator of `device` for a layer of this microbatch."""
    is_cuda, state = device.type == "cuda", _mixed_before(seed, step, microbatch)
    seeds = torch.cuda.default_generators[device.index or 0] if is_cuda else torch.default_generator

    def begin(layer: int) -> None:
        seeds.manual_seed(_mixed(state, layer) >> 1)

    return begin


def seed_update(device: torch.device, seed: int, step: int, microbatch: int, first: int) -> None:
    """Seed the default generator of `device` for the update of a run of layers that begins at layer
    `first`.
    """
    seed_layer(device, seed, step, microbatch, -1 - first)  # negative, unlike the numbers of layers


# ---- Passes


class Passes:
    """The passes of microbatches through the layers of one stage.

    Args:
        layers: the stage's layers, already on `device`.
        storages: the plan's description of the stage: its layers, their values, and whether the loss follows.
        losses: on the last stage, the tensor for the losses of all microbatches.
        copies: copies of weights, with which autocast computes.
        weights: versions of the layers' weights; None if microbatches need none.
        watching: returns a context in which a layer's forward runs.
        agreement: holds the loss scale, if there is one.
    """

    def __init__(
        self,
        layers: Sequence[ChainLayer],
        storages: StageStorages,
        *,
        losses: Tensor | None,
        copies: WeightCopies,
        weights: Weights | None,
        watching: Callable[[ChainLayer], AbstractContextManager[object]],
        agreement: Agreement | None,
        device: torch.device,
    ) -> None:
        self.layers, self.storages = layers, storages
        self.start, self.stop, self.last = storages.start, storages.stop, storages.last
        self.losses, self.copies, self.weights, self.agreement = losses, copies, weights, agreement
        self.device, self._watching = device, watching
        self._trained = [[p for p in layer.module.parameters() if p.requires_grad] for layer in layers]
        self._shared = _shared(layers, storages.start)
        self._unused = [cost.unused_outputs for cost in storages.costs]
        self._anchor = torch.empty(0, device=device, requires_grad=True)

    # ---------------------------------------------------------------- forward

    def forward(self, flight: Flight, first: int, end: int) -> Values:
        """Run layers `first` to `end - 1` with a graph.

        Return the stage's outputs, detached, if they are its last layers. Otherwise return an empty tuple;
        the values wait in `flight`.
        """
        piece = flight.pieces[first] = FlightPiece(first, end)
        with self._weights_of(flight):
            values = self._with_graph(flight, piece, flight.values, flight.targets)
        return self._leaving(flight, end, values)

    def checkpoint(self, flight: Flight, first: int, end: int) -> Values:
        """Run layers `first` to `end - 1` without saving tensors.

        `flight` keeps the state for their recomputation. That state is the inputs, and copies of the buffers
        that the layers both read and change.

        Raises:
            UsageError: a layer changed the inputs in place, although the recomputation needs them.
        """
        piece = flight.pieces[first] = FlightPiece(first, end, inputs=list(take(flight.values)))
        piece.targets = list(take(flight.targets)) if self._has_loss(end) else []
        places = slice(first - self.start, end - self.start)
        piece.copies = fed_back_copies(flight.layers[places], self.storages.costs[places])
        versions = [value._version for value in piece.inputs]
        copies = self.storages.costs[first - self.start].mutates_inputs
        box = [value.clone() if copies else value for value in piece.inputs]
        with self._weights_of(flight):
            values = self._run_unsaved(flight, piece, box)
        if versions != [value._version for value in piece.inputs]:
            names = first_to_last(
                [layer.name for layer in self.layers[first - self.start : end - self.start]]
            )
            raise UsageError(
                f"{names} changes its inputs in place, so its forward cannot be recomputed: keep its "
                "activations, or use layers with inplace=False"
            )
        return self._leaving(flight, end, values)

    def recompute(self, flight: Flight, first: int, end: int) -> None:
        """Run the forward of a piece again, with a graph and the same random draws; buffers stay unchanged.

        Raises:
            UsageError: the piece has a graph already, or has not run forward.
        """
        piece = flight.pieces.get(first)
        if piece is None or piece.end != end or piece.has_graph:
            raise UsageError(
                f"{layers_text(first, end)} of microbatch {flight.microbatch} cannot be recomputed: the "
                "program must first run exactly one forward of exactly these layers"
            )
        with (
            self._weights_of(flight),
            working_copies(flight.layers[first - self.start : end - self.start], piece.copies),
        ):
            self._with_graph(flight, piece, piece.inputs, piece.targets)

    def evaluate(self, flight: Flight) -> Values:
        """Run forward without a graph.

        Return the outputs or, on the last stage, an empty tuple with the loss in `losses`.
        """
        with torch.no_grad():
            values = take(flight.values)
            for number, layer in enumerate(flight.layers, start=self.start):
                with self._watching(layer), using(self._copied(flight, number), layer.autocast, values):
                    values = layer(values)
            if self.losses is None:
                return values
            self.losses[flight.microbatch].copy_(flight.loss(values, take(flight.targets)))
            return ()

    def take_weights(self, flight: Flight, first: int) -> None:
        """Assign the current weight version to a microbatch at its first forward in the stage."""
        if self.weights is not None and first == self.start:
            flight.version = self.weights.take()
            flight.luggage.weights = partial(self.weights.storages, flight.version)
            flight.luggage.away = flight.version.away

    def _weights_of(self, flight: Flight, *, backward: bool = False) -> AbstractContextManager[None]:
        """Return a context in which the layers have the microbatch's weight version."""
        if self.weights is None or flight.version is None:
            return nullcontext()
        put = self.weights.going_backward if backward else self.weights.put
        return put(flight.version, flight.layers)

    def _has_loss(self, end: int) -> bool:
        return self.last and end == self.stop

    def _with_graph(
        self, flight: Flight, piece: FlightPiece, box: list[Tensor], targets: list[Tensor]
    ) -> Values:
        """Run a piece on the values in `box`, between an `enter` and a `leave`; empty `box` and `targets`."""
        box[:] = self._enter(piece.graph, flight, piece.first, take(box))
        values = self._run(flight, piece, box, targets)
        leave(piece.graph, values)
        piece.has_graph = True
        return () if self._has_loss(piece.end) else values

    def _enter(self, graph: GraphEnds, flight: Flight, number: int, values: Values) -> Values:
        """Return `values` as the start of a graph before layer `number`.

        They are unchanged if none requires a gradient.
        """
        differentiable = tuple(value.requires_grad for value in flight.boundaries[number])
        return enter(graph, values, differentiable, self._anchor) if any(differentiable) else values

    def _run(self, flight: Flight, piece: FlightPiece, box: list[Tensor], targets: list[Tensor]) -> Values:
        """Run the layers of a piece in order, and after the model's last one the loss."""
        values = take(box)
        for number in range(piece.first, piece.end):
            with flight.luggage.watching(number):
                values = self._layer(flight, number, values)
                if unused := self._unused[number - self.start]:
                    values = cut(values, unused, self._anchor, self.layers[number - self.start].name)
        return self._loss(flight, values, targets) if self._has_loss(piece.end) else values

    def _run_unsaved(self, flight: Flight, piece: FlightPiece, box: list[Tensor]) -> Values:
        """Run the layers of a piece, and the loss, and drop the graph of each layer after its forward."""
        values = take(box)
        with saving_nothing():
            for number in range(piece.first, piece.end):
                values = self._layer(flight, number, self._enter(GraphEnds(), flight, number, values))
                values = _detached(values)
            if self._has_loss(piece.end):
                values = self._enter(GraphEnds(), flight, self.stop, values)
                values = _detached(self._loss(flight, values, list(piece.targets)))
        return values

    def _layer(self, flight: Flight, number: int, values: Values) -> Values:
        self._seed(flight, number)
        layer, values = flight.layers[number - self.start], self._given(number, values)
        with self._watching(layer), using(self._copied(flight, number), layer.autocast, values):
            return layer(values)

    def _copied(self, flight: Flight, number: int) -> Copied:
        """Return the copied weights of a layer, in the microbatch's version."""
        if self.weights is None or flight.version is None:
            return self.copies.of(number)
        return self.weights.copied(flight.version, self.copies.weights(number))

    def _given(self, number: int, values: Values) -> Values:
        """Return `values` as inputs of a layer or the loss, apart from graphs if it changes them in place."""
        return apart(values) if self.storages.costs[number - self.start].mutates_inputs else values

    def _loss(self, flight: Flight, values: Values, targets: list[Tensor]) -> Values:
        """Compute the loss, and keep it for the step's mean."""
        assert self.losses is not None
        self._seed(flight, self.stop)
        values = (flight.loss(self._given(self.stop, values), take(targets)),)
        self.losses[flight.microbatch].copy_(values[0].detach())
        return values

    def _seed(self, flight: Flight, number: int) -> None:
        seed_layer(self.device, flight.seed, flight.batch_number, flight.slice_number, number)

    def _leaving(self, flight: Flight, end: int, values: Values) -> Values:
        """Pass values on: to the next piece through the flight, or out of the stage."""
        if self._has_loss(end):
            return ()
        if end == self.stop:
            return _detached(values)
        flight.values = [value.detach() for value in values]
        return ()

    # ---------------------------------------------------------------- backward

    def backward(self, flight: Flight, first: int, end: int) -> list[Tensor | None]:
        """Run all pieces from `first` to `end` backward.

        Return the gradients to send, if they are the stage's first layers. None stands for an absent
        gradient.

        Raises:
            UsageError: these layers have no graph, or the backward of later layers must come first.
        """
        pieces = [piece for piece in flight.pieces.values() if piece.first >= first]
        edges = [(piece.first, piece.end) for piece in pieces if piece.has_graph]
        if (
            len(edges) < len(pieces)
            or flight.values
            or not edges
            or (edges[0][0], edges[-1][1]) != (first, end)
        ):
            raise UsageError(
                f"microbatch {flight.microbatch} cannot go backward through {layers_text(first, end)}: the "
                "forward of exactly these layers is missing, later layers come first, or the backward "
                "already ran"
            )
        for piece in reversed(pieces):
            self._backward_of(flight, piece)
            del flight.pieces[piece.first]
        del piece
        pieces.clear()
        if self.weights is not None and flight.version is not None:
            self.weights.give_back(flight.version, range(first, end))
        if first > self.start:
            return []
        flight.version = flight.luggage.weights = None
        gradients, flight.gradients = flight.gradients, []
        return gradients_to_send(gradients, flight.boundaries[self.start], self.layers[0].name)

    def _backward_of(self, flight: Flight, piece: FlightPiece) -> None:
        """Run one piece backward: in `flight`, the gradients of its inputs replace those of its outputs."""
        graph, flight_gradients = piece.graph, flight.gradients
        trained = self._trained[piece.first - self.start : piece.end - self.start]
        if self._has_loss(piece.end):
            flight_gradients = [self._loss_gradient(flight)]
        flight.gradients = []
        graph.incoming = flight_gradients
        del flight_gradients
        with (
            naming_changes(flight.microbatch, piece.first, piece.end),
            self._weights_of(flight, backward=True),
            self._sharing(flight, piece) as waiting,
            born_apart(chain(*trained)),
        ):
            backward(graph, waiting)
        flight.gradients = list(graph.outgoing or (None,) * len(flight.boundaries[piece.first]))
        graph.outgoing = ()

    @contextmanager
    def _sharing(self, flight: Flight, piece: FlightPiece) -> Iterator[list[Waiting]]:
        """Yield the gradients of shared parameters that have waited for a piece, which then goes backward.

        Afterwards, gradients of parameters with earlier users wait in `flight`, so that `.grad` gets their
        sum.
        """
        waiting, kept = list[Waiting](), list[tuple[int, nn.Parameter, Tensor | None]]()
        for number, places in enumerate(self._shared):
            here = [layer for layer in places if piece.first <= layer < piece.end]
            if not here:
                continue
            module = flight.layers[here[0] - self.start].module
            parameter = module.get_parameter(places[here[0]])
            if number in flight.waiting:
                waiting.append(Waiting(parameter, flight.waiting.pop(number)))
            if min(places) < piece.first:
                kept.append((number, parameter, parameter.grad))
                parameter.grad = None
        try:
            yield waiting
            flight.waiting |= {number: one.grad for number, one, _ in kept if one.grad is not None}
        finally:
            for _, parameter, gradient in kept:
                parameter.grad = gradient

    def _loss_gradient(self, flight: Flight) -> Tensor | None:
        """Return the gradient of the loss: the microbatch's weight times the loss scale.

        Return None if it requires none.
        """
        loss = self.storages.costs[-1].outputs[0]
        if not loss.requires_grad:
            return None
        scale = self.agreement.scale if self.agreement is not None else None
        part = flight.weight * (scale.value if scale else 1.0)
        return torch.full((), part, dtype=getattr(torch, loss.dtype), device=self.device)


def _detached(values: Values) -> Values:
    """Return the values without their graph."""
    return tuple(value.detach() for value in values)


def _shared(layers: Sequence[ChainLayer], start: int) -> list[dict[int, str]]:
    """Return the trained parameters that several layers use, each as its names by layer, from `start` on."""
    result = dict[int, dict[int, str]]()
    for number, layer in enumerate(layers, start=start):
        for name, parameter in layer.module.named_parameters():
            if parameter.requires_grad:
                result.setdefault(id(parameter), {})[number] = name
    return [places for places in result.values() if len(places) > 1]
