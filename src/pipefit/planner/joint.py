"""The joint planner, the default: the fastest plan that fits, with all of its choices made together.

It minimises the simulated seconds of a step over splits, devices and memory decisions, among plans that fit
every device and every host at every instant by the exact ledger.

    1. Fill several splits (`planner.filling`): those of other planners, and even ones whose early stages have
       fewer blocks because they recompute more (`planner.balance`); with the most even order of unequal
       devices, with stages spread over the wires to hosts (`planner.improvement`), and in the order of the
       devices.
    2. Improve the best of them, of the plan of `mpress` and of the time split by single changes
       (`planner.improvement`), and several stages at once, at random. If a synchronous plan is still far
       from its bound, do both again, and change stages that end a step late early. Leave out unneeded
       techniques.
    3. Of long steps, simulate all microbatches.

So the plan is never slower than `mpress`, nor than the time split if that fits, and never over a device's
memory. A local search may end at a worse plan if it has more techniques. So the search runs for every subset
of the allowed techniques (recomputation, the host, peers), and each search starts from the results with one
technique less. A result depends only on its own techniques and on those searches, and each search has its own
budget. A subset is left out if the lower bound says that none of its plans fits, or is faster than a result
with another technique less. So allowing a technique never makes the plan slower.

The planner reports the gap to a bound that holds for all plans (`planner.bounds`). It is a heuristic; only
the gap is proven.

Cost: every part has a budget of simulated actions, all together some ten seconds; longer programs get fewer
simulations. Candidates of several searches are simulated once. The plan says if a budget has ended a search.
(After AdaPipe, Mist and Aceso; MPress, HPCA 2023.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, Protocol

from pipefit.planner.balance import Balance, differ
from pipefit.planner.baselines.bisection import bisection
from pipefit.planner.baselines.mpress import MpressOptions, compacted
from pipefit.planner.baselines.simple import first_last, parameters, time, uniform
from pipefit.planner.bounds import step_bound
from pipefit.planner.evaluation import Budget, Evaluation, Evaluator
from pipefit.planner.exact import exact
from pipefit.planner.filling import Filler, FillingSetting, States
from pipefit.planner.improvement import improved, spared, spread, wandered
from pipefit.planner.options import Means
from pipefit.planner.problem import Planner, PlannerResult, Question, Split
from pipefit.schema.plan import Objective


class Searched(NamedTuple):
    """The best plan of a search, with all microbatches simulated, and sentences about the search."""

    evaluation: Evaluation
    remarks: tuple[str, ...]


class _Answer(NamedTuple):
    """Result of the search with some techniques: the best plan, others that may be, and remarks."""

    found: Evaluation
    others: tuple[Evaluation, ...] = ()
    remarks: tuple[str, ...] = ()


_OTHERS = time, exact, bisection, uniform, parameters, first_last
_HOST_PARTS = 1.0, 0.5, 0.0  # parts of the capacity of the host's link for which even splits are made
_STATES: tuple[
    tuple[States, float], ...
] = (  # the state at the host, and the part of it that is updated there
    ("all", 1.0),
    ("all", 0.0),
    ("needed", 0.0),
    ("spill", 0.0),
)
_FILLING, _IMPROVING, _WANDERING = 160_000, 50_000, 40_000  # simulated actions of each part
_LENDING, _SPARING = 8_000, 20_000
_AGAIN = 3  # multiple of both budgets with which plans far from their bound are changed again
_HOPED = 1.05  # multiple of a known plan's seconds, from which random changes hardly lead to a faster one
_FAR = 0.05  # part of the bound by which a plan is slower before random changes are tried
_LITTLE = 0.5  # scale of these without recomputation
_NEAR = 1 / 32  # part of all budgets: missing memory up to which small changes are tried
_ONE_BY_ONE = 30_000  # layers of ranges computed one by one, for splits that need all peaks: some two seconds
_CLOSE = 0.02  # part of a step by which a simulation of few microbatches may differ from one of all
_FASTEST = 12  # candidates that may be simulated with all microbatches while they seem faster than the best
_WORTH = 1e-3  # part of a step by which one of these has to seem faster


def joint(question: Question) -> PlannerResult:
    """Return the fastest plan found, with its bound.

    Raises:
        UsageError: no split can be carried out, for instance if layers that cannot be repeated are to be
            recomputed.
    """
    search = JointSearch(question)
    return search.told(search.best(question.options.effort))


class JointSearch:
    """Search for the plan of one question with one device for each stage.

    A second call of `best` with more effort reuses the simulations of the first.
    """

    def __init__(self, question: Question, bound: float | None = None) -> None:
        question = replace(
            question, options=replace(question.options, data=1, tensor=1, sequences=None, shard=None)
        )
        self.bound = step_bound(question) if bound is None else bound
        self._question, self._filler = question, Filler(Evaluator(question))
        self._fillers: dict[Means, Filler] = {}
        self._bounds = {question.means: self.bound}
        self._wanders_below = 0.0  # seconds of plans for which random changes are tried

    @property
    def work(self) -> int:
        """Work done, in the unit of budgets."""
        return self._filler.evaluator.work_of_all

    def best(self, effort: float, than: float = float("inf")) -> Searched:
        """Return the fastest plan found with budgets scaled by `effort`.

        Random changes are only tried if a plan may become faster than `than` seconds, and with full effort.

        Raises:
            UsageError: no split can be carried out.
        """
        full = effort >= self._question.options.effort
        self._wanders_below = than * _HOPED if full else 0.0
        result, others, remarks = self._answer(self._question.means, effort, {})
        evaluator = self._filler.evaluator
        whole = min(
            (evaluator.whole(one.candidate) for one in _close(result, others)), key=lambda one: one.order
        )
        for evaluation in evaluator.fastest(_FASTEST):
            if whole.fits and evaluation.seconds >= whole.seconds * (1 - _WORTH):
                break
            whole = min(whole, evaluator.whole(evaluation.candidate), key=lambda one: one.order)
        ended = any(map(self._has_ended, self._fillers))
        return Searched(whole, (*remarks, *(evaluator.told_end() if ended else ())))

    def told(self, searched: Searched) -> PlannerResult:
        """Return the result of the search as a planner's result."""
        evaluator, result = self._filler.evaluator, searched.evaluation
        return PlannerResult(
            result.candidate.split,
            Objective.STEP,
            result.seconds,
            evaluated=evaluator.count,
            work=self.work,
            proven=False,
            bound=min(self.bound, result.seconds),
            decisions=None if evaluator.pinned else evaluator.decisions(result.candidate),
            remarks=searched.remarks,
            simulation=result.simulation,
        )

    def _has_ended(self, means: Means) -> bool:
        """Return whether the limit of work has ended the search with these techniques."""
        return self._fillers[means].evaluator.ended

    # ---- Subsets of the techniques

    def _answer(self, means: Means, effort: float, known: dict[Means, _Answer]) -> _Answer:
        """Return the result with these techniques, not worse than with fewer; cached in `known`."""
        if means not in known:
            known[means] = self._found(means, effort, known)
        return known[means]

    def _found(self, means: Means, effort: float, known: dict[Means, _Answer]) -> _Answer:
        """Extend the best results that use one technique less; skip those whose bound is already beaten."""
        fewer = dict[Means, _Answer]()
        for less in reversed(means.fewer) if not self._filler.evaluator.pinned else ():
            fastest = min(
                (value.found.seconds for value in fewer.values() if value.found.fits), default=float("inf")
            )
            if _is_base(less, means) or self._bound(less) < fastest * (1 + _CLOSE):
                fewer[less] = self._answer(less, effort, known)
        return self._answered(self._begun(means, effort), fewer)

    def _begun(self, means: Means, effort: float) -> Filler:
        """Return the filler with these techniques, and begin its search."""
        if means not in self._fillers:
            self._fillers[means] = self._filler.restricted(means)
        self._fillers[means].evaluator.begin(effort * (_LITTLE if means.recompute == "never" else 1.0))
        return self._fillers[means]

    def _bound(self, means: Means) -> float:
        """Return a lower bound of a step's seconds with these techniques."""
        if means not in self._bounds:
            self._bounds[means] = step_bound(self._question.using(means))
        return self._bounds[means]

    def _answered(self, filler: Filler, answers: Mapping[Means, _Answer]) -> _Answer:
        """Return the result with a filler's techniques, not worse than the results with fewer of them."""
        evaluator, means = filler.evaluator, filler.question.means
        base = next((answer for less, answer in answers.items() if _is_base(less, means)), None)
        others = dict.fromkeys(
            evaluation for answer in answers.values() for evaluation in (answer.found, *answer.others)
        )
        if base is None:
            _fill(filler, min(others, key=lambda one: one.order, default=None), self._splits)
        others |= dict.fromkeys(_compacted(filler))
        starts = sorted(dict.fromkeys((*others, *filler.best)), key=lambda one: one.order)
        if not starts:
            evaluator.refuse()
        best = starts[0]
        if evaluator.pinned or not self._is_near(best):
            return _Answer(best, (*others,))
        lends = base is not None and not best.lends and not self._has_ended(replace(means, peers=False))
        budget = Budget(evaluator, _LENDING if lends else _IMPROVING)
        best = improved(filler, best, budget=budget, at_least=self.bound, lends=lends)
        some = means.host and means.recompute != "never" and not _is_idle(best)
        far = self._bound(means) * (1 + _FAR)
        for again in (False, True) if some and best.seconds < self._wanders_below else ():
            if again:
                if self._question.training.endless or (best.fits and best.seconds <= far):
                    break
                budget = Budget(evaluator, _AGAIN * _IMPROVING)
                best = improved(filler, best, budget=budget, at_least=self.bound, latest=True)
            budget = Budget(evaluator, (_AGAIN if again else 1) * _WANDERING)
            best = wandered(filler, best, budget=budget, at_least=far, seed=int(again))
        best = spared(evaluator, best, budget=Budget(evaluator, _SPARING))
        return _Answer(best, (*others,), () if base is None else _told(best, base.found))

    def _is_near(self, evaluation: Evaluation) -> bool:
        """Return whether a plan fits, or lacks so little memory that small changes may make it fit."""
        return evaluation.over_bytes <= _NEAR * sum(self._question.cluster.budgets)

    @cached_property
    def _splits(self) -> tuple[Split, ...]:
        """Splits of other planners, in the order of `_affordable`."""
        return tuple(planner(self._question).split for planner in _affordable(self._question))


