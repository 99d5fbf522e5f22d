"""Choice of the schedule, the number of stages and the microbatch size, if a question leaves them open.

Every combination, an *arrangement*, is a separate question, which the joint planner solves. Lower bounds come
first: an arrangement that cannot beat a known plan is not searched. Sizes are tried from the one with four
microbatches for each stage, to smaller ones and to larger ones, while a size may be useful; a size that
cannot be profiled is left out. The remaining arrangements get a short search, and the best of them a whole
one; then others follow, the best first, while a budget of work lasts. Those whose short search ended more
than a fifth slower than the best plan are left out.

Stages may have several replicas. If all stages have the same number, one replica of the whole pipeline is an
arrangement like any other (`planner.replicas`). If the numbers differ, `planner.hybrid` estimates the fastest
plans that fit, whose stages may divide state and recompute in part, and these are simulated
(`planner.mixed_degrees`).

A large question whose state no device has room for begins with the common plans of all sizes that give
every device samples, at first those that move no state. If one fits, arrangements with a bound of at least
90 % of its seconds are not searched.

Otherwise the result is never slower than that of any arrangement whose search was within the budget; in small
questions, that is nearly every arrangement. GPipe is not a choice, because 1F1B needs no more seconds and
less memory. Schedules that change the numbers, such as asynchronous ones, are used only if requested.

Cost: a bound for each arrangement, some milliseconds, and short searches of a tenth of `joint`'s budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from pipefit.errors import UsageError
from pipefit.lowering import RECOMPUTE, Recompute
from pipefit.planner.bounds import simple_bound, step_bound
from pipefit.planner.common_plans import CommonSearch
from pipefit.planner.exact import exact, leanest_of
from pipefit.planner.hybrid import Least, budget_level, candidates
from pipefit.planner.joint import JointSearch, Searched, exact_in_time
from pipefit.planner.mixed_degrees import mixed, otherwise, refined
from pipefit.planner.neighbours import Mixed, is_small
from pipefit.planner.open_choices import (
    Arrangement,
    Space,
    Trial,
    by_distance,
    chosen_from,
    leaves_no_room,
    left_out,
)
from pipefit.planner.problem import SINGLE, Degree, PlannerResult, Question, Split, plan_of
from pipefit.planner.replicas import expanded, representative, seconds_together
from pipefit.processes import beside
from pipefit.schema.plan import Alternative
from pipefit.schema.profile import ModelProfile
from pipefit.schema.training import Training
from pipefit.simulator import Assembled
from pipefit.simulator.assembled import assembled

_SHORT = 0.1  # part of its budget with which joint tries an arrangement
_TRYING, _SEARCHING = 150_000, 500_000  # new actions of all short searches, and of all searches
_HOPELESS = 1.2  # multiple of the best plan's seconds that a short search's plan takes if no long one follows
_GAIN = 1e-3  # part of a step that an arrangement has to gain
_GAIN_OF_LARGE = 0.1  # the same, by its bound, if the question is large and a plan of replicas is known
_REPLICATED = (
    40_000  # passes of blocks in a step of replicas on all devices, above which it takes too long to read
)
_ROOM = 0.01  # part of a step that a plan must gain if it leaves a GPU hardly any room
_NEAR = 0.1  # part of a step by which plans that the local search improves may be slower than the fastest
_REFINED = 3  # number of these plans
_EACH = 10  # actions for each microbatch of a stage
_COSTLY = 20_000_000  # ranges of blocks as stages, above which no memory bound is computed
_BOUND = 0.15  # new actions that take as long as the bound for a range of blocks as one stage


class Trials:
    """Examined arrangements of a space."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self._known: dict[Arrangement, Trial] = {}
        question = space.question
        self._profiles: dict[int, ModelProfile | UsageError] = {
            question.training.microbatch_size: question.profile
        }
        self._bounds: list[float] = []  # of all examined arrangements
        self._least: dict[int, Least] = {}  # lower bounds for plans of any degrees, by microbatch size
        self._least_seconds: dict[tuple[int, int], float] = {}  # by microbatch size and devices
        self._replicas: dict[
            tuple[int, Degree], Question
        ] = {}  # of one replica, of any schedule and number of stages
        self.mixed: list[Mixed] = []  # plans that fit
        self._commons = CommonSearch()
        self._common = set[int]()  # sizes whose common plans have been searched
        self._is_replicated = False  # a plan with a replica on every device is known for a large question
        self._spent = 0.0  # new actions, or equivalent work
        self._unseen: list[int] = []  # sizes for which the budget was too small
        self._untried = self._tried_shortly = 0  # arrangements for which the budget was too small

    @property
    def sizes(self) -> tuple[int, ...]:
        """Examined microbatch sizes that could be profiled."""
        return tuple(sorted(size for size, made in self._profiles.items() if isinstance(made, ModelProfile)))

    def best(self, first: Arrangement | None = None) -> Trial | None:
        """Return the fastest plan of all arrangements; if none fits, the one that lacks the least memory.

        The search begins with the arrangement `first`. None if the question is too large for a search and
        plans of any degrees are known.

        Raises:
            UsageError: no arrangement can be carried out; the error of one of them.
        """
        if first is not None:
            self.tried(first)
        if self.space.count > 1 or self.space.grids:
            if self.space.grids:
                self._replicate()
            for size in self._visited(slices=True) if self.space.grids else ():
                self._mix(size)
            self.mixed += otherwise(self.mixed, self.space.schedules)
            self.mixed += self._refined()
            for size in self._least:
                self._mix_commonly(size)
            for size in self._visited():
                self._look_at(self._widest(size))
            for arrangement in self._others():
                self._look_at(arrangement)
        if not self._known and (self._is_replicated or self._is_too_large) and self._complete_best():
            return None
        if not self._known and not any(map(self.tried, self._like_mixed)):
            self._try(self._roomiest)
        return self._roomier(self._longest(sorted(self._known.values(), key=lambda trial: trial.order)))

    def told(self, trial: Trial | None) -> tuple[Question, PlannerResult]:
        """Return the best plan of all, with the bound of all arrangements and remarks about the choice.

        It is the plan of the best trial, unless a plan with stages of different degrees is faster.
        """
        question, result = self._told(trial)
        bounds = [*self._bounds, *map(self._least_of, self._least)]
        if trial is not None and not self._bounds:
            bounds = [trial.search.bound]
        return question, result._replace(
            bound=min(result.value, *bounds), remarks=(*self._remarks, *result.remarks)
        )

    def _told(self, trial: Trial | None) -> tuple[Question, PlannerResult]:
        """Return the plan of the best trial, or the best plan of any degrees."""
        if trial is None:
            other = self._complete_best()
            assert other is not None, "a question is abandoned only for a known answer"
            return other.question, other.found(len(self.mixed))
        question, result = trial.question, trial.search.told(trial.searched)
        if self._preferred_to(trial, trial.seconds) is None:
            question, result = self._together(trial, result)
        if (other := self._preferred_to(trial, max(result.value, trial.seconds))) is not None:
            return other.question, other.found(result.evaluated, result.remarks)
        return question, result

    def _preferred_to(self, trial: Trial, seconds: float) -> Mixed | None:
        """Return the best plan of any degrees, complete, if preferred to a trial's of this many seconds."""
        while (other := self._best_mixed) is not None:
            if trial.fits and other.seconds >= seconds * self._allowed(trial, other):
                return None
            if other.simulation.is_complete:
                return other
            self._complete(other)
        return None

    def _together(self, trial: Trial, result: PlannerResult) -> tuple[Question, PlannerResult]:
        """Return the result of a trial, expanded to all replicas and simulated with them."""
        if trial.arrangement.degree == SINGLE:
            return trial.question, result
        question = self.whole_question(trial.arrangement)
        result = expanded(question, result, trial.arrangement.degree)
        simulation = assembled(plan_of(question, result.split, decisions=result.decisions))
        return question, result._replace(value=simulation.seconds, simulation=simulation)

    @property
    def _is_too_large(self) -> bool:
        """True if a plan is known that keeps everything, and the question of a similar one is costly."""
        return self._keeps and any(_is_costly(self.question(arrangement)) for arrangement in self._like_mixed)

    def _replicate(self) -> None:
        """Find the fastest common plans of sizes that give every device samples, the smallest size first.

        Only for large questions, if no device has room for the state: all devices then mostly divide it, and
        the other plans of such a question take long to search. Every size has a budget of its own. State only
        moves if nothing fits otherwise.
        """
        devices, budgets = len(self.space.question.cluster.devices), self.space.question.cluster.budgets
        if devices == 1 or self.space.question.state_bytes <= max(budgets):
            return
        every = self.space.question.means
        for means in dict.fromkeys((replace(every, state=False, spill=False), every)):
            for size in sorted(size for size in self.space.sizes if size % devices == 0):
                with suppress(UsageError):
                    question = self.space.question_of(size, self._profile(size))
                    if _may_be_replicated(question):
                        self._least[size] = Least.of(question, self.space.schedules)
                        found = CommonSearch().fastest(question.using(means), self._fastest)
                        self.mixed += [found._replace(question=question)] if found is not None else []
                        self._common.add(size)
            if self.mixed:
                break
        self._is_replicated = bool(self.mixed)

    def _mix(self, size: int) -> None:
        """Find the fastest plan of a size whose stages have any degrees."""
        with suppress(UsageError):
            if self.degrees(size) in ((), (SINGLE,)):  # no size of a local batch was profiled, or one device
                return
            question = self.space.question_of(size, self._profile(size))
            self._least[size] = Least.of(question, self.space.schedules)
            at_most = self._fastest * (1 + _ROOM)
            may_fit = question.state_bytes <= sum(question.cluster.budgets)  # no state moves
            looks = may_fit and self._least_of(size) < at_most and exact_in_time(question)
            below = min((one.estimated for one in self.mixed), default=math.inf)
            self.mixed += filter(None, [mixed(question, at_most, below) if looks else None])

    def _mix_commonly(self, size: int) -> None:
        """Find the fastest common plan of a size.

        Skipped if a known plan is about as fast as the size's lower bound, or if the question is large and a
        known plan keeps everything.
        """
        if size not in self._common and self._least_of(size) * (1 + _ROOM) < self._fastest:
            question = self.space.question_of(size, self._profile(size))
            looks = exact_in_time(question) and (not self._keeps or is_small(question))
            self.mixed += filter(None, [self._commons.fastest(question, self._fastest) if looks else None])
            self._common.add(size)

    def _refined(self) -> Iterator[Mixed]:
        """Yield the fastest plans of any degrees that save memory, as the local search improves them."""
        near, splits = self._fastest * (1 + _NEAR), dict[tuple[Training, Split], Mixed]()
        for one in sorted(self.mixed, key=lambda one: one.seconds):
            if one.decisions and one.seconds <= near:
                splits.setdefault((one.question.training, one.split), one)
        yield from map(refined, [*splits.values()][:_REFINED])

    def question(self, arrangement: Arrangement) -> Question:
        """Return the question of an arrangement.

        Raises:
            UsageError: its size cannot be profiled, or it contradicts the request.
        """
        asked, degree = self.space.question, arrangement.degree
        shard = asked.options.shard if degree.data > 1 else None
        options = replace(asked.options, stages=arrangement.stages, shard=shard, **degree.pins)
        if degree == SINGLE:
            return replace(self.whole_question(arrangement), options=options)
        key = arrangement.microbatch_size, degree
        if key not in self._replicas:
            self._replicas[key] = representative(self.whole_question(arrangement), degree)
        question = self._replicas[key]
        how = replace(question.training, schedule=arrangement.schedule)
        return replace(question, training=how, options=replace(question.options, stages=arrangement.stages))

    def tried(self, arrangement: Arrangement) -> Trial | None:
        """Return the known trial of an arrangement, or a short one; None if it cannot be carried out."""
        if arrangement not in self._known:
            try:
                self._try(arrangement)
            except UsageError:
                return None
        return self._known[arrangement]

    def _try(self, arrangement: Arrangement, bound: float | None = None) -> None:
        """Search an arrangement with a short budget.

        Raises:
            UsageError: the arrangement cannot be carried out.
        """
        question = self.question(arrangement)
        if bound is None and _is_costly(question):
            bound = simple_bound(question)
        search = JointSearch(question, bound)
        searched = search.best(_SHORT * question.options.effort)
        apart = self._apart(arrangement, searched)
        self._known[arrangement] = Trial(arrangement, question, search, searched, search.work, apart)
        self._spent += search.work

    def _apart(self, arrangement: Arrangement, searched: Searched) -> float:
        """Return the seconds of collectives, which one replica alone does not have."""
        if arrangement.degree == SINGLE:
            return 0.0
        whole = self.whole_question(arrangement)
        return seconds_together(whole, searched.evaluation.candidate.split, arrangement.degree)

    def whole_question(self, arrangement: Arrangement) -> Question:
        """Return the question of all replicas of an arrangement."""
        size = arrangement.microbatch_size
        result = self.space.question_of(size, self._profile(size))
        return replace(result, training=replace(result.training, schedule=arrangement.schedule))

    def _profile(self, size: int) -> ModelProfile:
        """Return the profile for a microbatch size.

        Raises:
            UsageError: the profile cannot be made, for the reason in the message.
        """
        if size not in self._profiles:
            try:
                self._profiles[size] = self.space.profiles(size)
            except UsageError as refusal:
                self._profiles[size] = refusal
        made = self._profiles[size]
        if isinstance(made, UsageError):
            raise made
        return made

    # ---- Order of the search

    def _visited(self, *, slices: bool = False) -> Iterator[int]:
        """Yield the sizes in the order of the search, in each direction until one is not useful.

        The first one is that of the best common plan, if one is known. If nothing fits, larger sizes with
        local batches (`slices`) are still tried, as long as these may need no more memory on the cluster's
        devices.
        """
        order = by_distance(self.space.sizes, self.space.question.training.batch_size, max(self.space.stages))
        if slices and self.space.profiled:  # few microbatches are simulated the fastest
            order = sorted(order, reverse=True)
        if slices and self._is_replicated:
            first = min(self.mixed, key=lambda one: one.seconds).question.training.microbatch_size
            order = [first, *(size for size in order if size != first)]
        given_up = {True: False, False: False}  # smaller sizes, and larger ones
        for size in order:
            smaller, looked_at = size < order[0], len(self._bounds)
            if given_up[smaller]:
                continue
            if self._spent_on_trying:
                self._unseen.append(size)
                continue
            before = self._fastest
            yield size
            useful = any(map(self._may_win, self._bounds[looked_at:])) or self._fastest < before * (1 - _GAIN)
            may_fit = smaller or (slices and size < min(order) * len(self.space.question.cluster.devices))
            given_up[smaller] = not useful and size != order[0] and (self._fastest < math.inf or not may_fit)

    def _widest(self, size: int) -> Arrangement:
        """Return the arrangement of a size with the most stages."""
        return Arrangement(self.space.schedules[0], max(self.space.stages), size, self.space.least)

    def _others(self) -> Iterator[Arrangement]:
        """Yield the other arrangements of the examined sizes, the best sizes first."""
        known = {size: self._known.get(self._widest(size)) for size in self.sizes}
        ranks = {
            size: (math.inf, math.inf, 0) if trial is None else trial.order for size, trial in known.items()
        }
        for size in sorted(ranks, key=ranks.__getitem__):
            for degree in self.degrees(size):
                for stages in sorted(self.space.stages, reverse=True):
                    for schedule in self.space.schedules if stages > 1 else self.space.schedules[:1]:
                        arrangement = Arrangement(schedule, stages, size, degree)
                        if arrangement != self._widest(size) and self._is_possible(arrangement):
                            yield arrangement

    def degrees(self, size: int) -> tuple[Degree, ...]:
        """Return the degrees that all stages of an arrangement of this size may have."""
        return self.space.question_of(size, self._profile(size)).degrees if self.space.grids else (SINGLE,)

    def _is_possible(self, arrangement: Arrangement) -> bool:
        """Return whether the devices suffice for an arrangement, and it may be the fastest on them."""
        used, size = arrangement.stages * arrangement.degree.devices, arrangement.microbatch_size
        there = used <= len(self.space.question.cluster.devices)
        return there and (size not in self._least or self._may_win(self._least_of(size, used)))

    def _least_of(self, size: int, devices: int | None = None) -> float:
        """Return the lower bound of all plans of a size on this number of devices, by default all of them."""
        devices = devices or len(self.space.question.cluster.devices)
        if (size, devices) not in self._least_seconds:
            self._least_seconds[size, devices] = self._least[size].seconds(devices)
        return self._least_seconds[size, devices]

    def _look_at(self, arrangement: Arrangement) -> None:
        """Search an arrangement briefly, if it may be the fastest and can be carried out."""
        with suppress(UsageError):
            bound = self._bound(arrangement)
            self._bounds.append(bound)
            if self._may_win(bound) and (self._spent_on_trying or self._is_long(arrangement)):
                self._untried += 1
            elif self._may_win(bound):
                self._try(arrangement, bound)

    def _bound(self, arrangement: Arrangement) -> float:
        """Return a lower bound of the seconds of an arrangement's step.

        The simple bound if it decides, or if the bound with memory costs too much.

        Raises:
            UsageError: the arrangement is impossible.
        """
        question = self.question(arrangement)
        simple = simple_bound(question)
        if self._spent_on_trying or not self._may_win(simple):
            return simple
        cost = _BOUND * arrangement.stages * question.blocks**2
        if (self._keeps and cost > self._budget) or _is_costly(question):
            return simple
        self._spent += cost
        return step_bound(question)

    def _is_long(self, arrangement: Arrangement) -> bool:
        """Return whether two simulations take the whole budget, and a plan is known that keeps everything."""
        of_stage = min(self.question(arrangement).training.microbatches, 2 * arrangement.stages + 2)
        return self._keeps and 2 * _EACH * arrangement.stages * of_stage > self._budget

    @property
    def _spent_on_trying(self) -> bool:
        """True if the budget of short searches is spent."""
        return self._spent > self._budget

    @property
    def _budget(self) -> float:
        """Budget of all short searches.

        It is small if everything can be kept, as the searches then hardly find a faster plan.
        """
        return (_TRYING / 4 if self._keeps else _TRYING) * self.space.question.options.effort

    @property
    def _keeps(self) -> bool:
        """True if a plan is known that keeps everything on its devices and divides nothing."""
        return any(one.is_whole for one in self.mixed)

    def _may_win(self, bound: float) -> bool:
        """Return whether a plan with this bound may be visibly faster than the known ones."""
        gain = _GAIN_OF_LARGE if self._is_replicated else _GAIN
        return bound < math.inf and bound < self._fastest * (1 - gain)

    @property
    def _fastest(self) -> float:
        """Seconds of the fastest plan that is known to fit."""
        known = [trial.seconds for trial in self._known.values() if trial.fits]
        return min([*known, *(one.seconds for one in self.mixed)], default=math.inf)

    # ---- Room on GPUs

    def _roomier(self, best: Trial) -> Trial:
        """Return the best trial, or a hardly slower one that leaves every GPU room if the best does not."""
        if not (best.fits and best.tight):
            return best
        others = (
            value
            for value in self._known.values()
            if value.fits and value.seconds <= best.seconds * (1 + _ROOM)
        )
        return min(
            (other for other in others if not other.tight), key=lambda trial: trial.order, default=best
        )

    @property
    def _best_mixed(self) -> Mixed | None:
        """The fastest plan of any degrees, or a hardly slower one that leaves every GPU room."""
        fastest = min(self.mixed, key=lambda one: one.seconds, default=None)
        near = [one for one in self.mixed if fastest and one.seconds <= fastest.seconds * (1 + _ROOM)]
        roomy = (one for one in near if not leaves_no_room(one.question, one.peaks))
        return min(roomy, key=lambda one: one.seconds, default=fastest)

    def _complete_best(self) -> Mixed | None:
        """Return the best plan of any degrees, with all of its microbatches simulated."""
        while (best := self._best_mixed) is not None and not best.simulation.is_complete:
            self._complete(best)
        return best

    def _complete(self, mixed: Mixed) -> None:
        """Simulate all microbatches of a plan of any degrees, and forget the plan if it then does not fit."""
        complete = mixed.completed()
        self.mixed = [one for one in self.mixed if one is not mixed]
        self.mixed += [complete] if complete.simulation.fits else []

    def _allowed(self, trial: Trial, other: Mixed) -> float:
        """Return the part of a trial's seconds below which another plan is preferred."""
        tight = leaves_no_room(other.question, other.peaks)
        return 1 - _GAIN if tight == trial.tight else 1 - _ROOM if tight else 1 + _ROOM

    @property
    def _like_mixed(self) -> Iterator[Arrangement]:
        """Arrangements that are most similar to the fastest plans of any degrees."""
        for one in sorted(self.mixed, key=lambda one: one.seconds):
            grid, how, stages = one.split.grid(0), one.question.training, len(one.split.devices)
            yield Arrangement(how.schedule, stages, how.microbatch_size, Degree.of(grid))

    @property
    def _roomiest(self) -> Arrangement:
        """The arrangement that is most likely to fit if hardly any does."""
        return self._widest((self.sizes or self.space.sizes)[0])

    # ---- Whole searches

    def _longest(self, trials: Sequence[Trial]) -> Trial:
        """Return the best trial, after whole searches of those that may still become the best."""
        best: Trial | None = None
        for trial in trials:
            if best is not None and not self._may_win(trial.search.bound):
                continue
            if (
                best is None
                and self._spent_on_trying
                and self._keeps
                and self._fastest < trial.seconds * (1 - _GAIN)
            ):
                self._tried_shortly, best = self._tried_shortly + 1, trial
                continue
            if best is not None and best.fits and trial.seconds > best.seconds * _HOPELESS:
                continue
            if best is not None and self._spent > _SEARCHING * self.space.question.options.effort:
                self._tried_shortly += 1
                continue
            longer = trial.longer(self._fastest)
            self._known[trial.arrangement] = longer
            self._spent += longer.work - trial.work
            best = longer if best is None else min(best, longer, key=lambda one: one.order)
        assert best is not None, "at least one candidate was tried"
        return best

    @property
    def _remarks(self) -> Iterator[str]:
        """Sentences about the space of the choice, and about parts that were not searched."""
        if self.space.count > 1:
            degrees = [degree for size in self.sizes for degree in self.degrees(size)]
            yield chosen_from(self.space, self.sizes, degrees, len(self._known))
            yield from left_out(self._unseen, self._untried + self._tried_shortly)


