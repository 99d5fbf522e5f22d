"""Recomputing whole stages: the settings that one may ask for, and the decisions that they become in a plan.

never         no microbatch is recomputed
always        every microbatch is: a stage keeps only its inputs, and its forward runs again before the backward
except_last   all but the last of a step are, as in GPipe and torchgpipe, whose backwards begin with the last
except_one    all but the one whose backward comes first are: to keep that one costs least
"""

from __future__ import annotations

from typing import Literal

from pipefit.decisions import ALL_MICROBATCHES, Decision, Microbatches, Run, What
from pipefit.errors import UsageError
from pipefit.grids import Stage

Recompute = Literal["never", "except_last", "except_one", "always"]
RECOMPUTE: tuple[Recompute, ...] = ("never", "except_last", "except_one", "always")

_FROM_THE_LAST = frozenset({"torchgpipe"})  # schedules whose backwards begin with the last microbatch


def recomputed_microbatches(recompute: Recompute, schedule: str, microbatches: int) -> Microbatches | None:
    """The microbatches of a step that are recomputed; None if none is.

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
    """Decisions that recompute every stage as a whole."""
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
