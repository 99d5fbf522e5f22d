"""The exact planner, that of the objective `peak`: the split with the lowest peak, proven, in milliseconds.

The highest peak of all devices is as low as possible; among splits with that highest peak the second highest is, and so
on. The cost of a stage is its peak at its place in the schedule, the same to the byte as the simulator's, so that the
plan needs no correction afterwards. 30 blocks on 4 devices take a few milliseconds, 1,000 on 64 less than a second. It
does not consider time: where balanced memory means unbalanced work, the step is slow. The search is
`planner.minmax_search`. (It takes the place of mCAP's search, section 3.4.)
"""

from __future__ import annotations

from pipefit.planner.minmax_search import solve
from pipefit.planner.peaks import stage_peaks
from pipefit.planner.question import Found, Question


def exact(question: Question) -> Found:
    """The split with the lowest highest peak, then the lowest second highest, and so on."""
    split, evaluated = solve(question)
    value = question.value(stage_peaks(question, split), split.devices)
    return Found(split, question.objective, value, evaluated)
