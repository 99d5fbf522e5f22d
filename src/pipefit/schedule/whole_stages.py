"""Recomputing whole stages: what one may ask for in a word, and the decisions that say it in a plan.

never         every microbatch is kept
always        of every microbatch a stage keeps only the inputs, and its forward runs again before the backward
except_last   of all but the last microbatch of a step; what GPipe and torchgpipe do, whose backwards begin with it
except_one    of all but the one that costs least to keep: the one that goes backward first
"""

from __future__ import annotations

from typing import Literal

from pipefit.errors import UsageError
from pipefit.plans import ALL_MICROBATCHES, Decision, Microbatches, Run, Stage, What

Recompute = Literal["never", "except_last", "except_one", "always"]
RECOMPUTE: tuple[Recompute, ...] = ("never", "except_last", "except_one", "always")

_FROM_THE_LAST = frozenset({"torchgpipe"})  # schedules whose backwards begin with the last microbatch


def recomputed_microbatches(recompute: Recompute, schedule: str, microbatches: int) -> Microbatches | None:
    """Which microbatches of a step go forward twice; None where none does.

    Raises:
        UsageError: there is no such setting; says which there are.
    """
    if recompute not in RECOMPUTE:
        raise UsageError(f"recompute is one of {', '.join(RECOMPUTE)}, not {recompute!r}")
    if recompute == "never" or (recompute != "always" and microbatches == 1):
        return None
    if recompute == "always":
        return ALL_MICROBATCHES
    first = recompute == "except_one" and schedule not in _FROM_THE_LAST
    return Microbatches(taken=microbatches - 1, every=microbatches, first=int(first))


def whole_stages(
    stages: tuple[Stage, ...], recompute: Recompute, schedule: str, microbatches: int
) -> tuple[Decision, ...]:
    """The decisions that recompute every stage."""
    which = recomputed_microbatches(recompute, schedule, microbatches)
    return tuple(
        Decision(
            stage=number,
            subject=Run(start=stage.start, stop=stage.stop),
            what=What.RECOMPUTE,
            microbatches=which,
            why=f"recompute {recompute} was asked for",
        )
        for number, stage in enumerate(stages)
        if which is not None
    )
