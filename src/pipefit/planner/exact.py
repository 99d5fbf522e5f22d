"""The exact planner, that of the objective `peak`: the plan with the lowest peak, proven, in milliseconds.

Of stages with one device each, the highest peak of all devices is as low as possible; among splits with that highest
peak the second highest is, and so on. The cost of a stage is its peak at its place in the schedule, the same to the
byte as the simulator's, so that the plan needs no correction afterwards. 30 blocks on 4 devices take a few
milliseconds, 1,000 on 64 less than a second. The search is `planner.minmax_search`.

Where the profile has the sizes of slices, stages may have several devices, which share their work; then every number of
stages and every degree of every stage is searched too (`planner.hybrid`), and grids are taken where they lower the
highest peak.

It does not consider time: where balanced memory means unbalanced work, the step is slow. (It takes the place of the
searches of mCAP, section 3.4, and CAPTURE.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pipefit.errors import UsageError
from pipefit.planner.degrees import SINGLE
from pipefit.planner.hybrid import Search, leanest, searches
from pipefit.planner.minmax_search import is_possible, solve
from pipefit.planner.question import Found, Question


def exact(question: Question) -> Found:
    """The plan with the lowest highest peak; without grids, then with the lowest second highest, and so on."""
    return _exact(question, ())


def _exact(question: Question, every: Sequence[Search]) -> Found:
    """The same by these searches, if there are any."""
    if question.degrees == (SINGLE,) and question.options.recompute != "always":
        return _alone(question)
    found = leanest(question, every)
    best = Found(found.split, question.objective, found.value, found.evaluated)
    if SINGLE in question.degrees and question.options.recompute != "always" and is_possible(question, found.value):
        best = min(_alone(question), best, key=lambda one: one.value)
    return best._replace(proven=found.bound >= best.value, bound=min(found.bound, best.value))


def leanest_of(questions: Iterable[Question]) -> tuple[Question, Found]:
    """The question whose answer has the lowest peak, and that answer; its bound holds for all of them.

    Those of which a bound says that they have no lower one are not answered. Those that recompute come first, because
    they mostly have the lowest, and what is above it need not be told apart.

    Raises:
        UsageError: there is no plan; as the last of them says.
    """
    levels, refusal, best, known = list[tuple[float, int, Question]](), None, None, float("inf")
    kept: tuple[float, int, Sequence[Search]] = known, -1, ()  # of the lowest level, of which much is known
    for number, question in sorted(enumerate(questions), key=lambda one: one[1].options.recompute == "never"):
        try:
            alone = question.degrees == (SINGLE,) and question.options.recompute != "always"
            every = [] if alone else searches(question, question.shards)
            reached = min((one.level(known) for one in every), default=0.0)
        except UsageError as error:
            refusal = error
            continue
        level = reached * min((one.kept for one in every), default=1.0)
        levels.append((level, number, question))
        kept = min(kept, (level, number, every), key=lambda one: one[:2])
        if reached and question.shards == ("none",):  # there is a plan with this peak
            known = min(known, reached)
    bound = float("inf")
    for level, number, question in sorted(levels, key=lambda one: one[:2]):
        if best is not None and level >= best[1].value:
            bound = min(bound, level)
            break
        found = _exact(question, kept[2] if number == kept[1] else ())
        bound = min(bound, found.value if found.proven or found.bound is None else found.bound)
        if best is None or found.value < best[1].value:
            best = question, found
    if best is None:
        raise refusal or UsageError("no question was asked")
    question, found = best
    return question, found._replace(proven=bound >= found.value, bound=min(bound, found.value))


def _alone(question: Question) -> Found:
    """The best split for one device a stage."""
    split, value, evaluated, kept = solve(question)
    value = int(value) if question.equal_budgets else value
    return Found(
        split, question.objective, value, evaluated, proven=kept == 1, bound=None if kept == 1 else value * kept
    )
