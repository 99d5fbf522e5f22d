"""The search for two neighbouring values, one with a plan that fits and one without, verified by dry runs.

Most values have a plan that is found fast and fits, or are far beyond the edge. So the search first uses such
plans, and full plans only from the last value that fits, mostly for it and a few more. Only the two
neighbours are run dry; if a dry run contradicts its plan, the search continues with the dry run's peaks. Only
the answer's plan gets alternatives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeVar

from pipefit.errors import InfeasibleError, UsageError
from pipefit.fake_cuda.chain import Chains
from pipefit.largest.attempts import Look, attempt, leaner, likely, sizes_used
from pipefit.largest.growth import Growth
from pipefit.planner import Answer, explained
from pipefit.processes import uncollected
from pipefit.profiler import NotRepeated, OnDemand, Repeated, profiled_beside
from pipefit.runtime import certify as dry_run
from pipefit.schema.fit import Attempt, Fit, refusal
from pipefit.schema.plan import Plan
from pipefit.schema.profile import Target

# ---- The edge of a statement: exponential search, then bisection
#
# The statement is true up to some number and false beyond it. Finding the two neighbours takes about 2
# log2(n) evaluations if the edge is n places from the start. A number may also be refused: the statement has
# no answer (a hidden size that is not a multiple of the number of heads). Then the next larger number is
# tried; refusals are assumed to be cheap.
#
# A `Guess` of the edge replaces the middle, or the doubled distance, until a few guesses have left more than
# half of the interval, or have been nearer. A wrong guess costs an evaluation and never changes the answer.
# Guesses far beyond known numbers are not followed, because evaluating these may take very long.

_GUESSES = 3  # guesses that may leave more than half of the numbers, or be nearer than the doubled distance
_FAR = 16  # limit of a guess, as a multiple of the largest number known to be true
_LITTLE = 1.05  # share of a device or host up to which a fast plan lacks little
_QUICK = (
    "Tried: plans found without a search, which keep everything, recompute every block, or leave updates or "
    "optimizer state to hosts. pipefit plan searches."
)
PATIENCE = 64  # consecutive refusals after which the search stops

Judge = Callable[[int], bool | None]
Guess = Callable[[int], int]  # from the largest number known to be true to the likely edge


class Edge(NamedTuple):
    """The largest number found true and the smallest found false; all numbers between were refused. None: not
    found.
    """

    holds: int | None = None
    fails: int | None = None


def edge(judge: Judge, numbers: range, guess: Guess | None = None) -> Edge:
    """Find the edge of a statement among rising `numbers`. `judge` returns True, then False; None is a
    refusal.
    """
    place = _accepted(judge, numbers, range(min(len(numbers), PATIENCE)))
    if place is None:
        return Edge()
    if not judge(numbers[place]):
        return Edge(None, numbers[place])
    low, high = _gallop(judge, numbers, place, guess)
    left = _GUESSES
    while high is not None:
        guessed = None if guess is None or not left else guess(numbers[low])
        contradicted = guessed is None or guessed >= numbers[high] + numbers.step
        wanted = (low + high) // 2 if guessed is None or contradicted else _place(numbers, guessed, low, high)
        place, width = _between(judge, numbers, low, high, wanted), high - low
        if place is None:
            break
        low, high = (place, high) if judge(numbers[place]) else (low, place)
        left -= bool(left) and high - low > width // 2
    return Edge(numbers[low], None if high is None else numbers[high])


def _gallop(judge: Judge, numbers: range, first: int, guess: Guess | None) -> tuple[int, int | None]:
    """Search in strides from a place that holds.

    Returns the last place that holds, and a later one that fails, if any.

    Strides double, or follow a guess; if everything ahead is refused, they are halved, down to the very next
    numbers.
    """
    low, stride, last, left = first, 1, len(numbers) - 1, _GUESSES
    while low < last:
        start = usual = min(low + stride, last)
        if guess is not None:
            wanted = _place(numbers, guess(numbers[low]), low, min(_FAR * (low + 1), last + 1))
            start, left = (wanted, left - (wanted < usual)) if wanted > usual or left else (usual, left)
        place = _accepted(judge, numbers, range(start, min(start + PATIENCE, last + 1)))
        if place is None and start > usual:
            guess = None
        elif place is None and stride == 1:
            break
        elif place is None:
            stride //= 2
        elif judge(numbers[place]):
            low, stride = place, 2 * stride
        else:
            return low, place
    return low, None


def _place(numbers: range, number: int, low: int, high: int) -> int:
    """Return the index of a number, or of the nearest one before it, limited to between `low` and `high`."""
    return max(low + 1, min((number - numbers.start) // numbers.step, high - 1))


def _between(judge: Judge, numbers: range, low: int, high: int, wanted: int) -> int | None:
    """Return an index between `low` and `high` that is not refused: the nearest from `wanted` up, or else
    down.
    """
    above = _accepted(judge, numbers, range(max(wanted, low + 1), high))
    return above if above is not None else _accepted(judge, numbers, range(wanted - 1, low, -1))


def _accepted(judge: Judge, numbers: range, places: range) -> int | None:
    """Return the first of `places` whose number is not refused."""
    return next((place for place in places if judge(numbers[place]) is not None), None)


# ---- The search

T = TypeVar("T")

Progress = Callable[[int, int, str], None]
_Verified = tuple[Plan, tuple[int, ...] | None] | None  # plan with a traced profile, and peaks of its dry run


def find(growth: Growth, *, certify: bool = True, progress: Progress | None = None) -> Fit:
    """Find the largest, or smallest, value with a plan that fits, and the next one, for which none is found.

    Larger sizes are assumed to need more memory: beyond a value that does not fit, none is tried.

    Args:
        growth: the growing quantity and its values.
        certify: also verify both by dry runs, whose peaks do not depend on the assumptions of planner and
            profile; a plan that is far over its budgets, or whose hosts lack memory, is not run.
        progress: called with (values tried, 0, the current activity and the best value so far).

    Raises:
        InfeasibleError: no value has a plan that fits; says which device lacks how much, and what was tried.
        UsageError: every value is refused; has the first refusal. Or no plan satisfies the demand.
    """
    search = _LargestSearch(growth, progress, certify)
    result = search.edge()
    while True:
        search.settle(result.holds)
        search.judge(result.fails)
        tried = [value for value in result if value is not None]
        verified = search.verify(tried if certify else tried[:1])
        if verified is None:
            result = search.again()
        elif verified:
            return _answer(growth, search, *result)
        else:
            result = search.edge_of_all()


_FAR_OVER = 1.1  # of a budget: a dry run of a plan beyond it would take long and hardly find that it fits


def _is_far_over(plan: Plan) -> bool:
    """Return whether the predicted peak of a device is far above its budget."""
    peaks = plan.prediction.peak_bytes if plan.prediction else ()
    return any(peak > _FAR_OVER * budget for peak, budget in zip(peaks, plan.cluster.budgets, strict=False))


@dataclass
class _LargestSearch:
    """The state of a search."""

    growth: Growth
    progress: Progress | None
    certify: bool  # whether plans are also verified by dry runs
    known: dict[int, Attempt] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    soon: dict[int, Look] = field(default_factory=dict)  # what plans that are soon made say
    made: dict[int, OnDemand | Repeated] = field(default_factory=dict)  # profiles of the nearest values
    divided: set[int] = field(default_factory=set)  # values looked at with tensor-parallel ranks
    ranks: tuple[int, ...] = ()  # numbers of them to search beyond the edge of fast plans; all if empty
    verified: set[int] = field(default_factory=set)  # values whose plans have profiles of traces
    begun: dict[int, tuple[Plan, Callable[[], _Verified]]] = field(default_factory=dict)  # verifications
    proofs: dict[int, str] = field(default_factory=dict)  # why values do not fit; empty without a proof
    searched: set[int] = field(default_factory=set)  # values with full plans
    fitting: tuple[int, Answer] | None = (
        None  # only the last one that fits, because answers hold their whole search
    )

    def edge(self) -> Edge:
        """Return the neighbours by plans: first by those found fast, then by full plans from their edge on.

        Fast plans have one device per stage; from their edge on, tensor-parallel ranks too. If a full search
        finds no plan of the last value, although a fast plan of it fits, it finds none of larger values
        either.
        """
        values = self.growth.values
        soon = self._neighbours(self._fits_soon, values, self._likely) if self.growth.searches else Edge()
        if soon.holds is not None and soon.fails is not None:
            self._begin(soon.holds)
        if soon.fails is not None and self._fits_on_ranks(soon.fails):
            soon = self._onwards(self._fits_on_ranks, soon.fails, self._likely)
        if soon.holds is None:
            return self.edge_of_all()
        if not self.settle(soon.holds):
            return soon
        self.ranks = () if soon.fails is None else self._ranks(soon.fails)
        return self._onwards(self._fits, soon.holds)

    def _onwards(self, fits: Judge, value: int, guess: Guess | None = None) -> Edge:
        """Return the neighbours among the values from `value`, which fits, on."""
        values, rising = self.growth.values, self.growth.sense == "largest"
        onwards = values[values.index(value) :: 1 if rising else -1]
        return edge(fits, onwards, guess if rising else None)

    def again(self) -> Edge:
        """Return the neighbours by traces, after one of them differed from a profile."""
        if self.growth.depths is not None:
            self.growth.depths.trace_all()
        results = self.known, self.soon, self.made, self.verified, self.divided, self.begun
        for result in (*results, self.proofs, self.searched):
            result.clear()
        self.fitting, self.ranks = None, ()
        return self.edge()

    def _begin(self, value: int) -> None:
        """Begin to verify the fast plan of a value in parallel, if no search will replace that plan."""
        look = self.soon[value]
        if look.is_long and look.fitting is not None:
            plan = look.fitting.plan
            (later,) = profiled_beside(self._target(plan), self._work(value, plan))
            self.begun[value] = plan, later

    @staticmethod
    def _target(plan: Plan) -> Target:
        return plan.profile.assumptions.target

    def verify(self, values: Sequence[int]) -> bool | None:
        """Compare the profiles of these values' plans with traces, and with `certify` also run the plans dry,
        in parallel if possible.

        Return None if a profile differs from its trace, and False if a dry run contradicts a plan.
        """
        new = [value for value in values if value not in self.verified]
        for value in new:
            self._say("tracing", value)
            if isinstance(self._known_profiles(value), OnDemand) and self._traced(value) is None:
                return None
        works = self._works(new)
        if works:
            self._say("dry run of" if self.certify else "tracing", *new)
        results = {value: work() for value, work in works.items()}
        agree = True
        for value in new:
            result, planned = results[value], self.known[value]
            if result is None:
                return None
            traced, peaks = result
            plan = replace(planned.plan, profile=traced.profile)
            self.known[value] = replace(planned, plan=plan, certified_bytes=peaks)
            agree = agree and self.known[value].fits == planned.fits
            if self.fitting is not None and self.fitting[0] == value:
                self.fitting = value, self.fitting[1]._replace(plan=plan)
            self.verified.add(value)
        return agree

    def _works(self, values: Sequence[int]) -> dict[int, Callable[[], _Verified]]:
        """Return the verifications of these values' plans: first the one for this process, then those that
        run in parallel.
        """
        plans = {value: self.known[value].plan for value in values}
        begun = {value: later for value, (plan, later) in self.begun.items() if _same(plan, plans.get(value))}
        here, *others = [value for value in values if value not in begun] or (None,)
        for value in others:
            (begun[value],) = profiled_beside(self._target(plans[value]), self._work(value, plans[value]))
        return begun if here is None else {here: self._work(here, plans[here]), **begun}

    def _work(self, value: int, plan: Plan) -> Callable[[], _Verified]:
        return partial(self._verified, value, plan)

    def _verified(self, value: int, plan: Plan) -> _Verified:
        """Return a value's plan with the profile of a trace, and with `certify` the peaks of its dry run.

        None if profile and trace differ. It reports nothing, because it may run in a fork. A plan that is far
        over its budgets, or whose hosts lack memory, is not run.
        """
        traced = self._traced(value, plan)
        hosts_lack = value in self.known and bool(self.known[value].shortage)
        if traced is None or not self.certify or hosts_lack or _is_far_over(plan):
            return traced and (traced[0], None)
        plan, chains = traced
        return plan, dry_run(self.growth.task(value), plan, chains=chains).peak_bytes

    def _traced(self, value: int, plan: Plan | None = None) -> tuple[Plan, Chains] | None:
        """Return a value's plan, or `plan`, with a trace's profile, and chains; None if profiles differ."""
        profiles, plan = self._known_profiles(value), plan or self.known[value].plan
        if isinstance(profiles, OnDemand):
            return (plan, profiles.chains) if profiles.checked(sizes_used(plan))() else None
        assert self.growth.depths is not None
        return self.growth.depths.as_traced(value, plan)

    def edge_of_all(self) -> Edge:
        """Return the neighbours by full plans, and by dry runs if any."""
        return self._neighbours(self._fits, self.growth.values)

    def _neighbours(self, fits: Judge, values: range, guess: Guess | None = None) -> Edge:
        """Return the last of `values` that fits and the next one, searched from the end that fits or, for the
        smallest value, from the end that does not.
        """
        if self.growth.sense == "largest":
            return edge(fits, values, guess)
        return Edge(*reversed(edge(lambda value: _negated(fits(value)), values)))

    def settle(self, value: int | None) -> bool:
        """Make a full plan of the last value that fits; keep the plan found fast if the full plan does not
        fit, or if a search is not worth while. Return whether the full plan fits.
        """
        if value is None or value in self.known:
            return True
        look = self.soon.get(value, Look())
        fast = look.fitting
        if fast is None or not look.is_long:
            self._plan(value)
        if fast is None or (value in self.known and self.known[value].fits):
            return True
        self.known[value] = replace(fast, plan=explained(fast.plan))
        self.fitting = value, Answer(self.known[value].plan)
        return False

    def judge(self, value: int | None) -> None:
        """Take the leanest of the fast plans for the value that does not fit, if no full plan was made."""
        if value is None or value in self.known:
            return
        soon = self.soon[value].best
        if soon is None:
            self._plan(value)
        else:
            self.known[value] = soon

    def complete(self, value: int) -> Attempt:
        """Return the attempt, with a plan that has its alternatives."""
        self._say("alternatives to", value)
        if self.fitting is None or self.fitting[0] != value:  # a dry run did not fit although its plan did
            result = self.growth.plan(self._known_profiles(value), value, ())
            traced = self._traced(value, result.plan)
            fits = traced is not None and attempt(value, traced[0]).fits
            answer = result._replace(plan=traced[0]) if traced and fits else Answer(self.known[value].plan)
            self.fitting = value, answer
        return replace(self.known[value], plan=self.fitting[1].complete())

    @property
    def tried(self) -> tuple[Attempt, ...]:
        """The attempts of all values that were tried, rising."""
        soon = {value: look.fitting for value, look in self.soon.items() if look.fitting is not None}
        return tuple(result for _, result in sorted({**soon, **self.known}.items()))

    def _likely(self, value: int) -> int:
        """The largest value that is likely to fit, by what was looked at; `value` does."""
        return likely(self.soon, value)

    def _fits_soon(self, value: int) -> bool | None:
        """Return whether a plan found fast fits; None if the value is refused."""
        if value not in self.soon and value not in self.refused:
            profiles = self._profiles(value, "a first look at")
            if profiles is not None:
                with uncollected():
                    self.soon[value] = self._of_profiles(self._look, profiles, value)
                if self.soon[value].fitting is None:
                    self._prove(value, profiles)
        return None if value in self.refused else self.soon[value].fitting is not None

    def _fits_on_ranks(self, value: int) -> bool | None:
        """Return whether a plan found fast fits, on tensor-parallel ranks if none does without."""
        if self._fits_soon(value) is False and value not in self.divided:
            self.divided.add(value)
            look = partial(self._look, divided=True)
            with uncollected():
                result = self._of_profiles(look, self._known_profiles(value), value)
            self.soon[value] = self.soon[value].or_else(result)
        return self._fits_soon(value)

    def _look(self, profiles: OnDemand | Repeated, value: int, *, divided: bool = False) -> Look:
        """Return what fast plans of a value say."""
        return self.growth.soon(profiles, value, self.soon, divided)

    def _fits(self, value: int) -> bool | None:
        """Return whether a plan fits; None if the value is refused."""
        if value not in self.known and value not in self.refused:
            if value in self.soon and self.soon[value].fitting is not None:
                return True
            self._plan(value)
        known = self.known.get(value)
        return None if known is None else known.fits

    def _plan(self, value: int) -> None:
        """Plan a value in a full search, unless it is refused."""
        profiles = self._profiles(value, "planning")
        if profiles is not None:
            ranks = self._ranks(value)
            result = self._of_profiles(
                lambda known, _: self.growth.plan(known, value, ranks), profiles, value
            )
            full, fast = attempt(value, result.plan), self.soon.get(value, Look()).best
            self.known[value] = fast if fast and not fast.fits and leaner(fast, full) else full
            self.searched.add(value)
            if full.fits:
                self.fitting = value, result
            else:
                self._prove(value, profiles)

    def _prove(self, value: int, profiles: OnDemand | Repeated) -> None:
        """Look for a proof that a value without a plan does not fit."""
        if value not in self.proofs:
            self.proofs[value] = self._of_profiles(self.growth.impossible, profiles, value)

    def _ranks(self, value: int) -> tuple[int, ...]:
        """Return the numbers of tensor-parallel ranks to search.

        The number of the fast plan that fits, or else one and those whose fast plans lack little, of this
        value or of the edge of fast plans.
        """
        look = self.soon.get(value)
        if look is None:
            return self.ranks
        if look.fitting is not None:
            return (max(stage.grid.tensor for stage in look.fitting.plan.stages),)
        return tuple(ranks for ranks, share in look.shares.items() if ranks == 1 or share < _LITTLE)

    def _of_profiles(
        self, make: Callable[[OnDemand | Repeated, int], T], profiles: OnDemand | Repeated, value: int
    ) -> T:
        """What is made of the profiles of a value; of traced ones, where the model turns out not to repeat
        itself.
        """
        try:
            return make(profiles, value)
        except NotRepeated:
            assert self.growth.depths is not None
            self.growth.depths.trace_all()
            del self.made[value]
            return make(self._known_profiles(value), value)

    def _profiles(self, value: int, what: str) -> OnDemand | Repeated | None:
        """Return the profiles of a value; None if it is refused."""
        self._say("tracing", value)
        try:
            result = self._known_profiles(value)
        except UsageError as refusal:
            self.refused[value] = str(refusal)
            return None
        result.report_to(lambda done, total, step: self._say(what, value, step=step))
        self._say(what, value)
        return result

    def _known_profiles(self, value: int) -> OnDemand | Repeated:
        """Return the profiles of a value, cached for it and for the nearest values that fit and do not fit.

        Raises:
            UsageError: the value is refused.
        """
        result = self.made.pop(value, None) or self.growth.profiles(value)
        near = self._nearest
        self.made = {known: made for known, made in self.made.items() if known in near} | {value: result}
        return result

    def _say(self, what: str, *values: int, step: str = "") -> None:
        """Report the current activity with values, and the nearest values known to fit and not to fit."""
        if self.progress is not None:
            named = " and ".join(map(self.growth.named, values))
            text = ", ".join(filter(None, (f"{what} {named}", step)))
            self.progress(len(self.tried), 0, "; ".join((text, *self._results())))

    @property
    def _nearest(self) -> tuple[int | None, int | None]:
        """The best value known to fit, and the nearest one beyond it without a plan so far."""
        fitting = {one.value for one in self.tried if one.fits}
        others = {value for value, one in self.known.items() if not one.fits}
        others |= {value for value, look in self.soon.items() if look.fitting is None}
        sign = 1 if self.growth.sense == "largest" else -1
        best = max(fitting, default=None, key=lambda value: sign * value)
        beyond = (value for value in others if best is None or sign * value > sign * best)
        return best, min(beyond, default=None, key=lambda value: sign * value)

    def _results(self) -> Iterator[str]:
        """Yield the best value known to fit, and the nearest one without a plan so far, in words."""
        for words, value in zip(("{} fits", "no plan found for {}"), self._nearest, strict=True):
            if value is not None:
                yield words.format(self.growth.named(value))


def _same(plan: Plan, other: Plan | None) -> bool:
    """Return whether two plans of a value give the same program."""
    return other is not None and (plan.stages, plan.decisions) == (other.stages, other.decisions)


def _negated(statement: bool | None) -> bool | None:
    return None if statement is None else not statement


def _answer(growth: Growth, search: _LargestSearch, best: int | None, beyond: int | None) -> Fit:
    if not search.known:
        raise UsageError(next(iter(search.refused.values())))
    if best is None:
        assert beyond is not None  # at least one value was tried
        why = refusal(growth.named(beyond), search.proofs.get(beyond, ""), search.known[beyond].nearest)
        raise InfeasibleError(f"{why}. {_searched(growth, search, beyond)}".rstrip(". "))
    search.known[best] = search.complete(best)
    return Fit(
        grown=growth.name,
        sense=growth.sense,
        best=search.known[best],
        beyond=None if beyond is None else search.known[beyond],
        tried=search.tried,
        refused=search.refused,
        impossible={value: proof for value, proof in search.proofs.items() if proof},
        searched="" if beyond is None else _searched(growth, search, beyond),
    )


def _searched(growth: Growth, search: _LargestSearch, value: int) -> str:
    """Say which plans were tried for a value without a proof, and why no further value was, in sentences."""
    plans = growth.searched if value in search.searched else _QUICK
    sentences = "" if search.proofs.get(value) else plans, growth.end if value == growth.values[-1] else ""
    return " ".join(filter(None, sentences))
