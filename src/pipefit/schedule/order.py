"""The order in which ranks compute: what a schedule says, for every plan that uses it.

A rank is one grid of devices; all of them compute in one order. Where ranks hold several stages, stages go round them
in turn: with R ranks, stage s is on rank s modulo R, and a rank's stages are its chunks 0, 1, and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from pipefit.errors import UsageError
from pipefit.plans import Plan
from pipefit.program import Action, Kind


class Compute(NamedTuple):
    """One thing a rank computes: `kind` of a stage for a microbatch."""

    kind: Kind
    stage: int
    microbatch: int


Schedule = Callable[[int, int, int, int], Iterator[Compute]]  # rank, ranks, chunks, microbatches
Order = list[Action]  # of one rank: compute actions alone


def computes(plan: Plan, schedule: Schedule, microbatches: int) -> list[Order]:
    """The compute actions of every rank of `plan` under `schedule`.

    Raises:
        UsageError: the stages of the plan do not go round its ranks in turn.
    """
    ranks = plan.ranks
    if any(stage % len(ranks) != number for number, stages in enumerate(ranks) for stage in stages) or any(
        len(stages) != len(ranks[0]) for stages in ranks
    ):
        raise UsageError(
            f"schedule {plan.training.schedule} wants stages that go round the devices in turn, as often on each, not "
            f"{', '.join(f'stages {list(stages)}' for stages in ranks)}: change the plan, or write its program by hand"
        )
    return [
        [Action(*compute) for compute in schedule(number, len(ranks), len(stages), microbatches)]
        for number, stages in enumerate(ranks)
    ]
