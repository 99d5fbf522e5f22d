"""The fastest plan with any degrees, by simulation of the plans that are estimated to be the fastest.

First come whole replicas that keep everything, with neighbouring plans (`planner.neighbours`); then all
stages that may divide state or recompute in part, so that neither technique makes a plan slower. For many
blocks on many devices, if a plan is known, the second search only compares plans with one degree for all
stages. If plans take much longer than a known plan of another microbatch size, only few are examined.
Stages that lack memory are filled (`planner.filling`), and the local search of the joint planner improves
the best plans (`planner.improvement`).

Cost: a search of `planner.hybrid` for each, and a simulation for every number of stages, from the fewest
estimated seconds on, until estimates exceed the simulated seconds or a budget of work has ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipefit.planner.evaluation import Budget, Evaluation, Evaluator
from pipefit.planner.filling import Filler, FillingSetting
from pipefit.planner.hybrid import Least, candidates, fastest
from pipefit.planner.hybrid.programme import WHOLE
from pipefit.planner.hybrid.search import Hybrid, repeated
from pipefit.planner.improvement import improved
from pipefit.planner.neighbours import Mixed, Simulations, is_very_large, nearby
from pipefit.planner.options import Means
from pipefit.planner.problem import Question, Split

# ---- Filling and improvement of plans on grids

_HOST_PARTS = 1.0, 0.0  # parts of the links to hosts that filled plans use
_IMPROVING = 25_000  # new actions of the local search over a plan of one stage; twice as many over several


class _Filled:
    """Plans of a question's splits on grids with the cheapest choices that free enough memory.

    Plans that are clearly slower than `at_most` seconds are given up.
    """

    def __init__(self, question: Question, at_most: float = float("inf")) -> None:
        self._question, self._at_most = question, at_most
        self._fillers: dict[tuple[int, Means], Filler] = {}
        self._best: Evaluation | None = None

    def filler(self, split: Split, means: Means) -> Filler:
        """Return the filler of a split's number of stages with these techniques."""
        stages, every = len(split.devices), self._question.means
        if (stages, means) not in self._fillers:
            if means == every:
                options = replace(self._question.options, stages=stages)
                filler = Filler(Evaluator(replace(self._question, options=options)), returning=True)
            else:
                filler = self.filler(split, every).restricted(means)
            filler.evaluator.begin(self._question.options.effort)
            self._fillers[stages, means] = filler
        return self._fillers[stages, means]

    @property
    def work(self) -> int:
        """Work of all fillers, in new actions."""
        return sum(filler.evaluator.work for filler in self._fillers.values())

    def is_too_slow(self, split: Split) -> bool:
        """Return whether a split's plan that keeps everything is no faster than the known plans."""
        evaluator = self.filler(split, self._question.means).evaluator
        fastest = self._at_most if self._best is None else min(self._at_most, self._best.seconds)
        kept = evaluator.evaluate(evaluator.kept(split)) if fastest < float("inf") else None
        return kept is not None and kept.seconds >= fastest

    def of(self, split: Split, means: Means | None = None) -> Evaluation | None:
        """Return a split's fastest filled plan that fits, by default with all techniques, or None."""
        filler = self.filler(split, means or self._question.means)
        parts = _HOST_PARTS if filler.question.means.host else _HOST_PARTS[-1:]
        result: Evaluation | None = None
        for part in parts:
            filled = filler.fill(FillingSetting(split, part), self._best, self._at_most)
            result = _fastest(result, filled if filled is not None and filled.fits else None)
            self._best = _fastest(self._best, result)
        return result

    def improved(self, split: Split) -> Evaluation | None:
        """Return the best plan that the local search finds from a split's filled plans; None if none fits.

        It first only recomputes, then also uses hosts, then peers, each from the best plan before, so that
        another technique never makes the plan slower.
        """
        every, best = self._question.means, None
        alone = replace(every, host=False, peers=False, state=False, spill=False)
        for means in dict.fromkeys((alone, replace(every, peers=False), every)):
            starts = [one for one in (best, self.of(split, means)) if one is not None]
            if starts and not means.peers:
                starts = [min(starts, key=lambda one: one.order)]
            for start in dict.fromkeys(starts):
                best = _fastest(best, self._improved(start, means))
        return best

    def _improved(self, start: Evaluation, means: Means) -> Evaluation:
        """Return the best plan after single changes of a plan with these techniques; lending comes first."""
        filler = self.filler(start.candidate.split, means)
        least = Least.of(self._question).seconds(len(self._question.cluster.devices))
        for lends in (True, False) if means.peers else (False,):
            budget = Budget(filler.evaluator, _IMPROVING * min(2, len(start.candidate.choices)))
            start = improved(filler, start, budget=budget, at_least=least, lends=lends)
        return start

    def made(self, evaluation: Evaluation) -> Mixed:
        """Return the plan of an evaluation."""
        evaluator = self.filler(evaluation.split, self._question.means).evaluator
        return Mixed(self._question, evaluation.split, evaluation, evaluator.decisions(evaluation.candidate))


