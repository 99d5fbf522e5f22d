"""The bayesian planner: Bayesian optimisation of the peak, with the settings of mCAP-BO. A baseline.

One dimension per device, the number of blocks on it; scikit-optimize with 75 evaluations, the acquisition function
`gp_hedge`, its optimiser `sampling`, xi = kappa = 1000, and a Gaussian process with its Matérn kernel (smoothness 5/2).
The optimiser does not know that the lengths must add up to the number of blocks. So its proposals are scaled, with at
least one block on each device; this is our reading, as the paper does not say. Stage s is on device s. It takes ten to
twenty seconds on a few devices and up to a minute on 64, and many times that where other work keeps the cores busy,
because its threads wait for each other (OMP_NUM_THREADS=1 helps). On many devices it stays far from the optimum, where
`exact` finds a lower peak in milliseconds. Needs `pipefit[bayes]`. (mCAP, section 3.4.)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

from pipefit.errors import UsageError
from pipefit.planner.prediction import true_peaks
from pipefit.planner.question import Found, Question

EVALUATIONS = 75
_EXPLORATION = 1000  # xi and kappa
SEED = 0

Minimise = Callable[..., Any]
Edges = tuple[int, ...]


def bayesian(question: Question) -> Found:
    """The best of 75 splits, each chosen from the results of those before. The same question has the same answer.

    Raises:
        UsageError: scikit-optimize is not installed.
    """
    peak = true_peaks(question.profile, question.training, stages=question.stages, recompute=question.options.recompute)

    def value_of(edges: Edges) -> float:
        peaks = tuple(peak(stage, *ends) for stage, ends in enumerate(pairwise(edges)))
        return question.value(peaks, question.in_order(edges).devices)

    values = search(value_of, question.blocks, question.stages, minimiser())
    value, edges = min((value, edges) for edges, value in values.items())
    return Found(question.in_order(edges), question.objective, value, len(values), proven=False)


def minimiser() -> Minimise:
    """`skopt.gp_minimize`, which takes a second to import.

    Raises:
        UsageError: scikit-optimize is not installed.
    """
    try:
        from skopt import gp_minimize
    except ImportError:
        raise UsageError(
            "Bayesian optimisation needs scikit-optimize, which is not installed: pip install pipefit[bayes], or use "
            "the exact planner, which finds better plans sooner"
        ) from None
    minimise: Minimise = gp_minimize
    return minimise


def search(
    value_of: Callable[[Edges], float], blocks: int, stages: int, minimise: Minimise, *, seed: int = SEED
) -> dict[Edges, float]:
    """The splits that are evaluated, by their edges, each with its value."""
    values: dict[Edges, float] = {}

    def value(proposed: Sequence[int]) -> float:
        edges = scaled(proposed, blocks)
        values[edges] = value_of(edges)
        return values[edges]

    most = blocks - stages + 1
    if stages == 1 or most == 1:  # there is only one split
        value([1] * stages)
        return values
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-optimize warns when it proposes a point twice
        minimise(
            value,
            [(1, most)] * stages,
            n_calls=EVALUATIONS,
            acq_func="gp_hedge",
            acq_optimizer="sampling",
            xi=_EXPLORATION,
            kappa=_EXPLORATION,
            random_state=seed,
        )
    return values


def scaled(proposed: Sequence[int], blocks: int) -> tuple[int, ...]:
    """Edges of stages with lengths in proportion to `proposed`: at least one block each, `blocks` in all."""
    count, sums = len(proposed), accumulate(map(int, proposed))
    more = sum(map(int, proposed)) - count  # blocks than one for each stage
    if more == 0:
        return (0, *(number * blocks // count for number in range(1, count + 1)))
    return (0, *(number + (blocks - count) * (total - number) // more for number, total in enumerate(sums, 1)))
