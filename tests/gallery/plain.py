"""Plain training without pipefit: a loop over microbatches, and all the numbers that it computes.

A random operation depends on the seed, the step, the microbatch and its layer. A plain module has no layers,
so the loop gets the layer of each of the forward's random operations, in order, and seeds torch's generator
before the first one of each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Numbers of one step: each microbatch's loss, the gradients before the update, and the
    state after it.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


class Draws(TorchDispatchMode):
    """A counter of random operations that seeds the generator before the first of each layer, if the layers
    are known.
    """

    def __init__(self, layers: Sequence[int] = (), seeds: tuple[int, int, int] = (0, 0, 0)) -> None:
        super().__init__()
        self.layers, self.seeds, self.count, self.layer = layers, seeds, 0, -1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.Tag.nondeterministic_seeded in func.tags:
            if self.layers and self.layers[self.count] != self.layer:
                self.layer = self.layers[self.count]
                torch.manual_seed(mixed(*self.seeds, self.layer))
            self.count += 1
        return func(*args, **(kwargs or {}))


def mixed(*numbers: int) -> int:
    """Return the documented seed of a layer: splitmix64's finaliser, applied to each number in turn."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return state >> 1


def train(
    module: nn.Module,
    batches: Sequence[Any],
    *,
    loss: Callable[[Any, Any], Tensor] | None,
    optimizer: Callable[..., torch.optim.Optimizer],
    size: int,
    last_first: bool,
    draws: Sequence[int] = (),
    seed: int = 0,
    updating: Sequence[Mapping[str, Tensor]] = (),
) -> list[Step]:
    """Train `module` on `batches` in microbatches of `size` samples, with backwards `last_first` or first to
    last.

    `draws` are the layers of the random operations of one microbatch. Updates use the gradients `updating` of
    each step, or by default those that the step computed.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    updates, steps = optimizer(trained), []
    for number, batch in enumerate(batches):
        losses = []
        for microbatch, (inputs, targets) in enumerate(microbatches(batch, size)):
            with Draws(draws, (seed, number, microbatch)) if draws else nullcontext():
                outputs = call(module, inputs)
                losses.append((own_loss(outputs) if loss is None else loss(outputs, targets)).reshape(()))
        for one in reversed(losses) if last_first else losses:
            if one.requires_grad:
                (one / len(losses)).backward()
        gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        for name, gradient in updating[number].items() if updating else ():
            module.get_parameter(name).grad = gradient.clone()
        updates.step()
        updates.zero_grad()
        state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        steps.append(Step(losses=[one.item() for one in losses], gradients=gradients, state=state))
    return steps


def microbatches(batch: Any, size: int) -> list[Any]:
    """Cut `batch` along dimension 0 of all its tensors."""
    leaves, spec = pytree.tree_flatten(batch)
    parts = [leaf.split(size) if isinstance(leaf, Tensor) else None for leaf in leaves]
    count = next(len(part) for part in parts if part is not None)
    return [
        pytree.tree_unflatten(
            [leaf if p is None else p[k] for leaf, p in zip(leaves, parts, strict=True)], spec
        )
        for k in range(count)
    ]


def call(module: nn.Module, inputs: Any) -> Any:
    """Call the module on inputs: a dictionary holds keyword arguments, a tuple positional ones; a Sequential
    takes one.
    """
    if isinstance(inputs, dict):
        return module(**inputs)
    if isinstance(inputs, tuple) and not isinstance(module, nn.Sequential):
        return module(*inputs)
    return module(pytree.tree_map_only(Tensor, Tensor.clone, inputs))


def own_loss(outputs: Any) -> Tensor:
    """Return the loss computed inside the model."""
    if isinstance(outputs, Tensor):
        return outputs
    return outputs["loss"] if isinstance(outputs, dict) else outputs.loss
