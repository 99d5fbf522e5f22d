"""A stage at work: the layers of one device, their optimizer, and the microbatches in flight.

Memory is part of the contract. A stage drops every reference as early as the numbers allow, in an order that depends on
nothing but the calls made, because `pipefit.cost.memory` predicts it to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.capture.chain import ChainLayer
from pipefit.capture.structure import Values
from pipefit.capture.task import ParameterOptions, Task
from pipefit.errors import UsageError
from pipefit.profiles import Value
from pipefit.runtime.agreement import Agreement
from pipefit.runtime.boundary import Cell, backward, enter, leave
from pipefit.runtime.draws import seed_layer


class StageRunner:
    """Layers `start` to `start + len(layers) - 1` of a model, on `device`.

    Args:
        task: its optimizer is used.
        layers: this stage's, already on `device`.
        loss: of the last layer's values and the targets; used on the last stage alone.
        shared: this stage's copies of parameters that other layers use too, by their number in the profile.
        start: number of the first.
        last: whether the loss follows.
        inputs: what arrives from the stage before (or the data); gradients go back for those that require them.
        outputs: what leaves; gradients come for those that require them.
        targets: what the loss takes besides the outputs; none but on the last stage.
        microbatches: the most in a step.
        copies_inputs: whether a forward that will be run again needs copies of its inputs, to change in place.
        agreement: what the stages settle before an update; None where there is nothing to settle.
        seed: of all random draws.
    """

    def __init__(
        self,
        task: Task,
        layers: Sequence[ChainLayer],
        *,
        loss: Callable[[Values, Values], Tensor],
        shared: dict[int, nn.Parameter],
        start: int,
        last: bool,
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
        targets: tuple[Value, ...],
        microbatches: int,
        agreement: Agreement | None,
        copies_inputs: bool,
        device: torch.device,
        seed: int,
    ) -> None:
        self.task, self.layers, self.start, self.device, self.seed = task, tuple(layers), start, device, seed
        self.inputs, self.outputs, self.targets = inputs, outputs, targets
        self.differentiable = tuple(value.requires_grad for value in inputs)
        self.loss, self.shared = loss, shared
        self.batch_number = 0  # of training batches so far; random draws depend on it
        self.parameters = [p for layer in layers for p in layer.module.parameters()]
        self.buffers = [b for layer in layers for b in layer.module.buffers()]
        self.agreement, self.copies_inputs = agreement, copies_inputs
        groups = _groups(layers, task.groups)
        # At least one group a layer: an update's temporary memory is then that of one layer, not of the whole stage.
        self.optimizer = task.optimizer(groups) if groups else None
        self.scheduler = task.scheduler(self.optimizer) if task.scheduler is not None and self.optimizer else None
        self.weights = [1.0 / microbatches] * microbatches
        self.losses = torch.zeros(microbatches, device=device) if last else None
        self._seed_gradient = torch.full((), 1.0 / microbatches, device=device) if last else None
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._cells: dict[int, Cell] = {}
        self._copies: dict[int, list[Tensor]] = {}  # of the buffers, for the backward of a forward that ran again

    @property
    def constants(self) -> list[Tensor]:
        """Small tensors that live as long as the stage, beside parameters and buffers."""
        return [t for t in (self.losses, self._seed_gradient) if t is not None]

    def forward(
        self,
        microbatch: int,
        inputs: list[Tensor],
        targets: list[Tensor],
        layers: Sequence[ChainLayer] | None = None,
    ) -> Values:
        """Outputs of the stage, detached; none on the last. Empties `inputs` and `targets`, to hold them no longer than
        needed.
        """
        cell = self._cells[microbatch] = Cell()
        values = _take(inputs)
        if any(self.differentiable):
            values = enter(cell, values, self.differentiable, self._anchor)
        for number, layer in enumerate(self.layers if layers is None else layers, self.start):
            seed_layer(self.device, self.seed, self.batch_number, microbatch, number)
            values = layer(values)
        if self.losses is None:
            leave(cell, values)
            return tuple(value.detach().contiguous() for value in values)
        seed_layer(self.device, self.seed, self.batch_number, microbatch, self.start + len(self.layers))
        values = (self.loss(values, _take(targets)),)
        self.losses[microbatch].copy_(values[0].detach())
        leave(cell, values)
        return ()

    def backward(self, microbatch: int, gradients: list[Tensor], inputs: Sequence[Value] | None = None) -> list[Tensor]:
        """Gradients of the inputs that require one, from those of the outputs, which are taken out of `gradients`.

        `inputs` describes the microbatch's inputs where they are not the usual ones.
        """
        cell = self._cells.pop(microbatch, None)
        if cell is None:
            raise UsageError(f"microbatch {microbatch} cannot go backward: it has no forward, or went backward already")
        if self._seed_gradient is not None:
            scale = self.agreement.scale if self.agreement is not None else None
            cell.incoming = [self._seed_gradient.fill_(self.weights[microbatch] * (scale.value if scale else 1.0))]
        else:
            cell.incoming = [gradients.pop(0) if value.requires_grad else None for value in self.outputs]
        backward(cell)
        outgoing = cell.outgoing or (None,) * len(self.inputs)
        found = [
            torch.zeros(value.shape, dtype=getattr(torch, value.dtype), device=self.device)
            if gradient is None
            else gradient.contiguous()
            for gradient, value in zip(outgoing, self.inputs if inputs is None else inputs, strict=True)
            if value.requires_grad
        ]
        self._copies.pop(microbatch, None)
        return found

    def step(self) -> None:
        """One optimizer step, unless the stages agreed to skip it; the gradients are freed."""
        skipped = self.agreement is not None and self.agreement.overflow
        if self.optimizer is not None:
            if not skipped:
                self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None and not skipped:
            self.scheduler.step()

    def evaluate(
        self,
        microbatch: int,
        inputs: list[Tensor],
        targets: list[Tensor],
        layers: Sequence[ChainLayer] | None = None,
    ) -> Values:
        """Outputs of the stage, or the microbatch's loss on the last, without a graph. Empties what it gets."""
        with torch.no_grad():
            values = _take(inputs)
            for layer in self.layers if layers is None else layers:
                values = layer(values)
            if self.losses is None:
                return tuple(value.contiguous() for value in values)
            self.losses[microbatch].copy_(self.loss(values, _take(targets)))
            return ()

    def checkpoint(
        self,
        microbatch: int,
        inputs: Sequence[Tensor],
        targets: Sequence[Tensor],
        layers: Sequence[ChainLayer] | None = None,
    ) -> Values:
        """Outputs of the stage as in training, without a graph: it will be made by running forward again.

        Raises:
            UsageError: a layer changed the inputs, which are needed again.
        """
        versions = [value._version for value in inputs]
        values = tuple(value.clone() for value in inputs) if self.copies_inputs else tuple(inputs)
        with torch.no_grad():
            for number, layer in enumerate(self.layers if layers is None else layers, self.start):
                seed_layer(self.device, self.seed, self.batch_number, microbatch, number)
                values = layer(values)
            if self.losses is not None:
                seed_layer(self.device, self.seed, self.batch_number, microbatch, self.start + len(self.layers))
                self.losses[microbatch].copy_(self.loss(values, tuple(targets)))
                values = ()
        if versions != [value._version for value in inputs]:
            raise UsageError(
                f"layers {self.layers[0].name} to {self.layers[-1].name} change their inputs in place, so the forward "
                "cannot be run again: use recompute='never', or layers with inplace=False"
            )
        return tuple(value.contiguous() for value in values)

    def recompute(
        self,
        microbatch: int,
        inputs: list[Tensor],
        targets: list[Tensor],
        layers: Sequence[ChainLayer] | None = None,
    ) -> None:
        """The forward again, this time with a graph: the same random draws, and statistics are left alone."""
        with _copied_buffers(self.layers if layers is None else layers) as copies:
            self.forward(microbatch, inputs, targets, layers)
        self._copies[microbatch] = copies  # which of them the graph keeps, and until when, nobody need know

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, layers behave as in evaluation: no dropout, batch norm as learned. Afterwards all is as it was."""
        modes = [(module, module.training) for layer in self.layers for module in layer.module.modules()]
        try:
            for layer in self.layers:
                layer.module.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training

    def abandon(self) -> None:
        """Forget the microbatches in flight, what they hold, and the gradients so far: the step did not happen."""
        for cell in self._cells.values():
            cell.root = cell.incoming = None
            cell.outgoing = ()
        self._cells.clear()
        self._copies.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def optimizer_state(self) -> list[Tensor]:
        """Every tensor the optimizer keeps."""
        if self.optimizer is None:
            return []
        return [item for state in self.optimizer.state.values() for item in state.values() if isinstance(item, Tensor)]


def _groups(layers: Sequence[ChainLayer], options: ParameterOptions | None) -> list[dict[str, Any]]:
    """A parameter group for every layer and set of options; a shared parameter with the first layer that has it."""
    met: set[int] = set()
    groups: list[dict[str, Any]] = []
    for layer in layers:
        of_layer: list[dict[str, Any]] = []
        for name, parameter in layer.module.named_parameters():
            if not parameter.requires_grad or id(parameter) in met:
                continue
            met.add(id(parameter))
            wanted = options(layer.originals.get(name, name), parameter) if options is not None else {}
            group = next((g for g in of_layer if {k: v for k, v in g.items() if k != "params"} == wanted), None)
            if group is None:
                of_layer.append({"params": [parameter], **wanted})
            else:
                group["params"].append(parameter)
        groups += of_layer
    return groups


@contextmanager
def _copied_buffers(layers: Sequence[ChainLayer]) -> Iterator[list[Tensor]]:
    """Inside, layers work on copies of their buffers, which the graph may keep. Afterwards the buffers are back."""
    places = [(part, name) for layer in layers for part in layer.module.modules() for name in part._buffers]
    originals = [part._buffers[name] for part, name in places]
    copies = {id(buffer): buffer.clone() for buffer in originals if buffer is not None}
    try:
        for (part, name), buffer in zip(places, originals, strict=True):
            part._buffers[name] = None if buffer is None else copies[id(buffer)]
        yield list(copies.values())
    finally:
        for (part, name), buffer in zip(places, originals, strict=True):
            part._buffers[name] = buffer


def _take(box: list[Tensor]) -> Values:
    """The tensors in `box`, which no longer holds them."""
    values = tuple(box)
    box.clear()
    return values
