"""Divides a batch into microbatches, the last of which may be smaller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pipefit.errors import UsageError
from pipefit.runtime.runner import Microbatch
from pipefit.training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A batch in microbatches of `sizes` samples, which are views of the batch's tensors."""

    inputs: Sequence[Microbatch]
    targets: Sequence[Microbatch]
    sizes: tuple[int, ...]


def cut_batch(training: Training, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Cut:
    """`inputs` and `targets`, cut along dimension 0.

    Raises:
        UsageError: they hold no samples, different numbers, or more than the plan trains.
    """
    counts = {value.shape[0] if value.ndim else 0 for value in (*inputs, *targets)}
    if len(counts) != 1:
        raise UsageError(f"the tensors of a batch must hold equally many samples, not {sorted(counts)}")
    samples = counts.pop()
    if not 0 < samples <= training.batch_size:
        raise UsageError(
            f"the batch holds {samples} samples, but the plan trains batches of {training.batch_size}: "
            "make a plan for this batch size"
        )
    size = training.microbatch_size
    sizes = [size] * (samples // size) + ([samples % size] if samples % size else [])
    return Cut(inputs=_pieces(inputs, sizes), targets=_pieces(targets, sizes), sizes=tuple(sizes))


def _pieces(values: Sequence[Tensor], sizes: list[int]) -> list[Microbatch]:
    if not values:
        return [[] for _ in sizes]
    return [list(microbatch) for microbatch in zip(*(value.split_with_sizes(sizes) for value in values), strict=True)]
