"""A plan's order of computing as the CSV file that torch.distributed.pipelining reads.

A row is a rank, a cell an action such as `0F0`, `0B0` or `0W0`, in the order in which the rank computes. torch adds the
messages itself (`_PipelineScheduleRuntime._load_csv(..., format="compute_only")`). It updates weights outside of its
schedules and recomputes inside of modules, so that neither is in the file.
"""

from __future__ import annotations

from pipefit.actions import Action, Kind
from pipefit.errors import UsageError
from pipefit.plans import Plan
from pipefit.schedule import lower

_KINDS = {
    Kind.FORWARD: "F",
    Kind.FORWARD_ONLY: "F",
    Kind.BACKWARD: "B",
    Kind.INPUT_GRADIENTS: "I",
    Kind.WEIGHT_GRADIENTS: "W",
}


def pipelining_csv(plan: Plan) -> str:
    """The file's text.

    Raises:
        UsageError: the plan's schedule never flushes, or a stage is on several devices: torch has neither.
    """
    if plan.training.endless:
        raise UsageError(
            f"torch.distributed.pipelining has no schedule that never flushes, as {plan.training.schedule}"
        )
    devices = [stage.device for stage in plan.stages]
    starts = {number: stage.start for number, stage in enumerate(plan.stages)}
    program = lower(plan)
    rows = [
        [f"{one.stage}{_KINDS[one.kind]}{one.microbatch}" for one in program.actions[device] if _is_told(one, starts)]
        for device in dict.fromkeys(devices)
    ]
    return "".join(",".join(row) + "\n" for row in rows)


def _is_told(action: Action, starts: dict[int, int]) -> bool:
    """Whether this is the first part of a forward, or of a backward the last: a stage that is recomputed in parts
    computes both in several actions, and torch's stages in one.
    """
    if action.kind not in _KINDS or action.wait:
        return False
    return action.layers is None or action.layers[0] == starts[action.stage]
