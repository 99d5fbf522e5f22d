"""The exact planner, the default: the best of all splits, proven, in milliseconds.

Best means: the fullest device is as empty as can be; among those splits the next fullest is, and so on. The cost of
a stage is its true peak at its place in the schedule, to the byte what the simulator finds, so there is nothing to
correct afterwards. 30 layers on 4 devices take a few milliseconds, 1,000 on 64 a part of a second. It does not see
time: where balanced memory means unbalanced work, the step is slow. (In the place of mCAP's search, section 3.4;
the search itself is `planner.lexmin`.)
"""

from __future__ import annotations

import time

from pipefit.cluster import Cluster
from pipefit.planner.answer import Found, answer
from pipefit.planner.lexmin import solve
from pipefit.planner.peaks import stage_peaks
from pipefit.planner.question import Options, Question
from pipefit.plans import Plan
from pipefit.profiles import ModelProfile
from pipefit.training import Training


def exact(profile: ModelProfile, cluster: Cluster, training: Training, options: Options = Options()) -> Plan:
    """The plan whose fullest device is least full, then the next, and so on.

    Raises:
        UsageError: the question is wrong.
        InfeasibleError: even the best does not fit, so nothing does.
    """
    began = time.perf_counter()
    question = Question(profile=profile, cluster=cluster, training=training, options=options)
    split, evaluated = solve(question)
    seconds = time.perf_counter() - began
    value = question.value(stage_peaks(question, split), split.devices)
    return answer(question, Found("exact", split, question.objective, value, evaluated, seconds))
