"""Checks whether a loss is a mean over samples, so that training does not depend on the microbatch size.

A step's loss is the mean of the losses of its microbatches, as in a plain loop that accumulates gradients. It
equals the loss of the whole batch if that is a mean over independent samples. It differs if samples are each
other's negatives (CLIP; Radford et al., 2021), if the loss is a sum, or a mean over other things, such as
words that count. The check computes the loss of two microbatches in evaluation mode and without gradients:
separately, and together.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor

from pipefit.capture import Chain, NotComparable, Sample, Task, evaluated, joined
from pipefit.errors import UsageError
from pipefit.runtime.engine.batches import Cut
from pipefit.schema.plan import Plan
from pipefit.schema.training import Precision

ROUNDED, ROUNDED_HALF = 1e-4, 0.03  # relative; models of float64 use float32 too
LEFT_OUT = -100  # the default target that losses ignore
SMALLEST = 1e-3  # smaller losses may be rounding alone


def rounding(precision: Precision) -> float:
    """Return the relative difference, to the largest number, that rounding allows between two results."""
    return ROUNDED if precision in ("float32", "float64") else ROUNDED_HALF


def tolerance(plan: Plan) -> float:
    """Return the rounding tolerance for a plan's precision."""
    return rounding(plan.training.precision)


def what_microbatches_change(whole: Task, plan: Plan, chain: Chain, batches: Sequence[Sample]) -> str:
    """Return a sentence if the loss of two microbatches is not that of all their samples together.

    Empty if an update takes one microbatch, and if the comparison is impossible: the module fails in
    evaluation, its loss is not finite there, or it draws random numbers.
    """
    if plan.training.microbatches == 1 or plan.training.schedule == "pipedream":
        return ""
    first, second = batches
    asked = [first, second, joined(first, second), first]
    try:
        one, other, together, again = evaluated(whole, asked, traced=chain.traced, target=plan.cluster.target)
    except NotComparable:
        return ""
    mean, largest = (one + other) / 2, max(abs(one), abs(other), abs(together), SMALLEST)
    if one != again or not isfinite(largest) or abs(mean - together) <= tolerance(plan) * largest:
        return ""
    size = plan.training.microbatch_size
    return (
        f"the loss of {whole.name} depends on the microbatch size: two microbatches of {size} have "
        f"{mean:.6g} on average, but their {2 * size} samples together have {together:.6g}, for example "
        "because samples are each other's negatives, or because the loss is a sum or a mean over something "
        "other than samples. An update uses the mean of the losses of all microbatches, like a plain loop "
        "with gradient accumulation. For the loss of a whole batch, plan with one microbatch "
        "(microbatches=1)"
    )


def left_out(tensors: Sequence[Tensor], parts: int) -> list[int]:
    """Count the targets that losses ignore in each of `parts` equal parts of a batch.

    The list is empty if the counts are equal. The first integer tensor with unequal counts decides. Losses of
    torch and of Hugging Face's models ignore -100.
    """
    for tensor in tensors:
        if tensor.dtype in (torch.int64, torch.int32) and tensor.ndim:
            counts = [int((part == LEFT_OUT).sum()) for part in tensor.chunk(parts)]
            if len(set(counts)) > 1:
                return counts
    return []


def check_left_out(plan: Plan, cut: Cut) -> None:
    """Check that automatically chosen replicas have equal numbers of targets in every microbatch.

    Raises:
        UsageError: they differ, so the mean of the replicas' means is not that of the microbatch.
    """
    data = plan.stages[-1].grid.data
    if data == 1 or plan.asks_for_replicas:
        return
    for number, (inputs, targets) in enumerate(zip(cut.inputs, cut.targets, strict=True)):
        if counts := left_out((*inputs, *targets), data):
            raise UsageError(
                f"{data} replicas would train another loss: in microbatch {number} of this batch their "
                f"local batches ignore {', '.join(map(str, counts))} targets ({LEFT_OUT}), so the mean of "
                "their losses differs from the loss of the microbatch. Plan with data=1 (--data 1), or "
                f"with data={data} if the mean of each local batch is intended"
            )
