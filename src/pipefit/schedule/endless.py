"""What a schedule without end asks of a plan, and what one of its steps leaves to the next one.

Stages update at different times, and no moment exists at which all of them have seen the same microbatches. So whatever
needs such a moment is refused here, with the ways out: it would train something else.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.actions import BACKGROUND, Action
from pipefit.decisions import ALL_MICROBATCHES, What
from pipefit.errors import UsageError
from pipefit.plans import Plan
from pipefit.schedule.order import check_alone


def check_endless(plan: Plan) -> None:
    """Check that every microbatch can be followed by an update of its own stages alone.

    Raises:
        UsageError: several stages on a device, stages that share a parameter, or a decision for some microbatches only
            or about what is moved away.
    """
    name = plan.training.schedule
    for stages in plan.ranks:
        check_alone(name, len(stages))
    for number, members in plan.summed.items():
        shared = plan.measurement.shared[number].name
        raise UsageError(
            f"parameter {shared!r} is shared by stages {', '.join(map(str, members))}, whose gradients would be added "
            f"up before every update, but schedule {name} updates every stage by itself: put all of its layers into "
            "one stage, untie them, or use schedule 1f1b"
        )
    for decision in plan.decisions:
        if decision.what is What.OFFLOAD:
            raise UsageError(f"{decision}: this cannot be carried out under schedule {name} yet; recompute instead")
        if decision.microbatches != ALL_MICROBATCHES:
            raise UsageError(
                f"{decision}: under schedule {name} it is for all microbatches or for none, because their numbers go "
                "on from step to step: recompute always, or never"
            )


def carried(actions: Sequence[Action]) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
    """The starts that these actions join without having them, and those that they leave to be joined."""
    joins = {action.start for action in actions if action.wait}
    starts = {action for action in actions if not action.wait and action.kind in BACKGROUND}
    return (
        tuple(a.start for a in actions if a.wait and a.start not in starts),
        tuple(a for a in actions if a in starts and a not in joins),
    )
