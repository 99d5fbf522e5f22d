"""Whether a loss is a mean over samples, so that the size of microbatches does not matter to what is learnt.

A step's loss is the mean of those of its microbatches, as in a plain loop that accumulates gradients. That is the loss
of the whole batch if it is a mean over samples that do not depend on each other. It is another one where samples are
each other's negatives (CLIP; Radford et al., 2021), where it is a sum, and where it is a mean over something else, such
as words that count. Two microbatches are asked, in evaluation and without gradients: apart, and as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipefit.capture.chain import Chain
from pipefit.capture.comparison import NotComparable, evaluated
from pipefit.capture.sample import Sample
from pipefit.capture.task import Task
from pipefit.errors import UsageError
from pipefit.runtime.engine.batches import Cut
from pipefit.schema.plan import Plan
from pipefit.schema.training import Precision

ROUNDED, ROUNDED_HALF = 1e-4, 0.03  # by which part two sums of one loss may differ; models of float64 use float32 too
LEFT_OUT = -100  # the target that losses leave out unless they are told another one
SMALLEST = 1e-3  # a smaller loss may be rounding alone


def rounding(precision: Precision) -> float:
    """By which part of the largest number two results of the same operations may differ."""
    return ROUNDED if precision in ("float32", "float64") else ROUNDED_HALF


def tolerance(plan: Plan) -> float:
    """The same for the precision of a plan."""
    return rounding(plan.training.precision)


def what_microbatches_change(whole: Task, plan: Plan, chain: Chain, batches: Sequence[Sample]) -> str:
    """A sentence on the loss of two microbatches, `batches`, if it is not that of all their samples together.

    Nothing where an update takes one microbatch, and where that cannot be known: the module fails in evaluation, its
    loss is not finite there, or it draws random numbers.
    """
    if plan.training.microbatches == 1 or plan.training.schedule == "pipedream":
        return ""
    first, second = batches
    asked = [first, second, _joined(first, second), first]
    try:
        one, other, together, again = evaluated(whole, asked, traced=chain.traced, target=plan.cluster.target)
    except NotComparable:
        return ""
    mean, largest = (one + other) / 2, max(abs(one), abs(other), abs(together), SMALLEST)
    if one != again or not isfinite(largest) or abs(mean - together) <= tolerance(plan) * largest:
        return ""
    size = plan.training.microbatch_size
    return (
        f"the loss of {whole.name} depends on the size of microbatches: two of {size} have {mean:.6g} on average, and "
        f"their {2 * size} samples together {together:.6g}, as where samples are each other's negatives, or a loss is "
        "a sum, or a mean over other things than samples. An update takes the mean of all microbatches' losses, as a "
        "plain loop does that accumulates gradients; for the loss of a whole batch, plan with one microbatch "
        "(microbatches=1)"
    )


def left_out(tensors: Sequence[Tensor], parts: int) -> list[int]:
    """How many targets the losses of torch and of Hugging Face's models leave out of each of so many equal parts of a
    batch, as far as the tensor shows it whose parts differ, if one does.
    """
    for tensor in tensors:
        if tensor.dtype in (torch.int64, torch.int32) and tensor.ndim:
            counts = [int((part == LEFT_OUT).sum()) for part in tensor.chunk(parts)]
            if len(set(counts)) > 1:
                return counts
    return []


def check_left_out(plan: Plan, cut: Cut) -> None:
    """Check that replicas which nobody asked for have losses of as many targets in every microbatch.

    Raises:
        UsageError: they have not: the mean of their means is not that of the microbatch.
    """
    data = plan.stages[-1].grid.data
    if data == 1 or plan.asks_for_replicas:
        return
    for number, (inputs, targets) in enumerate(zip(cut.inputs, cut.targets, strict=True)):
        if counts := left_out((*inputs, *targets), data):
            raise UsageError(
                f"{data} replicas would train another loss: of microbatch {number} of this batch their slices leave "
                f"out {', '.join(map(str, counts))} targets ({LEFT_OUT}), so that the mean of their losses is not "
                "that of the microbatch. Plan with data=1 (--data 1); or, if every slice's own mean is meant, with "
                f"data={data}"
            )


def _joined(first: Sample, second: Sample) -> Sample:
    """The samples of both."""
    joined: Sample = pytree.tree_map(
        lambda one, other: torch.cat([one, other]) if isinstance(one, Tensor) else one, first, second
    )
    return joined
