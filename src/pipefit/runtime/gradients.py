"""What devices exchange around an update: gradients that they add up, and parameters that owners bring to all.

Replicas of a stage add up the gradients of all their parameters, and stages those of a parameter that they share. Each
has those of its own samples, scaled by their part in the batch, so that their sum is that of the whole batch. All have
to exchange the same tensors in the same order. Where replicas divide the state of a stage (`pipefit.cost.shares`), only
the owner of a layer gets the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipefit.actions import Action, Subject
from pipefit.runtime.stage import StageRunner


class Exchanged(NamedTuple):
    """The tensors of a collective, and for each the replica that owns its layer; no owners where none does."""

    tensors: list[Tensor]
    owners: list[int]


def summed_gradients(stage: StageRunner, action: Action, summed: Container[int]) -> Exchanged:
    """The gradients of a stage that a REDUCE adds up; `summed` are the parameters that stages add up by themselves."""
    if isinstance(action.subject, Subject):
        parameter = stage.shared[action.subject.layer]
        if parameter.grad is None:  # the layers of this stage did not use it
            parameter.grad = torch.zeros_like(parameter)
        return Exchanged([parameter.grad], [])
    apart = _apart(stage, summed)
    return _of_layers(stage, action, lambda layer: _of_layer(stage, layer, apart))


def reduced(stage: StageRunner, action: Action, summed: Container[int]) -> list[nn.Parameter]:
    """The parameters whose gradients a REDUCE of a stage adds up, without those `summed` between stages."""
    if isinstance(action.subject, Subject):
        return [stage.shared[action.subject.layer]]
    apart = _apart(stage, summed)
    return [parameter for layer in range(*stage.layers_of(action)) for parameter in _trained(stage, layer, apart)]


def others_freed(stage: StageRunner, action: Action) -> list[torch.UntypedStorage]:
    """Free the gradients that have been summed for other replicas; the storages that have lost their memory.

    The memory is freed now, though a thread that has added it up may hold the tensors a little longer.
    """
    if stage.share is None or not stage.share.divides_gradients:
        return []
    layers = range(*stage.layers_of(action))
    others = [layer for layer in layers if not stage.share.owns(layer)]
    parameters = [p for layer in others for p in stage.updates.parameters((layer, layer + 1))]
    found = [parameter.grad.untyped_storage() for parameter in parameters if parameter.grad is not None]
    for parameter in parameters:
        parameter.grad = None
    for storage in found:
        storage.resize_(0)
    return found


def gathered_parameters(stage: StageRunner, action: Action) -> Exchanged:
    """The parameters of a stage that an UNSHARD brings from their owners."""
    return _of_layers(stage, action, lambda layer: stage.gathered.parameters((layer, layer + 1))[0])


def _of_layers(stage: StageRunner, action: Action, of_layer: Callable[[int], list[Tensor]]) -> Exchanged:
    """The tensors of all layers of an action, with their owners where the stage has any."""
    layers = range(*stage.layers_of(action))
    found = [(layer, tensor) for layer in layers for tensor in of_layer(layer)]
    owners = [] if stage.share is None else [stage.share.owner(layer) for layer, _ in found]
    return Exchanged([tensor for _, tensor in found], owners)


def _of_layer(stage: StageRunner, layer: int, apart: Container[int]) -> list[Tensor]:
    """The gradients of a layer's own parameters.

    A layer whose parameters all have gradients by its profile has them in every replica: zeros where its samples do not
    reach a parameter, as with an expert. Of another layer it is those that there are.
    """
    found: list[Tensor] = []
    cost = stage.storages.costs[layer - stage.start]
    for parameter in _trained(stage, layer, apart):
        if parameter.grad is None and cost.gradient_bytes >= cost.trained_bytes:
            parameter.grad = torch.zeros_like(parameter)
        found += [] if parameter.grad is None else [parameter.grad]
    return found


def _apart(stage: StageRunner, summed: Container[int]) -> set[int]:
    """The ids of the parameters of a stage among those `summed` between stages."""
    return {id(parameter) for number, parameter in stage.shared.items() if number in summed}


def _trained(stage: StageRunner, layer: int, apart: Container[int]) -> list[nn.Parameter]:
    """The parameters that a layer trains, but those `apart`, by id."""
    own = stage.updates.parameters((layer, layer + 1))
    return [parameter for parameter in own if parameter.requires_grad and id(parameter) not in apart]
