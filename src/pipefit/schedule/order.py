"""What a schedule is: it gives the order in which every rank computes, for any plan.

A rank is one grid of devices, all of which compute in the same order. With R ranks, stage s is on rank s modulo R; the
stages of one rank are its chunks 0, 1 and so on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from pipefit.actions import Action, Kind
from pipefit.errors import UsageError
from pipefit.plans import Plan


class Compute(NamedTuple):
    """A forward or backward of one stage for one microbatch."""

    kind: Kind
    stage: int
    microbatch: int


class Schedule(Protocol):
    """Generates the compute actions of one of `ranks` ranks, in their order; each rank has `chunks` stages."""

    def __call__(self, rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Compute]:
        """The forwards and backwards of the stages of `rank`."""


Order = list[Action]  # the compute actions of one rank


def computes(plan: Plan, schedule: Schedule, microbatches: int) -> list[Order]:
    """The compute actions of every rank of `plan` under `schedule`.

    Raises:
        UsageError: stage s is not on rank s modulo the number of ranks, or ranks have different numbers of stages.
    """
    ranks = plan.ranks
    if any(stage % len(ranks) != number for number, stages in enumerate(ranks) for stage in stages) or any(
        len(stages) != len(ranks[0]) for stages in ranks
    ):
        raise UsageError(
            f"schedule {plan.training.schedule} needs stages on the devices in turn, equally many on each, not "
            f"{', '.join(f'stages {list(stages)}' for stages in ranks)}: change the plan, or write its program by hand"
        )
    return [
        [Action(*compute) for compute in schedule(number, len(ranks), len(stages), microbatches)]
        for number, stages in enumerate(ranks)
    ]