def _fastest(*some: Evaluation | None) -> Evaluation | None:
    return min((one for one in some if one is not None), key=lambda one: one.order, default=None)


def refined(best: Mixed) -> Mixed:
    """Return a plan, or a faster one that the local search finds from the filled plans of its split.

    The plan itself if one simulation takes as long as the whole search may.
    """
    if best.simulation.simulation.actions > _IMPROVING * min(2, len(best.split.devices)):
        return best
    plans = _Filled(best.question)
    found = plans.improved(best.split)
    made = best if found is None else plans.made(found)
    return made if made.seconds < best.seconds else best


# ---- Search

_CLOSE = 0.02  # part of a step by which estimates may be too long
_FAR = 0.05  # part of a step by which the first plan may be slower than a known one
_MOST = 8  # number of plans that are simulated
_MOST_OF_LARGE = 2  # the same, of each degree if the question is large
_WORTH = 0.01  # part of a step that dividing state, or recomputing, has to gain
_CANDIDATES = 2_000_000  # number of compared stages, if a plan that fits is known
_MIXED_WORK = 60_000  # actions read, after which no other plan is simulated
_LITTLE = 5_000  # the same limit if plans are far slower than a known one
_PASSES = 50_000  # passes of microbatches through stages, above which a simulation takes several seconds


def mixed(
    question: Question, at_most: float = float("inf"), below: float = float("inf"), fewest: int = 1
) -> Mixed | None:
    """Return the fastest plan in which no state moves; None if none fits.

    Stages save memory if that is faster or nothing else fits. `at_most` are the seconds of a known plan that
    fits: slower plans are not searched, so the result may be None. It is also None if simulations are long
    and no plan is estimated below `below` seconds, the estimate of the known plan. Plans have at least
    `fewest` stages.
    """
    estimated = fastest(question, _MOST, question.shards[:1], at_most * (1 + _CLOSE))
    estimated = _of_stages(fewest, estimated)
    least = estimated[0].value if estimated else float("inf")
    if _is_long(question) and at_most < float("inf") and least >= below:
        return None
    result = _mixed(question, estimated, at_most, fewest)
    return result and result._replace(estimated=least)


def _of_stages(fewest: int, plans: Sequence[Hybrid]) -> list[Hybrid]:
    """Return the plans with at least this number of stages."""
    return [one for one in plans if len(one.stages) >= fewest]


def otherwise(known: Sequence[Mixed], schedules: Sequence[str]) -> Iterator[Mixed]:
    """Yield plans under other schedules that fit and are faster than all of `known`.

    The fastest known plan under each of them, and the fastest plan of its microbatch size, unless the
    question is very large. Plans of one stage are the same under 1F1B and eager 1F1B.
    """
    best = min(known, key=lambda one: one.seconds, default=None)
    if best is None:
        return
    how, at_most = best.question.training, best.seconds
    for schedule in schedules:
        if schedule == how.schedule:
            continue
        question = replace(best.question, training=replace(how, schedule=schedule))
        same: Mixed | None = None
        if len(best.split.devices) > 1:
            same = Simulations(question).fitting(best.split, best.decisions, at_most)
        at_most = at_most if same is None else same.seconds
        looks = not is_very_large(question)
        other = mixed(question, at_most, best.estimated, fewest=2) if looks else None
        yield from filter(None, (same, other))


