"""What a training that ran out of memory leaves: the post-mortem that its error brings along."""

from __future__ import annotations

from collections.abc import Sequence

from pipefit.errors import OutOfMemory
from pipefit.plans import Plan
from pipefit.post_mortems import PostMortem
from pipefit.runtime.runner import DeviceRunner
from pipefit.trace import Trace


def add_post_mortem(
    error: BaseException, plan: Plan, runners: Sequence[DeviceRunner], step_seconds: Sequence[float]
) -> None:
    """Add to an error what was there as a device of this process ran out of memory, if one did at an action.

    With it are the traces of all devices of the process; those of other workers end with them.
    """
    if not isinstance(error, OutOfMemory):
        return
    for runner in runners:
        if (moment := runner.record.ran_out) is None:
            continue
        runner.record.ran_out = None
        sizes = plan.cluster.devices
        error.post_mortem = PostMortem(
            plan=plan,
            trace=Trace(
                source="measured",
                steps=len(step_seconds),
                devices=tuple(one.trace(sizes[one.number].memory_bytes) for one in runners),
                step_seconds=tuple(step_seconds),
            ),
            device=runner.number,
            moment=moment.sample,
            asked_bytes=moment.asked_bytes,
            sentence=str(error),
        )
