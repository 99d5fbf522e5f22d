"""The joint planner, the default: the fastest plan that fits, with all of its choices made together.

It minimises the simulated seconds of a step over splits, devices and memory decisions, among plans that fit
every device and every host at every instant by the exact ledger.

    1. Fill several splits (`planner.filling`): those of other planners, and even ones whose early stages have
       fewer blocks because they recompute more (`planner.balance`); with the most even order of unequal
       devices, with stages spread over the wires to hosts (`planner.improvement`), and in the order of the
       devices.
    2. Improve the best of them, and those of two other orders of unequal devices, by small changes
       (`planner.improvement`).
    3. Lend the memory that devices have left, if that is faster (`planner.mapping`).
    4. Polish the choices of single blocks. If the plan is still far from its bound, change several stages at
       once, at random. Leave out unneeded techniques (`planner.improvement`).
    5. Compare with the plans of `mpress` and of the time split; of long steps, simulate all microbatches.

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
from pipefit.planner.filling import Filled, Filler, FillingSetting, States
from pipefit.planner.improvement import improved, polished, spared, spread, wandered
from pipefit.planner.mapping import with_peers
from pipefit.planner.options import Means
from pipefit.planner.problem import Planner, PlannerResult, Question, Split
from pipefit.schema.plan import Objective
from pipefit.texts import counted


class Searched(NamedTuple):
    """The best plan of a search, with all microbatches simulated, and sentences about the search."""

    evaluation: Evaluation
    remarks: tuple[str, ...]


class _Answer(NamedTuple):
    """Result of the search with some techniques.

    `found` is the best plan, `filled` the best filled setting, and `others` the best plans of the searches
    with fewer techniques.
    """

    found: Evaluation
    filled: Filled
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
_FILLING, _IMPROVING, _LENDING, _POLISHING = 160_000, 80_000, 20_000, 40_000  # simulated actions of each part
_SPARING = 20_000
_WANDERING = 40_000
_HOPED = 1.05  # multiple of a known plan's seconds, from which random changes hardly lead to a faster one
_FAR = 0.05  # part of the bound by which a plan is slower before random changes are tried
_LITTLE = 0.5  # scale of these without recomputation
_NEAR = 1 / 32  # part of all budgets: missing memory up to which small changes are tried
_ONE_BY_ONE = 30_000  # layers of ranges computed one by one, for splits that need all peaks: some two seconds
_OTHER_SPLITS = 1  # number of splits polished in addition to the best
_OTHER_ORDERS = 2  # number of orders of the devices that are improved in addition to the best
_CLOSE = 0.02  # part of a step by which a simulation of few microbatches may differ from one of all
_AFAR = 0.15  # part of a step by which a start may be slower than the best improved one
_FASTEST = 12  # candidates that may be simulated with all microbatches while they seem faster than the best
_WORTH = 1e-3  # part of a step that lending has to gain


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
        result, _, others, remarks = self._answer(self._question.means, effort, {})
        evaluator = self._filler.evaluator
        whole = min(
            (evaluator.whole(one.candidate) for one in _close(result, others)), key=lambda one: one.order
        )
        for evaluation in evaluator.fastest(_FASTEST):
            if whole.fits and evaluation.seconds >= whole.seconds * (1 - _WORTH):
                break
            whole = min(whole, evaluator.whole(evaluation.candidate), key=lambda one: one.order)
        return Searched(whole, (*_told(whole, result, remarks), *self._ended))

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

    @property
    def _ended(self) -> tuple[str, ...]:
        """A sentence about the limit of work, if it has ended a search."""
        if not any(map(self._has_ended, self._fillers)):
            return ()
        count = counted(self._filler.evaluator.count, "simulated candidate")
        return (f"The search stopped at its work limit, after {count}.",)

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
        evaluator, remarks, fewer = filler.evaluator, tuple[str, ...](), [*answers.values()]
        base = next((one for less, one in answers.items() if _is_base(less, filler.question.means)), None)
        if base is not None:
            filled, remarks = _lent(filler, base.filled)
        else:
            filled = self._filled(filler, fewer)
        others = dict.fromkeys(
            evaluation for answer in fewer for evaluation in (answer.found, *answer.others)
        )
        kept = _compacted(filler)
        if evaluator.pinned:
            return _Answer(filled.found, filled, (*kept, *others), remarks)
        tried = [
            filled.found,
            *(other.found for other in filler.others(filled)[:_OTHER_SPLITS]),
            *kept,
            *others,
        ]
        tried = sorted(dict.fromkeys(tried), key=lambda one: one.order)
        means = filler.question.means
        if self._is_near(tried[0]):
            starts = tried[: 1 + _OTHER_SPLITS]
            if base is not None and not tried[0].lends and not self._has_ended(replace(means, peers=False)):
                starts = []  # the search that lacks only peers has polished these
            each = (tried[0], *(_polished(filler, one, self.bound) for one in starts))
            best = min(each, key=lambda one: one.order)
            some = means.host and means.recompute != "never" and not _is_idle(best)
            if some and best.seconds < self._wanders_below:
                far = self._bound(means) * (1 + _FAR)
                best = wandered(filler, best, budget=Budget(evaluator, _WANDERING), at_least=far)
            tried = [spared(evaluator, best, budget=Budget(evaluator, _SPARING))]
        if tried[0].lends and base is not None:
            remarks = _gained(tried[0], base.found)
        return _Answer(tried[0], filled, (*kept, *others), _told(tried[0], filled.found, remarks))

    def _filled(self, filler: Filler, fewer: Sequence[_Answer]) -> Filled:
        """Return the best split, filled and improved."""
        known = (filler.fill(answer.filled.setting, answer.filled.margins) for answer in fewer)
        best = min(
            (filled for filled in known if filled is not None), key=lambda one: one.found.order, default=None
        )
        start = _best_start(filler, best, self._splits)
        if not self._is_near(start.found):
            return start
        others = _in_other_orders(filler, start)
        result = improved(filler, start, budget=Budget(filler.evaluator, _IMPROVING), at_least=self.bound)
        for other in others:
            if self._may_lead(other, result):
                budget = Budget(filler.evaluator, _IMPROVING // (1 + len(others)))
                better = improved(filler, other, budget=budget, at_least=self.bound)
                result = min(result, better, key=lambda one: one.found.order)
        return result

    def _may_lead(self, start: Filled, best: Filled) -> bool:
        """Return whether small changes to a start may lead to a visibly better plan than the best."""
        if not best.found.fits:
            return self._is_near(start.found)
        far = best.found.seconds > self.bound * (1 + _CLOSE)
        return far and start.found.fits and start.found.seconds < best.found.seconds * (1 + _AFAR)

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


def _gained(lending: Evaluation, other: Evaluation) -> tuple[str, ...]:
    """Return a remark about a plan in which devices lend memory, beside the best plan without that."""
    if not other.fits:
        return ("Without memory of other devices, no plan was found to fit.",)
    share = 100 * (1 - lending.seconds / other.seconds)
    return (f"Lending memory between devices makes steps {share:.1f} % shorter.",)


def _told(best: Evaluation, other: Evaluation, remarks: tuple[str, ...]) -> tuple[str, ...]:
    """Return the remarks about lending, or that lending is declined if the best plan does not lend."""
    if other.lends and not best.lends:
        return ("Memory is not lent between devices, because steps would not be shorter.",)
    return remarks


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


def _polished(filler: Filler, evaluation: Evaluation, bound: float) -> Evaluation:
    """Polish a plan, unless it keeps everything."""
    if _is_idle(evaluation):
        return evaluation
    budget = Budget(filler.evaluator, _POLISHING // (1 + _OTHER_SPLITS))
    return polished(filler, evaluation, budget=budget, at_least=bound)


def _in_other_orders(filler: Filler, start: Filled) -> list[Filled]:
    """Return the best filled splits with other orders of unequal devices than `start`, one for each order."""
    if not filler.groups:
        return []
    result = {start.setting.split.devices: start}
    for other in filler.others(start):
        result.setdefault(other.setting.split.devices, other)
    return [*result.values()][1 : 1 + _OTHER_ORDERS]


def _best_start(filler: Filler, best: Filled | None, others: Sequence[Split]) -> Filled:
    """Return the best of all splits, each kept or filled, and of `best`.

    Orders of the devices: the most even ones of unequal devices, stages spread over the wires to hosts, and
    stage s on device s.
    """
    question, pinned = filler.question, filler.evaluator.pinned
    natural, classes = question.in_order(()).devices, len(question.classes)
    ways = list[tuple[_Evenly, list[Split]]]()
    if question.means.mapping and not pinned and differ(question):
        for by_lines in (False, True) if not question.training.endless else (False,):
            evenly = Balance(question, by_lines=by_lines).arranged
            first = evenly(0.0)
            ways.append((evenly, [first, *(_at(first.devices, others) if classes == 1 else ())]))
    for devices in dict.fromkeys((natural if pinned else spread(question), natural)):
        own = _at(devices, others) if classes == 1 else [*others]
        ways.append((Balance(question, devices).split, own))
    for evenly, splits in ways:
        budget = Budget(filler.evaluator, _FILLING // len(ways))
        best = _best_in_order(filler, best, splits, evenly, budget)
    return filler.evaluator.refuse() if best is None else best


def _at(devices: tuple[int, ...], splits: Sequence[Split]) -> list[Split]:
    """Return splits with the same cuts on these devices."""
    return [Split(split.edges, devices) for split in splits]


class _Evenly(Protocol):
    """A function that returns the most even split if offloading may use a part of the host's link."""

    def __call__(self, host: float, *, states: bool = False) -> Split:
        """Return the split; with `states` the host has the optimizer state."""