def _is_base(less: Means, means: Means) -> bool:
    """Return whether `less` is all of `means` but peers, whose memory is lent to the result of `less`."""
    return means.peers and less == replace(means, peers=False)


def _told(best: Evaluation, other: Evaluation) -> tuple[str, ...]:
    """Return a remark about lending: beside the best plan without that, or that it is declined."""
    if not best.lends:
        return () if _is_idle(best) else ("No plan was found in which lending memory makes steps shorter.",)
    if not other.fits:
        return ("Without memory of other devices, no plan was found to fit.",)
    share = 100 * (1 - best.seconds / other.seconds)
    return (f"Lending memory between devices makes steps {share:.1f} % shorter.",)


def _compacted(filler: Filler) -> list[Evaluation]:
    """Return the evaluation of the time split, if it can be carried out, and of the plan of `mpress`."""
    evaluator = filler.evaluator
    kept = evaluator.evaluate(evaluator.kept(time(filler.question).split))
    return [] if kept is None else [*dict.fromkeys((kept, compacted(filler, MpressOptions())))]


def _close(best: Evaluation, others: Sequence[Evaluation]) -> list[Evaluation]:
    """Return the best plan, and others that may be better once all microbatches are simulated."""
    return [best] + [
        other
        for other in others
        if other.candidate != best.candidate
        and (other.over_bytes, other.seconds) <= (best.over_bytes, best.seconds * (1 + _CLOSE))
    ]


