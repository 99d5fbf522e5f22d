"""The collectives of a device around an update: gradient sums, parameters from their owners, and agreements.

The participants are the devices that the plan's cost counts (`memory.arenas`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipefit.capture import is_assumed
from pipefit.errors import UsageError
from pipefit.fake_cuda.target import is_fake
from pipefit.memory import members
from pipefit.runtime.comm.transfers import Transfers
from pipefit.runtime.engine.stage import StageRunner
from pipefit.schema.actions import Action, Kind, Subject
from pipefit.schema.layer_costs import Value
from pipefit.schema.plan import Plan
from pipefit.schema.profile import ModelProfile

# ---- Exchanged tensors
# Replicas of a stage sum the gradients of all their parameters, and stages those of a parameter that they
# share. Each has the gradients of its local samples, scaled by their part in the batch, so their sum is the
# gradient of the whole batch. All participants must exchange the same tensors in the same order. If replicas
# shard the state of a stage (`memory.model_state`), only the owner of a layer gets the sum.


class Exchanged(NamedTuple):
    """The tensors of a collective, and for each the replica that owns its layer.

    Without ZeRO `owners` is empty.
    """

    tensors: list[Tensor]
    owners: list[int]


def summed_gradients(stage: StageRunner, action: Action, summed: Container[int]) -> Exchanged:
    """Return the gradients of a stage that a REDUCE sums.

    `summed` are the parameters that stages sum separately.
    """
    if isinstance(action.subject, Subject):
        parameter = stage.shared[action.subject.layer]
        if parameter.grad is None:  # the layers of this stage did not use it
            parameter.grad = torch.zeros_like(parameter)
        return Exchanged([parameter.grad], [])
    apart = _apart(stage, summed)
    return _of_layers(stage, action, lambda layer: _of_layer(stage, layer, apart))


def reduced(stage: StageRunner, action: Action, summed: Container[int]) -> list[nn.Parameter]:
    """Return the parameters whose gradients a REDUCE of a stage sums, without those `summed` between
    stages.
    """
    if isinstance(action.subject, Subject):
        return [stage.shared[action.subject.layer]]
    apart = _apart(stage, summed)
    return [
        parameter for layer in range(*stage.layers_of(action)) for parameter in _trained(stage, layer, apart)
    ]


def others_freed(stage: StageRunner, action: Action) -> list[torch.UntypedStorage]:
    """Free gradients that have been reduced to other replicas; return the storages that lost their memory.

    Their memory is freed immediately, although a communication thread may hold the tensors a little longer.
    """
    if stage.share is None or not stage.share.divides_gradients:
        return []
    layers = range(*stage.layers_of(action))
    others = [layer for layer in layers if not stage.share.owns(layer)]
    parameters = [p for layer in others for p in stage.updates.parameters((layer, layer + 1))]
    result = [parameter.grad.untyped_storage() for parameter in parameters if parameter.grad is not None]
    for parameter in parameters:
        parameter.grad = None
    for storage in result:
        storage.resize_(0)
    return result


def gathered_parameters(stage: StageRunner, action: Action) -> Exchanged:
    """Return the parameters of a stage that an UNSHARD brings from their owners."""
    return _of_layers(stage, action, lambda layer: stage.gathered.parameters((layer, layer + 1))[0])


def _of_layers(stage: StageRunner, action: Action, of_layer: Callable[[int], list[Tensor]]) -> Exchanged:
    """Return the tensors of all layers of an action, with their owners if the stage is sharded."""
    layers = range(*stage.layers_of(action))
    result = [(layer, tensor) for layer in layers for tensor in of_layer(layer)]
    owners = [] if stage.share is None else [stage.share.owner(layer) for layer, _ in result]
    return Exchanged([tensor for _, tensor in result], owners)


def _of_layer(stage: StageRunner, layer: int, apart: Container[int]) -> list[Tensor]:
    """Return the gradients of a layer's own parameters.

    If all parameters of a layer have gradients in its profile, all have one in every replica: zeros if its
    samples do not reach a parameter, as with an expert. For other layers, only existing gradients are
    returned.
    """
    result: list[Tensor] = []
    cost = stage.storages.costs[layer - stage.start]
    for parameter in _trained(stage, layer, apart):
        if parameter.grad is None and cost.gradient_bytes >= cost.trained_bytes:
            parameter.grad = torch.zeros_like(parameter)
        result += [] if parameter.grad is None else [parameter.grad]
    return result


def _apart(stage: StageRunner, summed: Container[int]) -> set[int]:
    """Return the ids of the parameters of a stage among those `summed` between stages."""
    return {id(parameter) for number, parameter in stage.shared.items() if number in summed}


def _trained(stage: StageRunner, layer: int, apart: Container[int]) -> list[nn.Parameter]:
    """Return the parameters that a layer trains, without those with ids in `apart`."""
    own = stage.updates.parameters((layer, layer + 1))
    return [parameter for parameter in own if parameter.requires_grad and id(parameter) not in apart]


# ---- Marks of absent gradients
# If values decide on which tensors a loss depends, a value may have a gradient in one microbatch and none in
# another, but its message always has room for one. Zeros would train other numbers: plain training leaves a
# parameter without a gradient unchanged, but an optimizer with momentum or decay moves one whose gradient is
# zero. So the room is filled with a number that no operation makes: a signalling NaN, because any result is a
# quiet NaN. Only plans of models with assumptions about values (`capture.whole_modules`) are checked
# for it; it takes no memory.
#
# In sums over replicas the room is filled with -0.0: only a sum of -0.0 alone is -0.0. Present gradients
# contain none, because -0.0 + 0.0 is 0.0.

_MARKS = {  # integers with the bits of a NaN whose mantissa begins with 0
    torch.float16: (torch.int16, 0x7C5A),
    torch.bfloat16: (torch.int16, 0x7FA5),
    torch.float32: (torch.int32, 0x7FA5A5A5),
    torch.float64: (torch.int64, 0x7FF5A5A5A5A5A5A5),
}


def to_send(
    gradients: Sequence[Tensor | None], values: Sequence[Value], profile: ModelProfile, device: torch.device
) -> list[Tensor]:
    """Return the gradients to send for a stage's inputs, of those `values` that have one by the plan.

    Raises:
        UsageError: one is absent, although the dependence of the loss does not vary with values.
    """
    expected = [value for value in values if value.has_gradient]
    return [
        _absent(value, profile, device) if gradient is None else gradient
        for gradient, value in zip(gradients, expected, strict=True)
    ]


def _absent(value: Value, profile: ModelProfile, device: torch.device) -> Tensor:
    if not may_be_absent(profile):
        raise UsageError(
            f"the loss does not depend on a value of shape {value.shape}, but it did when the model was "
            "profiled, so plain training may leave earlier parameters without a gradient: multiply the "
            "value by zero instead of omitting it"
        )
    tensor = torch.empty(value.shape, dtype=getattr(torch, value.dtype), device=device)
    bits, mark = _bits(tensor)
    bits.fill_(mark)
    return tensor


def may_be_absent(profile: ModelProfile) -> bool:
    """Return whether values decide on which tensors a loss depends."""
    return any(map(is_assumed, profile.kernels.unknown))


def received(tensors: list[Tensor], outputs: Sequence[Value], profile: ModelProfile) -> list[Tensor | None]:
    """Return the gradients of a stage's outputs, removed from the message `tensors`.

    Absent gradients are None. If only some replicas' local batches have a gradient, zeros stand for the
    others.
    """
    result = [tensors.pop(0) if value.has_gradient else None for value in outputs]
    if may_be_absent(profile):
        result = [None if gradient is None else _present(gradient) for gradient in result]
    return result


def mark(parameters: Iterable[nn.Parameter]) -> None:
    """Give every parameter a gradient before a sum: -0.0 for a missing one, and nowhere else."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.full_like(parameter, -0.0)
        else:
            parameter.grad.add_(0.0)


