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
from pipefit.plans import Plan

ROUNDED, ROUNDED_HALF = 1e-4, 0.03  # by which part two sums of one loss may differ; models of float64 use float32 too
_SMALLEST = 1e-3  # a smaller loss may be rounding alone


def tolerance(plan: Plan) -> float:
    """By which part of the largest number two results of the same operations may differ."""
    return ROUNDED if plan.training.precision in ("float32", "float64") else ROUNDED_HALF


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
        one, other, together, again = evaluated(whole, chain, asked, target=plan.cluster.target)
    except NotComparable:
        return ""
    mean, largest = (one + other) / 2, max(abs(one), abs(other), abs(together), _SMALLEST)
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


def _joined(first: Sample, second: Sample) -> Sample:
    """The samples of both."""
    joined: Sample = pytree.tree_map(
        lambda one, other: torch.cat([one, other]) if isinstance(one, Tensor) else one, first, second
    )
    return joined