def _fill(filler: Filler, best: Evaluation | None, others: Sequence[Split]) -> None:
    """Fill all splits that may be faster than `best`.

    Orders of the devices: the most even ones of unequal devices, stages spread over the wires to hosts, and
    stage s on device s.
    """
    question, pinned = filler.question, filler.evaluator.pinned
    natural, classes = question.in_order(()).devices, len(question.classes)
    ways = list[tuple[_Evenly, list[Split]]]()
    if question.means.mapping and not pinned and differ(question):
        evenly = Balance(question).arranged
        first = evenly(0.0)
        ways.append((evenly, [first, *(_at(first.devices, others) if classes == 1 else ())]))
    for devices in dict.fromkeys((natural if pinned else spread(question), natural)):
        own = _at(devices, others) if classes == 1 else [*others]
        ways.append((Balance(question, devices).split, own))
    for evenly, splits in ways:
        budget = Budget(filler.evaluator, _FILLING // len(ways))
        best = _best_in_order(filler, best, splits, evenly, budget)


def _at(devices: tuple[int, ...], splits: Sequence[Split]) -> list[Split]:
    """Return splits with the same cuts on these devices."""
    return [Split(split.edges, devices) for split in splits]


class _Evenly(Protocol):
    """A function that returns the most even split if offloading may use a part of the host's link."""

    def __call__(self, host: float, *, states: bool = False) -> Split:
        """Return the split; with `states` the host has the optimizer state."""


def _best_in_order(
    filler: Filler, best: Evaluation | None, others: Sequence[Split], evenly: _Evenly, budget: Budget
) -> Evaluation | None:
    """Return the best of these splits, of even splits with their order of devices, and of `best`.

    Even splits, and optimizer state on the host, are only tried if `best` does not keep everything within
    memory. A step waits at its end for state on the host: that of all blocks is moved if that is faster, or
    that of the fewest blocks needed.
    """
    means = filler.question.means
    best = _best_of(filler, others, best, budget)
    if best is None or not best.fits or not _is_idle(best):
        parts = _HOST_PARTS if means.host else _HOST_PARTS[-1:]
        if means.host or means.recompute != "never":
            best = _best_of(filler, [evenly(host) for host in parts], best, budget)
        splits = [
            *(evenly(host, states=True) for host in parts[:2]),
            evenly(parts[0]),
            *others[:2],
        ]
        for states, updated in _STATES if means.state and means.host else ():
            if states == "spill" and not means.spill:
                continue
            if states == "all" or best is None or not best.fits:
                best = _best_of(filler, splits, best, budget, states=states, updated=updated)
    return best


def exact_in_time(question: Question) -> bool:
    """Return whether planners that need the peaks of all ranges answer in a few seconds."""
    return question.ranges.layers_one_by_one(question.blocks) <= _ONE_BY_ONE


def _affordable(question: Question) -> list[Planner]:
    """Return the planners whose splits are filled, without those that would take too long."""
    if exact_in_time(question):
        return list(_OTHERS)
    return [planner for planner in _OTHERS if planner not in (exact, bisection)]


def _best_of(
    filler: Filler,
    splits: Sequence[Split],
    best: Evaluation | None,
    budget: Budget,
    *,
    states: States = "stay",
    updated: float = 0.0,
) -> Evaluation | None:
    """Return the best of `best` and these splits, without splits whose lower bound exceeds a plan that fits.

    If the budget has ended and nothing fits, one more split is tried.
    """
    for number, split in enumerate(dict.fromkeys(splits)):
        for host in (1.0, 0.0) if filler.question.means.host and not filler.evaluator.pinned else (0.0,):
            if best is not None and (number or best.fits) and budget.ends():
                return best
            if best is None or not best.fits or filler.fewest_seconds(split) < best.seconds:
                result = filler.fill(FillingSetting(split, host, states, updated), best)
                if result is not None and (best is None or result.order < best.order):
                    best = result
    return best


def _is_idle(evaluation: Evaluation) -> bool:
    """Return whether a plan recomputes and moves nothing."""
    return all(choice.idle for choice in evaluation.candidate.choices)