def unmark(parameters: Iterable[nn.Parameter]) -> None:
    """Remove the gradients that no replica had, after a sum."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and not is_fake(gradient) and _is_marked(gradient):
            parameter.grad = None


def _is_marked(gradient: Tensor) -> bool:
    numbers = torch.view_as_real(gradient)[..., 0] if gradient.is_complex() else gradient
    return bool((gradient == 0).all() & numbers.signbit().all())


def _present(gradient: Tensor) -> Tensor | None:
    if is_fake(gradient):
        return gradient
    rows = list(gradient) if gradient.ndim else [gradient]
    missing = [row for row in rows if row.numel() and _is_absent(row)]
    if len(missing) == len(rows):
        return None
    for row in missing:
        row.zero_()
    return gradient


def _is_absent(row: Tensor) -> bool:
    bits, mark = _bits(row)
    return bits.flatten()[0].item() == mark


def _bits(tensor: Tensor) -> tuple[Tensor, int]:
    """Return a view of the bits of a tensor, with complex numbers as pairs, and the mark's bits."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    whole, mark = _MARKS[real.dtype]
    return real.view(whole), mark


# ---- Execution

EXECUTED = frozenset({Kind.REDUCE, Kind.UNSHARD, Kind.AGREE})
Resized = Sequence[torch.UntypedStorage]  # storages that have got or lost their memory


class DeviceCollectives:
    """The collectives of one device of `plan`."""

    def __init__(self, plan: Plan, device: int, transfers: Transfers) -> None:
        self._plan, self._device, self._transfers = plan, device, transfers
        self._marks = may_be_absent(plan.profile)

    def start(self, stage: StageRunner, action: Action) -> Resized:
        """Begin a collective of a stage; return the resized storages."""
        resized = stage.gather(action) if action.kind is Kind.UNSHARD else ()
        exchanged = self._exchanged(stage, action)
        devices = members(self._plan, action)
        owners = [devices[owner] for owner in exchanged.owners]
        self._transfers.collect(action, exchanged.tensors, devices, self._device, owners)
        return resized

    def join(self, stage: StageRunner, action: Action) -> Resized:
        """Wait for the end of a collective, and apply its result to the stage; return the resized
        storages.
        """
        tensors = self._transfers.join(action) or ()
        if action.kind is Kind.REDUCE:
            resized = others_freed(stage, action)
            if self._marks:
                unmark(reduced(stage, action, self._plan.summed))
            return resized
        if action.kind is Kind.UNSHARD:
            return stage.gather(action)
        assert stage.agreement is not None
        stage.agreement.conclude(*tensors)
        return ()

    def _exchanged(self, stage: StageRunner, action: Action) -> Exchanged:
        if action.kind is Kind.REDUCE:
            if self._marks:
                mark(reduced(stage, action, self._plan.summed))
            return summed_gradients(stage, action, self._plan.summed)
        if action.kind is Kind.UNSHARD:
            return gathered_parameters(stage, action)
        assert stage.agreement is not None
        return Exchanged([stage.agreement.contribution(stage.device)], [])
