"""Planners of mCAP: splits by estimated peaks from training runs, and Bayesian optimisation of peaks.

`additive`, `mcap_bf` and `mcap_bo` need a profile with training runs (`pipefit profile --runs incremental` or
`trimmed`), made with the settings of the planned training. Their peaks are estimates that ignore a stage's
place in the schedule; the finished plan shows the true peaks. Stage s is on device s, and all devices count
as equal. (mCAP, listing 1.1 and section 3.4.)
"""

from __future__ import annotations

import warnings
from bisect import insort
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, combinations, pairwise
from math import comb
from typing import Any, NamedTuple, Protocol

from pipefit.errors import UsageError
from pipefit.lowering import Recompute
from pipefit.planner.closed_forms.bands import Ints, stage_peak
from pipefit.planner.closed_forms.ranges import ranges_of
from pipefit.planner.closed_forms.surroundings import surroundings
from pipefit.planner.problem import PlannerResult, Question
from pipefit.schema.plan import Objective
from pipefit.schema.profile import AdditiveCosts, ModelProfile
from pipefit.schema.training import Training
from pipefit.texts import counted


class _Partial(NamedTuple):
    """Split of the first blocks.

    `peaks` are negated and rising; `starts` are the first blocks of the stages, from the last stage on.
    """

    peaks: tuple[int, ...]
    starts: tuple[int, ...]


class Predictor(Protocol):
    """Predictor of the bytes that a stage needs."""

    def __call__(self, stage: int, start: int, stop: int) -> int:
        """Return the peak bytes of blocks `start` to `stop - 1` as stage number `stage`."""


def best_split(predictor: Predictor, blocks: int, devices: int) -> tuple[int, ...]:
    """Return edges 0 = e0 < e1 < ... = `blocks`; stage s holds blocks e_s to e_(s+1) - 1.

    Of splits with equal peaks, the stages are compared from the last to the first: the smaller first block
    wins.

    Raises:
        UsageError: no device, or fewer blocks than devices.
    """
    if not 1 <= devices <= blocks:
        raise UsageError(
            f"{counted(blocks, 'block')} cannot be split over {counted(devices, 'device')}, because each "
            "device holds at least one block"
        )
    partials: dict[int, _Partial] = {0: _Partial((), ())}
    for stage in range(devices):
        last = blocks - (devices - 1 - stage)
        stops = range(stage + 1, last + 1) if stage < devices - 1 else (blocks,)
        partials = {stop: _lowest(predictor, stage, stop, partials) for stop in stops}
    return (*reversed(partials[blocks].starts), blocks)


def _lowest(predictor: Predictor, stage: int, stop: int, partials: dict[int, _Partial]) -> _Partial:
    """Return the best split of the blocks before `stop` into stages up to number `stage`."""
    result = (
        _extended(partial, predictor(stage, start, stop), start)
        for start, partial in partials.items()
        if start < stop
    )
    return min(result, key=lambda partial: ([-peak for peak in partial.peaks], partial.starts))


def _extended(partial: _Partial, peak: int, start: int) -> _Partial:
    """Return the partial split with one more stage, which starts at `start` and has this peak."""
    peaks = list(partial.peaks)
    insort(peaks, -peak)
    return _Partial(tuple(peaks), (start, *partial.starts))


def true_peaks(
    profile: ModelProfile, training: Training, *, stages: int, recompute: Recompute = "never"
) -> Predictor:
    """Return the exact predictor of peaks, in bytes, for pipelines of `stages` stages.

    Raises:
        UsageError: the schedule is unknown, or the microbatch size was not profiled.
    """
    ranges = ranges_of(profile.at(training.microbatch_size), profile.edges, training.microbatches, recompute)
    band = ranges.band(ranges.count)

    @cache
    def table(stage: int) -> Ints:
        schedule, count = training.schedule, training.microbatches
        met = surroundings(schedule, stage, stages, count, recompute, versions=training.versions)
        return stage_peak(band, met)

    return lambda stage, start, stop: int(table(stage)[stop - start - 1, start])


# ---- Bayesian optimisation with the settings of mCAP-BO

EVALUATIONS = 75
_EXPLORATION = 1000  # xi and kappa
SEED = 0

Minimise = Callable[..., Any]
Edges = tuple[int, ...]


def bayesian(question: Question) -> PlannerResult:
    """Return the best of 75 splits, each chosen from the results of those before; deterministic.

    One dimension for each device, the number of its blocks; scikit-optimize with 75 evaluations, the
    acquisition function `gp_hedge`, its optimiser `sampling`, xi = kappa = 1000, and a Gaussian process with
    its Matérn kernel (smoothness 5/2). The optimiser ignores that the lengths must add up to the number of
    blocks, so its proposals are scaled, with at least one block on each device; the paper does not specify
    this. It takes ten to twenty seconds on a few devices and up to a minute on 64, and many times that if
    other work keeps the cores busy (OMP_NUM_THREADS=1 helps). On many devices its peak is far above that of
    `exact`. Needs `pipefit[bayes]`. (mCAP, section 3.4.)

    Raises:
        UsageError: scikit-optimize is not installed.
    """
    peak = true_peaks(
        question.profile, question.training, stages=question.stages, recompute=question.options.recompute
    )

    def value_of(edges: Edges) -> float:
        peaks = tuple(peak(stage, *ends) for stage, ends in enumerate(pairwise(edges)))
        return question.value(peaks, question.in_order(edges).devices)

    values = search(value_of, question.blocks, question.stages, minimiser())
    value, edges = min((value, edges) for edges, value in values.items())
    return PlannerResult(question.in_order(edges), question.objective, value, len(values), proven=False)


