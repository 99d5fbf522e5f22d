"""Programs for steps of any number of microbatches, and cutting of batches into microbatches."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipefit.capture import is_callers_fake
from pipefit.errors import UsageError
from pipefit.lowering import Entered, as_early, lower, lower_drain, lower_evaluation
from pipefit.runtime.engine.runner import Microbatch
from pipefit.schema.layer_costs import Value
from pipefit.schema.plan import Plan
from pipefit.schema.program import Program
from pipefit.texts import counted, dtype_name

# ---- Programs of a trainer's steps
# Each program is lowered once, because runners cache the instructions of programs they have run.


class Programs:
    """The programs of a plan for steps of any number of microbatches."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._training: dict[Hashable, Program] = {}
        self._evaluations: dict[tuple[int, int | None], Program] = {}

    def training(
        self, microbatches: int, entered: Entered, *, update: bool, last: int | None = None
    ) -> Program:
        """Return the program that trains `microbatches` microbatches, or drains the pipeline for 0.

        `last` is the number of samples of the last microbatch; default: the plan's. `entered` describes the
        microbatches that have entered under an asynchronous schedule.
        """
        count, steps = as_early(self._plan, entered.microbatches), min(entered.steps, 2)
        last = self._rows(last)
        key = microbatches, update, count, steps, last, entered.smaller
        if key not in self._training:
            before: dict[str, Any] = {"entered": count, "steps": steps, "smaller": entered.smaller}
            self._training[key] = (
                lower(self._plan, microbatches=microbatches, last=last, update=update, **before)
                if microbatches
                else lower_drain(self._plan, **before)
            )
        return self._training[key]

    def then(self, entered: Entered, sizes: Sequence[int]) -> Entered:
        """Return `entered` after another step, of microbatches with `sizes` samples."""
        count, last, stages = len(sizes), self._rows(sizes[-1]), len(self._plan.stages)
        before = [(number - count, samples) for number, samples in entered.smaller]
        own = [] if last is None else [(-1, last)]
        smaller = [one for one in (*before, *own) if one[0] >= -stages]  # at most that number are in flight
        return Entered(entered.microbatches + count, entered.steps + 1, tuple(smaller))

    def evaluation(self, microbatches: int, *, last: int | None = None) -> Program:
        """Return the program that evaluates `microbatches` microbatches, the last of `last` samples."""
        key = microbatches, self._rows(last)
        if key not in self._evaluations:
            self._evaluations[key] = lower_evaluation(self._plan, microbatches=microbatches, last=key[1])
        return self._evaluations[key]

    def _rows(self, last: int | None) -> int | None:
        """Return `last` if it differs from the plan's microbatch size and the program depends on it.

        Return None otherwise.
        """
        plan = self._plan
        return last if plan.names_rows and last != plan.training.microbatch_size else None


# ---- Cutting batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A batch cut into microbatches of `sizes` samples, which are views of the batch's tensors."""

    inputs: Sequence[Microbatch]
    targets: Sequence[Microbatch]
    sizes: tuple[int, ...]


def cut_batch(plan: Plan, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Cut:
    """Cut `inputs` and `targets` along dimension 0.

    Raises:
        UsageError: they hold no samples, different numbers of samples, or more than the plan trains; or
            samples of another shape or dtype.
    """
    training, measurement = plan.training, plan.measurement
    for what, tensors in (("inputs", inputs), ("targets", targets)):
        _check_plain(what, tensors)
    counts = {value.shape[0] if value.ndim else 0 for value in (*inputs, *targets)}
    if len(counts) != 1:
        raise UsageError(f"all tensors of a batch must hold the same number of samples, not {sorted(counts)}")
    samples = counts.pop()
    if not 0 < samples <= training.batch_size:
        raise UsageError(
            f"the batch holds {counted(samples, 'sample')}, but the plan trains batches of "
            f"{training.batch_size}: plan for this batch size"
        )
    _check_like("inputs", inputs, measurement.costs[0].inputs)
    _check_like("targets", targets, measurement.loss.inputs[len(measurement.costs[-1].outputs) :])
    size = training.microbatch_size
    sizes = [size] * (samples // size) + ([samples % size] if samples % size else [])
    return Cut(inputs=_pieces(inputs, sizes), targets=_pieces(targets, sizes), sizes=tuple(sizes))


def _check_plain(what: str, tensors: Sequence[Tensor]) -> None:
    """Check that tensors are dense rows of numbers, which can be cut and copied.

    Raises:
        UsageError: one is not; names it.
    """
    for number, tensor in enumerate(tensors):
        strange = (
            tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta
        )
        if strange or is_callers_fake(tensor):
            raise UsageError(
                f"tensor {number} of the {what} of this batch is sparse, nested, quantised, fake or on the "
                "meta device: pass a plain tensor, such as its to_dense() or dequantize()"
            )


def _check_like(what: str, tensors: Sequence[Tensor], planned: Sequence[Value]) -> None:
    """Check that the samples in `tensors` have the plan's shapes and kinds of numbers.

    Floating-point numbers of another precision pass: they are cast to the task's precision.

    Raises:
        UsageError: a tensor has another shape or kind; names it.
    """
    for number, (tensor, value) in enumerate(zip(tensors, planned, strict=True)):
        if _kind(tensor.dtype) != _kind(getattr(torch, value.dtype)):
            raise UsageError(
                f"tensor {number} of the {what} of this batch has {dtype_name(tensor.dtype)}, but the plan "
                f"expects {value.dtype}: cast the tensor if rounding is acceptable, or plan for such "
                "batches"
            )
        if tensor.shape[1:] != value.shape[1:]:
            own, wanted = (
                f"({', '.join(('n', *map(str, shape[1:])))})" for shape in (tensor.shape, value.shape)
            )
            raise UsageError(
                f"tensor {number} of the {what} of this batch has shape {own}, but the plan expects "
                f"{wanted}, because memory depends on it: pad or cut the samples, or profile and plan the "
                "task with such batches"
            )


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    """Return whether numbers are floating-point, complex, or boolean; otherwise they are integers."""
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool


def _pieces(values: Sequence[Tensor], sizes: list[int]) -> list[Microbatch]:
    if not values:
        return [[] for _ in sizes]
    return [
        list(microbatch)
        for microbatch in zip(*(value.split_with_sizes(sizes) for value in values), strict=True)
    ]
