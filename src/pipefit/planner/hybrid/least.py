"""What no step of a question takes less than, of any plan on any grids.

Of a stage on k devices that takes c seconds for each of M microbatches, these spend M k c. So all stages together spend
what blocks take at least, each at the degree and on the kind of device at which that is the least.

Nor can all devices work from the begin of a step to its end: a step of T seconds takes at least M c, and before and
after that what one microbatch takes in the stages in front. No stage has more than w devices, as many as the largest
degree. So of w devices that work on all microbatches, in a stage or in several, those behind have (1 - 1 / M) T left at
most, and all of them do at most the work of 1 - (1 - 1 / M)^(G / w) of T w M seconds. An endless schedule waits for no
first microbatch.

Costs: a sum over the blocks for each degree.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pipefit.planner.hybrid.programme import Floats
from pipefit.planner.hybrid.tables import DegreeTables
from pipefit.planner.question import Question


class Least(NamedTuple):
    """The seconds of `work` that a microbatch is on one device, and what else the bound is made of."""

    work: float
    widest: int  # devices of a stage, at most
    microbatches: int
    endless: bool

    @staticmethod
    def of(question: Question) -> Least:
        """That of a question.

        Raises:
            UsageError: stages cannot have the degrees that are asked for.
        """
        how, widest = question.training, max(degree.devices for degree in question.degrees)
        return Least(float(work_before(question)[-1]), widest, how.microbatches, how.endless)

    def seconds(self, devices: int) -> float:
        """What no step takes less than on so many devices."""
        if self.endless:
            return self.microbatches * self.work / devices
        stages, rest = divmod(devices, self.widest)
        left = (1 - 1 / self.microbatches) ** stages * (1 - rest / self.widest / self.microbatches)
        return self.work / self.widest / (1 - left)


def work_before(question: Question) -> Floats:
    """The seconds of work that a microbatch is at least in the blocks before each edge."""
    kinds = {device.kind.key: device.kind for device in question.cluster.devices}.values()
    costs = [
        degree.devices * np.diff(forward + backward)
        for degree in question.degrees
        for kind in kinds
        for forward, backward, _ in (DegreeTables(question, degree).before(kind),)
    ]
    return np.concatenate(([0.0], np.cumsum(np.minimum.reduce(costs))))