def minimiser() -> Minimise:
    """Return `skopt.gp_minimize`, which takes a second to import.

    Raises:
        UsageError: scikit-optimize is not installed.
    """
    try:
        from skopt import gp_minimize
    except ImportError:
        raise UsageError(
            "Bayesian optimisation needs scikit-optimize, which is not installed: pip install "
            "'pipefit[bayes]', or use the exact planner, which finds better plans sooner"
        ) from None
    minimise: Minimise = gp_minimize
    return minimise


def search(
    value_of: Callable[[Edges], float], blocks: int, stages: int, minimise: Minimise, *, seed: int = SEED
) -> dict[Edges, float]:
    """Return the evaluated splits, by their edges, each with its value."""
    values: dict[Edges, float] = {}

    def value(proposed: Sequence[int]) -> float:
        edges = scaled(proposed, blocks)
        values[edges] = value_of(edges)
        return values[edges]

    most = blocks - stages + 1
    if stages == 1 or most == 1:  # only one split exists
        value([1] * stages)
        return values
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scikit-optimize warns if it proposes a point twice
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
    """Return edges of stages with lengths in proportion to `proposed`, at least one block each."""
    count, sums = len(proposed), accumulate(map(int, proposed))
    more = sum(map(int, proposed)) - count  # blocks in addition to one for each stage
    if more == 0:
        return (0, *(number * blocks // count for number in range(1, count + 1)))
    return (
        0,
        *(number + (blocks - count) * (total - number) // more for number, total in enumerate(sums, 1)),
    )


# ---- Estimated peaks


def additive(question: Question) -> PlannerResult:
    """Return the split with the lowest highest estimated peak, then the lowest second highest, and so on.

    Dynamic programming finds the split of mCAP-BF (`mcap_bf`), in a few hundredths of a second for 42 blocks.

    Raises:
        UsageError: no training runs were made under this training.
    """
    costs = measured_costs(question)
    edges = best_split(costs, question.blocks, question.stages)
    highest = max(costs.peak(start, stop) for start, stop in pairwise(edges))
    looked_at = question.stages * comb(question.blocks - question.stages + 2, 2)
    return PlannerResult(question.in_order(edges), Objective.ESTIMATED_PEAK, highest, looked_at)


def measured_costs(question: Question) -> AdditiveCosts:
    """Return the costs measured by training runs under exactly the planned training.

    Raises:
        UsageError: there were no runs, or they were made under another training; the message names the
            differences.
    """
    model, costs = question.profile.model, question.profile.additive
    if costs is None:
        raise UsageError(
            f"this planner needs measurements of training runs, and {model} does not have any: profile it "
            "with --runs incremental or --runs trimmed, or use the exact planner, which does not need them"
        )
    unlike = costs.differences(question.training, question.options.recompute)
    if unlike:
        raise UsageError(
            f"the training runs of {model} used {'; '.join(unlike)}: plan for that training, profile with "
            "--runs and these settings, or use the exact planner, which does not need training runs"
        )
    if question.blocks < len(question.profile.block_names):
        raise UsageError(
            f"the training runs of {model} were made block by block, but schedule "
            f"{question.training.schedule} keeps blocks that share a parameter in one stage: use the exact "
            "planner, or untie these blocks"
        )
    return costs


# ---- Brute force

LIMIT = 2_000_000  # splits; about half a minute


def mcap_bf(question: Question) -> PlannerResult:
    """Return the split of `additive` by trying every split, to reproduce the paper's comparisons.

    Splits are compared by their highest estimated peak, then by their second highest, and so on; equal ones
    by their stages from the last to the first: the smaller first block wins. C(L-1, P-1) predictions: a tenth
    of a second for 42 blocks on 4 devices. (mCAP, section 3.4.)

    Raises:
        UsageError: more than `LIMIT` splits, or no training runs were made under this training.
    """
    costs, blocks, stages = measured_costs(question), question.blocks, question.stages
    count = comb(blocks - 1, stages - 1)
    if count > LIMIT:
        raise UsageError(
            f"{question.profile.parts} on {stages} stages split in {count:,} ways, more than the {LIMIT:,} "
            "that mcap_bf tries: use the additive planner, which finds the same split"
        )
    splits = ((0, *cuts, blocks) for cuts in combinations(range(1, blocks), stages - 1))
    peaks, _, edges = min(
        (sorted((costs.peak(*stage) for stage in pairwise(edges)), reverse=True), edges[::-1], edges)
        for edges in splits
    )
    return PlannerResult(question.in_order(edges), Objective.ESTIMATED_PEAK, peaks[0], count)


# ---- Bayesian optimisation of estimated peaks


def mcap_bo(question: Question) -> PlannerResult:
    """Return the best of 75 splits by mCAP's estimates, each chosen from the results of those before.

    The search of `bayesian` over estimated peaks, which the paper compares with brute force. `additive` finds
    the proven best split by the same estimates in a fraction of a second; this search takes ten to twenty
    seconds and needs `pipefit[bayes]`. (mCAP, section 3.4.)

    Raises:
        UsageError: no training runs were made under this training, or scikit-optimize is not installed.
    """
    values = estimates(measured_costs(question), question.blocks, question.stages)
    value, edges = min((value, edges) for edges, value in values.items())
    return PlannerResult(question.in_order(edges), Objective.ESTIMATED_PEAK, value, len(values), proven=False)


def estimates(costs: AdditiveCosts, blocks: int, stages: int, *, seed: int = SEED) -> dict[Edges, float]:
    """Return the splits that the optimisation evaluates, each with its highest estimated peak.

    Raises:
        UsageError: scikit-optimize is not installed.
    """

    def value(edges: Edges) -> float:
        return max(costs.peak(*stage) for stage in pairwise(edges))

    return search(value, blocks, stages, minimiser(), seed=seed)
