"""Gradients that are absent, in messages that have room for them.

Where values decide on what a loss depends, a value may have a gradient in one microbatch and none in another, and its
message has the room all the same. Zeros there would train something else: plain training leaves a parameter without a
gradient as it is, and an optimizer with momentum or decay moves one whose gradient is zero. So the room is filled with
a number that no operation makes: a signalling NaN, of which any result is a quiet one. Only plans of models of which
something was assumed (`pipefit.capture.by_value`) are looked at for it; it takes no memory.

In sums of replicas' gradients the room is filled with -0.0, of which alone the sum is -0.0; those that are there have
none, as -0.0 + 0.0 is 0.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pipefit.capture.by_value import is_assumed
from pipefit.errors import UsageError
from pipefit.fake.target import is_fake
from pipefit.layer_costs import Value
from pipefit.profiles import ModelProfile

_MARKS = {  # whole numbers with the bits of a NaN whose mantissa begins with 0
    torch.float16: (torch.int16, 0x7C5A),
    torch.bfloat16: (torch.int16, 0x7FA5),
    torch.float32: (torch.int32, 0x7FA5A5A5),
    torch.float64: (torch.int64, 0x7FF5A5A5A5A5A5A5),
}


def to_send(
    gradients: Sequence[Tensor | None], values: Sequence[Value], profile: ModelProfile, device: torch.device
) -> list[Tensor]:
    """The message of the gradients of a stage's inputs, of those `values` that have one by the plan.

    Raises:
        UsageError: one is absent, and values do not decide about that.
    """
    expected = [value for value in values if value.has_gradient]
    return [
        _absent(value, profile, device) if gradient is None else gradient
        for gradient, value in zip(gradients, expected, strict=True)
    ]


def _absent(value: Value, profile: ModelProfile, device: torch.device) -> Tensor:
    if not may_be_absent(profile):
        raise UsageError(
            f"the loss does not depend on a value of shape {value.shape}, on which it did when the model was profiled, "
            "and plain training may leave parameters behind it as they are: multiply by zero instead of leaving it out"
        )
    made = torch.empty(value.shape, dtype=getattr(torch, value.dtype), device=device)
    bits, mark = _bits(made)
    bits.fill_(mark)
    return made


def may_be_absent(profile: ModelProfile) -> bool:
    """Whether values decide on what a loss depends."""
    return any(map(is_assumed, profile.kernels.unknown))


def received(tensors: list[Tensor], outputs: Sequence[Value], profile: ModelProfile) -> list[Tensor | None]:
    """The gradients of a stage's outputs, taken out of the message `tensors`: None for one without, and absent ones.

    Of the slices of a microbatch that several replicas have sent some may have it: zeros stand for the others.
    """
    found = [tensors.pop(0) if value.has_gradient else None for value in outputs]
    if may_be_absent(profile):
        found = [None if gradient is None else _present(gradient) for gradient in found]
    return found


def mark(parameters: Iterable[nn.Parameter]) -> None:
    """Before a sum: a gradient for every parameter, which is -0.0 where there is none, and nowhere else."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.full_like(parameter, -0.0)
        else:
            parameter.grad.add_(0.0)


def unmark(parameters: Iterable[nn.Parameter]) -> None:
    """After a sum: no gradient for a parameter that had one nowhere."""
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
    """A view of the bits of a tensor, those of complex numbers in pairs, and the mark in them."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    whole, mark = _MARKS[real.dtype]
    return real.view(whole), mark
