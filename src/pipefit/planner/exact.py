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

from pipefit.planner.degrees import SINGLE
from pipefit.planner.hybrid import leanest
from pipefit.planner.minmax_search import solve
from pipefit.planner.peaks import stage_peaks
from pipefit.planner.question import Found, Question


def exact(question: Question) -> Found:
    """The plan with the lowest highest peak; without grids, then with the lowest second highest, and so on."""
    alone = _alone(question) if SINGLE in question.degrees else None
    if alone is not None and question.degrees == (SINGLE,):
        return alone
    found = leanest(question)
    if alone is not None and alone.value <= found.value:
        return alone
    return Found(found.split, question.objective, found.value, found.evaluated)


def _alone(question: Question) -> Found:
    """The best split for one device a stage."""
    split, evaluated = solve(question)
    value = question.value(stage_peaks(question, split), split.devices)
    return Found(split, question.objective, value, evaluated)
