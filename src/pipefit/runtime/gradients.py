"""The gradients that devices add up before an update: replicas of a stage those of all their parameters, and stages
those of a parameter that they share.

Each has those of its own samples, scaled by their part in the batch, so that their sum is that of the whole batch. All
have to add up the same tensors in the same order.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from pipefit.actions import Action, Subject
from pipefit.runtime.stage import StageRunner


def summed_gradients(stage: StageRunner, action: Action, summed: Container[int]) -> list[Tensor]:
    """The gradients of a stage that a REDUCE adds up; `summed` are the parameters that stages add up by themselves."""
    if isinstance(action.subject, Subject):
        parameter = stage.shared[action.subject.layer]
        if parameter.grad is None:  # the layers of this stage did not use it
            parameter.grad = torch.zeros_like(parameter)
        return [parameter.grad]
    apart = {id(parameter) for number, parameter in stage.shared.items() if number in summed}
    layers = range(*(action.layers or (stage.start, stage.stop)))
    return [gradient for layer in layers for gradient in _of_layer(stage, layer, apart)]


def _of_layer(stage: StageRunner, layer: int, apart: Container[int]) -> list[Tensor]:
    """The gradients of a layer's own parameters.

    A layer whose parameters all have gradients by its profile has them in every replica: zeros where its samples do not
    reach a parameter, as with an expert. Of another layer it is those that there are.
    """
    found: list[Tensor] = []
    cost = stage.storages.costs[layer - stage.start]
    for parameter in stage.updates.parameters((layer, layer + 1)):
        if not parameter.requires_grad or id(parameter) in apart:
            continue
        if parameter.grad is None and cost.gradient_bytes >= cost.trained_bytes:
            parameter.grad = torch.zeros_like(parameter)
        found += [] if parameter.grad is None else [parameter.grad]
    return found
