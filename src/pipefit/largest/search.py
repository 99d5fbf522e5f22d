"""The search: plans until two neighbouring values are found, one that fits and one that does not; then dry runs.

Most values have a plan that is soon made and fits, or are far beyond those that have one. So the values are gone
through with such plans first, and with whole searches only from the last of them on, mostly of that one and a few more.
A dry run costs every action of two steps: only the two neighbours are run. Where one contradicts its plan, the search
goes on with the peaks of the dry run. Alternatives are looked for to the plan of the answer alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pipefit.errors import InfeasibleError, UsageError
from pipefit.largest.attempts import attempt
from pipefit.largest.growth import Growth
from pipefit.planner import Answer
from pipefit.profiler.on_demand import OnDemand
from pipefit.runtime import certify as dry_run
from pipefit.schema.fit import Attempt, Fit

# ----------------------------------------------------------------------------------------------------
# The largest number of which a statement is true: exponential search, then bisection.
#
# The statement is true up to some number and false beyond it. Finding the two neighbours at the edge takes
# about 2 log2(n) judgements if the edge is n places from the start, however far the end is. A number may also
# be refused: the statement has no answer there (a hidden size that is no multiple of the number of heads).
# Then the next larger number is judged; refusals are assumed to be cheap.
#
# Who knows where the edge is likely to be may say so (`Guess`): such a number is judged in place of the
# middle, or of one twice as far, until a few have left more than half of what there was, or have been nearer.
# A wrong guess costs a judgement, and never changes the answer. None is followed much farther than what is
# known, for a number far beyond the edge may take very long to judge.

_GUESSES = 3  # that may leave more than half of the numbers, or be nearer than twice as far
_FAR = 16  # times what is known to be true, beyond which no guess is followed
PATIENCE = 64  # refusals in a row, after which nothing larger is asked for

Judge = Callable[[int], bool | None]
Guess = Callable[[int], int]  # the largest number that is likely to be true, by the largest that is known to be


class Edge(NamedTuple):
    """The largest number found true and the smallest found false; all between were refused. None: there is no such."""

    holds: int | None
    fails: int | None


def edge(judge: Judge, numbers: range, guess: Guess | None = None) -> Edge:
    """The edge of a statement among rising `numbers`. `judge` says True, then False; None is a refusal."""
    place = _accepted(judge, numbers, range(min(len(numbers), PATIENCE)))
    if place is None:
        return Edge(None, None)
    if not judge(numbers[place]):
        return Edge(None, numbers[place])
    low, high = _gallop(judge, numbers, place, guess)
    left = _GUESSES
    while high is not None:
        wanted = (low + high) // 2 if guess is None or not left else _place(numbers, guess(numbers[low]), low, high)
        place, width = _between(judge, numbers, low, high, wanted), high - low
        if place is None:
            break
        low, high = (place, high) if judge(numbers[place]) else (low, place)
        left -= bool(left) and high - low > width // 2
    return Edge(numbers[low], None if high is None else numbers[high])


def _gallop(judge: Judge, numbers: range, first: int, guess: Guess | None) -> tuple[int, int | None]:
    """From a place that holds, in strides: the last that holds, and a later one that fails, if there is one.

    Strides double, or are as long as a guess says; where everything ahead is refused they are halved, down to the very
    next numbers.
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
    """The place of a number, or of the nearest one before it; kept between `low` and `high`."""
    return max(low + 1, min((number - numbers.start) // numbers.step, high - 1))


def _between(judge: Judge, numbers: range, low: int, high: int, wanted: int) -> int | None:
    """A place between `low` and `high` that is not refused: the nearest from `wanted` up, or else down from it."""
    above = _accepted(judge, numbers, range(max(wanted, low + 1), high))
    return above if above is not None else _accepted(judge, numbers, range(wanted - 1, low, -1))


def _accepted(judge: Judge, numbers: range, places: range) -> int | None:
    """The first of `places` whose number is not refused."""
    return next((place for place in places if judge(numbers[place]) is not None), None)


# ----------------------------------------------------------------------------------------------------

Progress = Callable[[int, int, str], None]


def find(growth: Growth, *, certify: bool = True, progress: Progress | None = None) -> Fit:
    """The largest, or smallest, value that fits, and the next one, which does not.

    Size is taken to cost memory: beyond a value that does not fit, none is looked for.

    Args:
        growth: what grows, and through which values.
        certify: also run both dry: their peaks then do not depend on what planner and profile assume.
        progress: called with (values tried, 0, what is done now, with what is known to fit).

    Raises:
        InfeasibleError: not even the smallest, or largest, value fits; says which device, and by how much.
        UsageError: every value is refused; with the first refusal. Or no plan can be made as demanded.
    """
    search = _Search(growth, progress)
    found = search.edge()
    while True:
        search.settle(found.fits)
        tried = [value for value in (found.fits, found.beyond) if value is not None]
        new = [value for value in tried if certify and search.known[value].certified_bytes is None]
        contradicted = list(map(search.certify, new))
        if not any(contradicted):
            return _answer(growth, search, found)
        found = search.edge_of_all()


class _Neighbours(NamedTuple):
    """The last value that fits, and the next one, which does not; None where there is no such."""

    fits: int | None
    beyond: int | None


@dataclass
class _Search:
    """What has been tried so far."""

    growth: Growth
    progress: Progress | None
    known: dict[int, Attempt] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    soon: dict[int, Attempt | None] = field(default_factory=dict)  # what fits by a plan that is soon made
    made: dict[int, OnDemand] = field(default_factory=dict)  # the profiles of the last values that were tried
    fitting: tuple[int, Answer] | None = None  # the last that fits; earlier ones would hold all that was searched

    def edge(self) -> _Neighbours:
        """The neighbours by plans: by those that are soon made first, then by whole ones from their edge on."""
        values = self.growth.values
        if not self.growth.searches:
            return self.edge_of_all()
        if self.growth.sense == "largest":
            last = edge(self._fits_soon, values, self._likely).holds
            onwards = values if last is None else values[values.index(last) :]
        else:
            last = edge(lambda value: _negated(self._fits_soon(value)), values).fails
            onwards = values if last is None else values[values.index(last) :: -1]
        return self.edge_of_all() if last is None else _Neighbours(*edge(self._fits, onwards))

    def edge_of_all(self) -> _Neighbours:
        """The neighbours by whole plans, and by dry runs where there were some."""
        if self.growth.sense == "largest":
            return _Neighbours(*edge(self._fits, self.growth.values))
        return _Neighbours(*reversed(edge(lambda value: _negated(self._fits(value)), self.growth.values)))

    def settle(self, value: int | None) -> None:
        """Have a whole plan of the last value that fits; the one that was soon found, where no other is."""
        if value is None or value in self.known:
            return
        self._plan(value)
        soon = self.soon[value]
        if soon is not None and not self.known[value].fits:
            self.known[value], self.fitting = soon, (value, Answer(soon.plan))

    def certify(self, value: int) -> bool:
        """Replace the planned peaks by those of the dry run: whether that contradicts the plan."""
        self._say("dry run of", value)
        planned = self.known[value]
        trace = dry_run(self.growth.task(value), planned.plan)
        self.known[value] = replace(planned, certified_bytes=trace.peak_bytes)
        return self.known[value].fits != planned.fits

    def complete(self, value: int) -> Attempt:
        """The attempt, with a plan that has its alternatives."""
        self._say("alternatives to", value)
        if self.fitting is None or self.fitting[0] != value:  # a dry run did not fit where its plan did
            found = self.growth.plan(self._known_profiles(value), value)
            soon = Answer(self.known[value].plan)
            self.fitting = value, found if attempt(value, found.plan).fits else soon
        return replace(self.known[value], plan=self.fitting[1].complete())

    @property
    def tried(self) -> tuple[Attempt, ...]:
        """What is known of every value that was tried, rising."""
        soon = {value: found for value, found in self.soon.items() if found is not None}
        return tuple(found for _, found in sorted({**soon, **self.known}.items()))

    def _likely(self, value: int) -> int:
        """The largest value that is likely to fit: by what the last two that fit need, as if that rose evenly."""
        fitting = [one for one in self.tried if one.fits and one.value <= value][-2:]
        last, first = fitting[-1], fitting[0]
        rises = (last.need_bytes - first.need_bytes) / max(1, last.value - first.value)
        each = rises if rises > 0 else last.need_bytes / max(1, last.value)
        return last.value + int((last.budget_bytes - last.need_bytes) / max(1.0, each))

    def _fits_soon(self, value: int) -> bool | None:
        """Whether a plan that is soon made fits; None where the value is refused."""
        if value not in self.soon and value not in self.refused:
            profiles = self._profiles(value, "a first look at")
            if profiles is not None:
                self.soon[value] = self.growth.soon(profiles, value)
        return None if value in self.refused else self.soon[value] is not None

    def _fits(self, value: int) -> bool | None:
        """Whether a plan fits; None where the value is refused."""
        if value not in self.known and value not in self.refused:
            if self.soon.get(value) is not None:
                return True
            self._plan(value)
        known = self.known.get(value)
        return None if known is None else known.fits

    def _plan(self, value: int) -> None:
        """Plan a value in a whole search, unless it is refused."""
        profiles = self._profiles(value, "planning")
        if profiles is not None:
            found = self.growth.plan(profiles, value)
            self.known[value] = attempt(value, found.plan)
            self.fitting = (value, found) if self.known[value].fits else self.fitting

    def _profiles(self, value: int, what: str) -> OnDemand | None:
        """The profiles of a value; None where it is refused."""
        self._say("tracing", value)
        try:
            found = self._known_profiles(value)
        except UsageError as refusal:
            self.refused[value] = str(refusal)
            return None
        found.report_to(lambda done, total, step: self._say(what, value, step))
        self._say(what, value)
        return found

    def _known_profiles(self, value: int) -> OnDemand:
        """The profiles of a value, which are kept for the two last ones: the neighbours are tried more than once.

        Raises:
            UsageError: the value is refused.
        """
        found = self.made.pop(value, None) or self.growth.profiles(value)
        self.made = dict([*self.made.items(), (value, found)][-2:])
        return found

    def _say(self, what: str, value: int, step: str = "") -> None:
        """Report what is done with a value, which step of that, and the best value that is known to fit."""
        if self.progress is not None:
            fitting = [one.value for one in self.tried if one.fits]
            best = max(fitting, default=None) if self.growth.sense == "largest" else min(fitting, default=None)
            text = f"{what} {self.growth.named(value)}" + (f", {step}" if step else "")
            self.progress(len(self.tried), 0, text + (f"; {self.growth.named(best)} fits" if best is not None else ""))


def _negated(statement: bool | None) -> bool | None:
    return None if statement is None else not statement


def _answer(growth: Growth, search: _Search, found: _Neighbours) -> Fit:
    if not search.known:
        raise UsageError(next(iter(search.refused.values())))
    best, beyond = found
    if best is None:
        assert beyond is not None  # something was tried
        raise InfeasibleError(f"not even {growth.named(beyond)} fits: {search.known[beyond].miss}")
    search.known[best] = search.complete(best)
    return Fit(
        grown=growth.name,
        sense=growth.sense,
        best=search.known[best],
        beyond=None if beyond is None else search.known[beyond],
        tried=search.tried,
        refused=search.refused,
    )
