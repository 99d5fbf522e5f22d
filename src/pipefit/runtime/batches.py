"""Divides a batch into microbatches, the last of which may be smaller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipefit.capture.caller import is_callers_fake
from pipefit.errors import UsageError
from pipefit.layer_costs import Value
from pipefit.plans import Plan
from pipefit.runtime.runner import Microbatch
from pipefit.texts import counted, dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A batch in microbatches of `sizes` samples, which are views of the batch's tensors."""

    inputs: Sequence[Microbatch]
    targets: Sequence[Microbatch]
    sizes: tuple[int, ...]


def cut_batch(plan: Plan, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Cut:
    """`inputs` and `targets`, cut along dimension 0.

    Raises:
        UsageError: they hold no samples, different numbers, or more than the plan trains; or samples of another shape
            or kind.
    """
    training, measurement = plan.training, plan.measurement
    for what, tensors in (("inputs", inputs), ("targets", targets)):
        _check_plain(what, tensors)
    counts = {value.shape[0] if value.ndim else 0 for value in (*inputs, *targets)}
    if len(counts) != 1:
        raise UsageError(f"the tensors of a batch must hold equally many samples, not {sorted(counts)}")
    samples = counts.pop()
    if not 0 < samples <= training.batch_size:
        raise UsageError(
            f"the batch holds {counted(samples, 'sample')}, but the plan trains batches of {training.batch_size}: "
            "make a plan for this batch size"
        )
    _check_like("inputs", inputs, measurement.costs[0].inputs)
    _check_like("targets", targets, measurement.loss.inputs[len(measurement.costs[-1].outputs) :])
    size = training.microbatch_size
    sizes = [size] * (samples // size) + ([samples % size] if samples % size else [])
    return Cut(inputs=_pieces(inputs, sizes), targets=_pieces(targets, sizes), sizes=tuple(sizes))


def _check_plain(what: str, tensors: Sequence[Tensor]) -> None:
    """Check that tensors are rows of numbers, which can be cut and copied.

    Raises:
        UsageError: one is not; names it.
    """
    for number, tensor in enumerate(tensors):
        strange = tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta
        if strange or is_callers_fake(tensor):
            raise UsageError(
                f"tensor {number} of the {what} of this batch is sparse, nested, quantised, fake or on the meta "
                "device: give a plain one, such as its to_dense() or dequantize()"
            )


def _check_like(what: str, tensors: Sequence[Tensor], planned: Sequence[Value]) -> None:
    """Check that the samples in `tensors` have the shapes that the plan was made for, and numbers of the same kind.

    A floating-point number of another precision is cast, as the task's precision asks for.

    Raises:
        UsageError: one has another; names it.
    """
    for number, (tensor, value) in enumerate(zip(tensors, planned, strict=True)):
        if _kind(tensor.dtype) != _kind(getattr(torch, value.dtype)):
            raise UsageError(
                f"tensor {number} of the {what} of this batch is of {dtype_name(tensor.dtype)}, but the plan is for "
                f"{value.dtype}: cast it, as numbers would be cut off or rounded, or plan for such batches"
            )
        if tensor.shape[1:] != value.shape[1:]:
            own, wanted = (f"({', '.join(('n', *map(str, shape[1:])))})" for shape in (tensor.shape, value.shape))
            raise UsageError(
                f"tensor {number} of the {what} of this batch has the shape {own}, but the plan is for {wanted}, as "
                "its memory depends on it: pad or cut the samples, or profile and plan the task with such batches"
            )


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    """Whether numbers are floating-point ones, complex, or truth values; else they are whole."""
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool


def _pieces(values: Sequence[Tensor], sizes: list[int]) -> list[Microbatch]:
    if not values:
        return [[] for _ in sizes]
    return [list(microbatch) for microbatch in zip(*(value.split_with_sizes(sizes) for value in values), strict=True)]