def _may_be_replicated(question: Question) -> bool:
    """Return whether the question is large and every device may have a replica, with few enough passes."""
    devices = len(question.cluster.devices)
    passes = devices * question.blocks * question.training.microbatches
    possible = any(degree.data == devices for degree in question.degrees) and passes <= _REPLICATED
    return possible and exact_in_time(question) and not is_small(question)


def _is_costly(question: Question) -> bool:
    """Return whether a bound with memory takes many seconds."""
    return question.stages * question.blocks**2 > _COSTLY


# ---- Alternatives to the fastest plan
#
# The fewest devices are found by bisection at the plan's own schedule and microbatch size, over the leanest
# plans that keep everything (closed forms) and, if these do not fit, over short searches. Fewer than a tenth
# of the devices would take ten times as long, and are not tried. The leanest plan is the exact planner's,
# over all examined microbatch sizes, with and without recomputation. For large questions, both would take
# longer than the plan: they are asked with `fit` and `--objective peak`.

_CANDIDATES = 2_000_000  # stages up to which all divisions of state are compared
_MOST_CANDIDATES = 500_000  # stages of whole replicas, up to which alternatives are searched
_MOST_ACTIONS = 10_000  # actions of one simulation, up to which alternatives are searched
_LEANER = 0.99  # highest peak of a leaner plan, as a part of the best plan's
_FEWEST = 10  # times fewer devices than the best plan's that are tried