def _is_long(question: Question) -> bool:
    """Return whether many microbatches pass through many stages if all devices are used."""
    widest = max(degree.devices for degree in question.degrees)
    return -(-len(question.cluster.devices) // widest) * question.training.microbatches > _PASSES


def _mixed(question: Question, estimated: Sequence[Hybrid], at_most: float, fewest: int) -> Mixed | None:
    """Return the fastest of the plans estimated to be fast and of their neighbours."""
    first, every = question.shards[:1], question.shards
    again = question.options.recompute == "never" and question.means.recompute != "never"
    simulations = Simulations(question)
    best = _simulated(simulations, estimated, None, at_most)
    if _is_enough(simulations, best, at_most):
        return None
    best = nearby(simulations, best, at_most)
    if first == every and not again:
        return best
    at_most = at_most if best is None else min(at_most, best.seconds)
    others = _of_stages(fewest, _saving(question, at_most * (1 + _CLOSE), again=again))
    if best is not None:
        others = [other for other in others if any(stage.way != WHOLE for stage in other.stages)]
    return _simulated(simulations, others, best, at_most)


def _saving(question: Question, at_most: float, *, again: bool) -> list[Hybrid]:
    """Return the estimated plans whose stages may save memory, the fastest first.

    If the question is large and a plan is known, only a few plans with one degree for all stages; none of a
    degree that has too many candidates itself.
    """
    if at_most == float("inf") or not _is_large(question, again=again):
        return fastest(question, _MOST, question.shards, at_most, again=again)
    result = list[Hybrid]()
    for degree in question.degrees:
        alone = replace(question, options=replace(question.options, **degree.pins))
        if not _is_large(alone, again=again):
            result += fastest(alone, _MOST_OF_LARGE, alone.shards, at_most, again=again)
    return sorted(result, key=lambda one: one.value)


def _is_large(question: Question, *, again: bool) -> bool:
    """Return whether there are too many stages to compare all ways to save memory."""
    return candidates(question, question.shards, again=again) > _CANDIDATES


def _simulated(
    simulations: Simulations, estimated: Sequence[Hybrid], best: Mixed | None, at_most: float = float("inf")
) -> Mixed | None:
    """Return the fastest of the estimated plans, or `best` if they gain too little.

    Only a few are simulated if they take much longer than `at_most` seconds.
    """
    enough = float("inf") if best is None else best.seconds * (1 - _WORTH)
    until = simulations.work + simulations.share_of(_MIXED_WORK)
    plans = _Filled(simulations.question, min(at_most, enough))
    for result in estimated:
        ended = simulations.work + plans.work > until
        ended = ended or _is_enough(simulations, best, at_most)
        if best is not None and (ended or result.value > best.seconds * (1 + _CLOSE)):
            break
        plan = _made(simulations, result, plans)
        if plan is not None and plan.seconds < enough:
            best, enough = plan, plan.seconds
    return best


def _made(simulations: Simulations, hybrid: Hybrid, plans: _Filled) -> Mixed | None:
    """Return the plan of an estimated one, with as little recomputation or offloading as its memory needs.

    None if it would be slower than the known plans even if it kept everything.
    """
    question, split, decisions = simulations.question, hybrid.split, repeated(simulations.question, hybrid)
    if decisions and plans.is_too_slow(split):
        return None
    filled = plans.of(split) if decisions else None
    if filled is not None:
        return plans.made(filled)
    return Mixed(question, split, simulations.of(split, decisions), decisions)


def _is_enough(simulations: Simulations, best: Mixed | None, at_most: float) -> bool:
    """Return whether, after a little work, the best plan found is far slower than a known one."""
    return (
        best is not None
        and best.seconds > at_most * (1 + _FAR)
        and simulations.work > simulations.share_of(_LITTLE)
    )