def _best_in_order(
    filler: Filler, best: Filled | None, others: Sequence[Split], evenly: _Evenly, budget: Budget
) -> Filled | None:
    """Return the best of these splits, of even splits with their order of devices, and of `best`.

    Even splits, and optimizer state on the host, are only tried if `best` does not keep everything within
    memory. A step waits at its end for state on the host: that of all blocks is moved if that is faster, or
    that of the fewest blocks needed.
    """
    means = filler.question.means
    best = _best_of(filler, others, best, budget)
    if best is None or not best.found.fits or not _keeps(best):
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
            if states == "all" or best is None or not best.found.fits:
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
    best: Filled | None,
    budget: Budget,
    *,
    states: States = "stay",
    updated: float = 0.0,
) -> Filled | None:
    """Return the best of `best` and these splits, without splits whose lower bound exceeds a plan that fits.

    If the budget has ended and nothing fits, one more split is tried.
    """
    for number, split in enumerate(dict.fromkeys(splits)):
        for host in (1.0, 0.0) if filler.question.means.host and not filler.evaluator.pinned else (0.0,):
            if best is not None and (number or best.found.fits) and budget.ends():
                return best
            setting = FillingSetting.of(split, host, states=states, updated=updated)
            if best is None or not best.found.fits or filler.fewest_seconds(split) < best.found.seconds:
                filled = filler.fill(setting, than=None if best is None else best.found)
                if filled is not None and (best is None or filled.found.order < best.found.order):
                    best = filled
    return best


def _keeps(filled: Filled) -> bool:
    """Return whether nothing is recomputed or moved."""
    return _is_idle(filled.found)


def _is_idle(evaluation: Evaluation) -> bool:
    """Return whether a plan recomputes and moves nothing."""
    return all(choice.idle for choice in evaluation.candidate.choices)


def _lent(filler: Filler, best: Filled) -> tuple[Filled, tuple[str, ...]]:
    """Return the plan with memory of peers, if that is faster, and a remark about it."""
    if filler.evaluator.pinned or _keeps(best) or not filler.question.means.peers:
        return best, ()
    lending = with_peers(filler, best, budget=Budget(filler.evaluator, _LENDING))
    if lending is None:
        return best, ("No plan in which devices lend each other memory was found to fit.",)
    share = 100 * lending.gained_seconds / best.found.seconds
    if lending.gained_seconds <= _WORTH * best.found.seconds:
        return best, (f"Memory is not lent between devices, because steps would take {-share:.1f} % longer.",)
    return lending.found, _gained(lending.found.found, best.found)
