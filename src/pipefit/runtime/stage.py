"""A stage at work: the layers of one device, their optimizer, and the microbatches in flight.

Memory is part of the contract. A stage drops every reference as early as the numbers allow, in an order that depends on
nothing but the calls made, because `pipefit.cost.memory` predicts it to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipefit.capture.chain import ChainLayer, Values, single
from pipefit.capture.task import Task
from pipefit.errors import UsageError
from pipefit.profile import Value
from pipefit.runtime.boundary import Cell, backward, enter, leave
from pipefit.runtime.draws import seed_layer


class StageRunner:
    """Layers `start` to `start + len(layers) - 1` of a model, on `device`.

    Args:
        task: its optimizer and its loss are used; the loss on the last stage alone.
        layers: this stage's, already on `device`.
        shared: this stage's copies of parameters that other layers use too, by their number in the profile.
        start: number of the first.
        last: whether the loss follows.
        inputs: what arrives from the stage before (or the data); gradients go back for those that require them.
        outputs: what leaves; gradients come for those that require them.
        targets: what the loss takes besides the outputs; none but on the last stage.
        microbatches: in a step; each contributes its mean loss over this number.
        seed: of all random draws.
    """

    def __init__(
        self,
        task: Task,
        layers: Sequence[ChainLayer],
        *,
        shared: dict[int, nn.Parameter],
        start: int,
        last: bool,
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
        targets: tuple[Value, ...],
        microbatches: int,
        device: torch.device,
        seed: int,
    ) -> None:
        self.task, self.layers, self.start, self.device, self.seed = task, tuple(layers), start, device, seed
        self.inputs, self.outputs, self.targets = inputs, outputs, targets
        self.differentiable = tuple(value.requires_grad for value in inputs)
        self.shared = shared
        self.step_number = 0
        self.parameters = [p for layer in layers for p in layer.module.parameters()]
        self.buffers = [b for layer in layers for b in layer.module.buffers()]
        groups = _groups(layers)
        # One group a layer: an update's temporary memory is then that of one layer, not of the whole stage.
        self.optimizer = task.optimizer([{"params": group} for group in groups]) if groups else None
        self.losses = torch.zeros(microbatches, device=device) if last else None
        self._seed_gradient = torch.full((), 1.0 / microbatches, device=device) if last else None
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._cells: dict[int, Cell] = {}

    @property
    def constants(self) -> list[Tensor]:
        """Small tensors that live as long as the stage, beside parameters and buffers."""
        return [t for t in (self.losses, self._seed_gradient) if t is not None]

    def forward(self, microbatch: int, inputs: list[Tensor], targets: list[Tensor]) -> Values:
        """Outputs of the stage, detached; none on the last. Empties `inputs` and `targets`, to hold them no longer than
        needed.
        """
        cell = self._cells[microbatch] = Cell()
        values = _take(inputs)
        if any(self.differentiable):
            values = enter(cell, values, self.differentiable, self._anchor)
        for number, layer in enumerate(self.layers, self.start):
            seed_layer(self.device, self.seed, self.step_number, microbatch, number)
            values = layer(values)
        if self.losses is None:
            leave(cell, values)
            return tuple(value.detach().contiguous() for value in values)
        seed_layer(self.device, self.seed, self.step_number, microbatch, self.start + len(self.layers))
        values = (_loss(self.task.loss, values, targets),)
        self.losses[microbatch].copy_(values[0].detach())
        leave(cell, values)
        return ()

    def backward(self, microbatch: int, gradients: list[Tensor]) -> list[Tensor]:
        """Gradients of the inputs that require one, from those of the outputs, which are taken out of `gradients`."""
        cell = self._cells.pop(microbatch, None)
        if cell is None:
            raise UsageError(f"microbatch {microbatch} cannot go backward: it has no forward, or went backward already")
        if self.losses is not None:
            cell.incoming = [self._seed_gradient]
        else:
            cell.incoming = [gradients.pop(0) if value.requires_grad else None for value in self.outputs]
        backward(cell)
        outgoing = cell.outgoing or (None,) * len(self.inputs)
        return [
            torch.zeros(value.shape, dtype=getattr(torch, value.dtype), device=self.device)
            if gradient is None
            else gradient.contiguous()
            for gradient, value in zip(outgoing, self.inputs, strict=True)
            if value.requires_grad
        ]

    def step(self) -> None:
        """One optimizer step; the gradients are freed."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        self.step_number += 1

    def abandon(self) -> None:
        """Forget the microbatches in flight, what they hold, and the gradients so far: the step did not happen."""
        for cell in self._cells.values():
            cell.root = cell.incoming = None
            cell.outgoing = ()
        self._cells.clear()
        for parameter in self.parameters:
            parameter.grad = None

    def optimizer_state(self) -> list[Tensor]:
        """Every tensor the optimizer keeps."""
        if self.optimizer is None:
            return []
        return [item for state in self.optimizer.state.values() for item in state.values() if isinstance(item, Tensor)]


def _groups(layers: Sequence[ChainLayer]) -> list[list[nn.Parameter]]:
    """The trainable parameters of every layer that has some; a shared one with the first layer that uses it."""
    met: set[int] = set()
    groups = []
    for layer in layers:
        group = [p for p in layer.module.parameters() if p.requires_grad and id(p) not in met]
        met.update(map(id, group))
        groups += [group] if group else []
    return groups


def _take(box: list[Tensor]) -> Values:
    """The tensors in `box`, which no longer holds them."""
    values = tuple(box)
    box.clear()
    return values


def _loss(loss: Callable[[Any, Any], Tensor], values: Values, targets: list[Tensor]) -> Tensor:
    """The loss of one microbatch, a scalar."""
    result = loss(single(values), single(_take(targets)))
    if not isinstance(result, Tensor) or result.numel() != 1:
        raise UsageError(f"the loss must be a scalar tensor, not {_describe(result)}: return the mean over the samples")
    return result


def _describe(result: object) -> str:
    return f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
