"""Cutting a batch into microbatches, the last of which may be smaller, and the shapes that follow from that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace as with_

from torch import Tensor

from pipefit.capture.task import Task
from pipefit.errors import UsageError
from pipefit.profile import Value
from pipefit.runtime.reader import Boundaries, Microbatch
from pipefit.runtime.target import FakeTarget
from pipefit.runtime.twins import fake_chain, sample
from pipefit.training import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A batch in microbatches of `sizes` samples: views of the host's tensors. `shapes` are those at layer boundaries."""

    inputs: Sequence[Microbatch]
    targets: Sequence[Microbatch]
    sizes: tuple[int, ...]
    shapes: tuple[Boundaries, ...] = ()


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


def boundaries_at(task: Task, size: int, usual: Boundaries) -> Boundaries:
    """The values at every boundary for microbatches of `size` samples, where `usual` are those of the plan's."""
    like = sample(task, size)
    with FakeTarget("cpu") as fake:
        chain = fake_chain(task, fake, like)
        values = tuple(fake.fake(value) for value in chain.flatten(like[0]))
        found = [values]
        for layer in chain.layers:
            values = layer(values)
            found.append(values)
    return tuple(
        tuple(_shaped(value, tensor) for value, tensor in zip(known, tensors, strict=True))
        for known, tensors in zip(usual, found, strict=True)
    )


def _shaped(value: Value, tensor: Tensor) -> Value:
    return with_(value, shape=tuple(tensor.shape), nbytes=tensor.numel() * tensor.element_size())
