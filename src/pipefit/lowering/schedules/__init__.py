"""Schedules: the order in which every rank computes, for any plan.

A rank is one grid of devices, which all compute in the same order. With R ranks, stage s is on rank s
modulo R; the stages of one rank are its chunks 0, 1 and so on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from pipefit.errors import UsageError
from pipefit.schema.actions import Action, Kind
from pipefit.schema.plan import Plan


class Compute(NamedTuple):
    """A forward or backward of one stage for one microbatch."""

    kind: Kind
    stage: int
    microbatch: int


class Schedule(Protocol):
    """A generator of the ordered compute actions of one of `ranks` ranks; each rank has `chunks` stages."""

    def __call__(self, rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Compute]:
        """Generate the forwards and backwards of the stages of `rank`."""


class Endless(Protocol):
    """An asynchronous schedule: a generator of one rank's compute actions in a step, updates included.

    `entered` are the microbatches of the previous steps, limited to `ranks`. A step without `microbatches`
    drains the pipeline.
    """

    def __call__(self, rank: int, ranks: int, microbatches: int, entered: int) -> Iterator[Action]:
        """Generate the forwards, backwards, weight copies and updates of the rank's stage."""


Order = list[Action]  # the compute actions of one rank


def check_alone(name: str, chunks: int) -> None:
    """Check that every rank holds one stage.

    Raises:
        UsageError: a rank holds several, for which the schedule `name` is not defined.
    """
    if chunks > 1:
        raise UsageError(
            f"schedule {name} supports one stage on each device, not {chunks}: use schedule gpipe, or put "
            "every stage on a separate device"
        )


def computes(
    plan: Plan, schedule: Schedule, microbatches: int, which: Sequence[int] | None = None
) -> list[Order]:
    """Return the compute actions of every rank of `plan` under `schedule`, or only of the ranks `which`.

    Raises:
        UsageError: stage s is not on rank s modulo the number of ranks, or ranks have different numbers of
            stages.
    """
    ranks = plan.ranks
    if any(stage % len(ranks) != number for number, stages in enumerate(ranks) for stage in stages) or any(
        len(stages) != len(ranks[0]) for stages in ranks
    ):
        raise UsageError(
            f"schedule {plan.training.schedule} needs stages in turn on the devices, the same number on "
            f"each, not {', '.join(f'stages {list(stages)}' for stages in ranks)}: change the plan, or "
            "write its program by hand"
        )
    return [
        [Action(*compute) for compute in schedule(number, len(ranks), len(stages), microbatches)]
        for number, stages in enumerate(ranks)
        if which is None or number in which
    ]
