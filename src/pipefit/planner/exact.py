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

from collections.abc import Iterable

from pipefit.errors import UsageError
from pipefit.planner.degrees import SINGLE
from pipefit.planner.hybrid import leanest, lowest_peak
from pipefit.planner.minmax_search import solve
from pipefit.planner.peaks import stage_peaks
from pipefit.planner.question import Found, Question


def exact(question: Question) -> Found:
    """The plan with the lowest highest peak; without grids, then with the lowest second highest, and so on."""
    alone = _alone(question) if SINGLE in question.degrees else None
    if alone is not None and question.degrees == (SINGLE,):
        return alone
    found = leanest(question)
    best = Found(found.split, question.objective, found.value, found.evaluated)
    if alone is not None and alone.value <= found.value:
        best = alone
    return best._replace(proven=found.bound >= best.value, bound=min(found.bound, best.value))


def leanest_of(questions: Iterable[Question]) -> tuple[Question, Found]:
    """The question whose answer has the lowest peak, and that answer; its bound holds for all of them.

    Those of which a bound says that they have no lower one are not answered. Those that recompute come first, because
    they mostly have the lowest, and what is above it need not be told apart.

    Raises:
        UsageError: there is no plan; as the last of them says.
    """
    levels, refusal, best, known = list[tuple[float, int, Question]](), None, None, float("inf")
    for number, question in sorted(enumerate(questions), key=lambda one: one[1].options.recompute == "never"):
        try:
            level = 0.0 if question.degrees == (SINGLE,) else lowest_peak(question, known)
        except UsageError as error:
            refusal = error
            continue
        levels.append((level, number, question))
        if level and question.shards == ("none",):  # there is a plan with this peak
            known = min(known, level)
    bound = float("inf")
    for level, _, question in sorted(levels, key=lambda one: one[:2]):
        if best is not None and level >= best[1].value:
            bound = min(bound, level)
            break
        found = exact(question)
        bound = min(bound, found.value if found.proven or found.bound is None else found.bound)
        if best is None or found.value < best[1].value:
            best = question, found
    if best is None:
        raise refusal or UsageError("no question was asked")
    question, found = best
    return question, found._replace(proven=bound >= found.value, bound=min(bound, found.value))


def _alone(question: Question) -> Found:
    """The best split for one device a stage."""
    split, evaluated = solve(question)
    value = question.value(stage_peaks(question, split), split.devices)
    return Found(split, question.objective, value, evaluated)