def alternatives(trials: Trials, best: Trial) -> tuple[Alternative, ...]:
    """Return the alternatives to the best plan, if it fits; both are searched in parallel."""
    question, actions = trials.whole_question(best.arrangement), best.searched.evaluation.simulation.actions
    is_large = actions > _MOST_ACTIONS or candidates(question, question.shards[:1]) > _MOST_CANDIDATES
    if not best.fits or is_large:
        return ()
    (leanest,) = beside(lambda: tuple(_leanest(trials, best)))
    return (*_fewest_devices(trials, best), *leanest())


def _fewest_devices(trials: Trials, best: Trial) -> Iterator[Alternative]:
    """Yield the plan on the fewest devices, if these are fewer than the best plan's."""
    pinned, arrangement = len(trials.space.stages) == 1, _of_single_devices(trials, best.arrangement)
    most = min(
        best.arrangement.stages * best.arrangement.degree.devices // arrangement.degree.devices,
        max(trials.space.stages),
    )
    low, high = most - 1 if pinned else -(-most // _FEWEST) - 1, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(trials, arrangement._replace(stages=middle)) else (middle, high)
    result = trials.tried(arrangement._replace(stages=high)) if high < most else None
    if result is not None and result.fits:
        pins = _pins(trials.space, result.question.training, stages=result.arrangement.stages)
        degrees = trials.degrees(result.arrangement.microbatch_size)
        shards = any(degree.tensor != arrangement.degree.tensor for degree in degrees)
        if len(degrees) > 1:
            pins += f" --data {arrangement.degree.data}"
            pins += f" --tensor {arrangement.degree.tensor}" if shards else ""
            if (
                len({degree.sequences for degree in degrees if degree.tensor == arrangement.degree.tensor})
                > 1
            ):
                pins += " --sequences" if arrangement.degree.sequences else " --no-sequences"
        simulation, each = result.searched.evaluation.simulation, result.arrangement.degree.devices
        yield _alternative(
            "fewest devices", result.question, simulation, pins, each=each, more_seconds=result.apart
        )


def _fits(trials: Trials, arrangement: Arrangement) -> bool:
    """Return whether an arrangement's leanest plan that keeps everything fits, or else its short search."""
    with suppress(UsageError):
        question = trials.question(arrangement)
        if exact_in_time(question) and exact(question).value <= budget_level(question):
            return True
    trial = trials.tried(arrangement)
    return trial is not None and trial.fits


def _of_single_devices(trials: Trials, best: Arrangement) -> Arrangement:
    """Return the arrangement with one device for each stage that computes the same samples per device.

    If a data degree was requested, the degree is the least requested one, with the same microbatch size.
    """
    least, options = trials.space.least, trials.space.question.options
    if best.degree == least or options.data is not None:
        return best._replace(degree=least)
    size = best.microbatch_size // best.degree.data
    return best._replace(degree=least, microbatch_size=size if size in trials.sizes else best.microbatch_size)


def _leanest(trials: Trials, best: Trial) -> Iterator[Alternative]:
    """Yield the leanest plan, if it is at least 1 % leaner than the best."""
    options = trials.space.question.options
    ways: tuple[Recompute, ...] = RECOMPUTE[:3] if options.recompute == "never" else (options.recompute,)
    lean = _lean(trials, ways)
    if lean is not None and max(lean[1].peak_bytes) <= _LEANER * max(best.searched.evaluation.peaks):
        question, simulation = lean
        again = question.options.recompute
        recompute = f" --recompute {again}" if again != options.recompute else ""
        shard = f" --shard {question.options.shard}" if question.options.shard != options.shard else ""
        pins = f"--objective peak{recompute}{shard}{_pins(trials.space, question.training)}"
        yield _alternative("leanest", question, simulation, pins)


def _lean(trials: Trials, ways: Iterable[Recompute]) -> tuple[Question, Assembled] | None:
    """Return the leanest plan of these ways to recompute, or of the first if the others are impossible."""
    for asked in (tuple(ways), tuple(ways)[:1]):
        with suppress(UsageError):
            question, result = leanest_of(_questions(trials, asked))
            simulation = assembled(plan_of(question, result.split))
            if simulation.step_seconds:
                return question, simulation
    return None


def _questions(trials: Trials, ways: Iterable[Recompute]) -> Iterator[Question]:
    """Yield the question of every examined microbatch size; with whole replicas if it has too many stages."""
    for size in trials.sizes:
        first = trials.whole_question(Arrangement(trials.space.schedules[0], max(trials.space.stages), size))
        for recompute in ways:
            question = replace(first, options=replace(first.options, recompute=recompute))
            if candidates(question, question.shards) > _CANDIDATES:
                question = replace(question, options=replace(question.options, shard=question.shards[0]))
            if exact_in_time(question):
                yield question


def _pins(space: Space, training: Training, stages: int | None = None) -> str:
    """Return the options that request this training and number of stages, as far as they were open."""
    result = []
    if stages is not None:
        result.append(f"--stages {stages}")
    if len(space.sizes) > 1:
        result.append(f"--microbatches {training.microbatches}")
    if len(space.schedules) > 1 and training.schedule != space.schedules[0] and stages != 1:
        result.append(f"--schedule {training.schedule}")
    return "".join(f" {pin}" for pin in result)


def _alternative(
    what: str,
    question: Question,
    simulation: Assembled,
    asked_by: str,
    *,
    each: int = 1,
    more_seconds: float = 0.0,
) -> Alternative:
    """Return an alternative from the simulation of its plan.

    The simulation may be that of one of `each` replicas, which add `more_seconds`.
    """
    return Alternative(
        what=what,
        schedule=question.training.schedule,
        stages=len(simulation.plan.stages),
        devices=each * len(simulation.plan.workers),
        microbatches=question.training.microbatches,
        peak_bytes=max(simulation.peak_bytes),
        step_seconds=simulation.seconds + more_seconds,
        asked_by=asked_by.strip(),
    )
