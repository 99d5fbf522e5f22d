"""A plan for torch.distributed.pipelining: where stages begin, and the order of computing as a CSV file.

Stages begin before a module, as `pipeline(..., split_spec=...)` takes it. In the CSV a row is a rank, a cell an action
such as `0F0`, `0B0` or `0W0`, in the order in which the rank computes. torch adds the messages itself
(`_PipelineScheduleRuntime._load_csv(..., format="compute_only")`). It updates weights outside of its schedules and
recomputes inside of modules, so that neither is in the file.
"""

from __future__ import annotations

import json

from pipefit.errors import UsageError
from pipefit.lowering import lower
from pipefit.schema.actions import Action, Kind
from pipefit.schema.plan import Plan

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


def split_points(plan: Plan) -> str:
    """Where stages begin, as JSON: the module before which each one but the first does, with `BEGINNING`.

    In Python `{name: SplitPoint[where] for name, where in json.load(file).items()}` is the `split_spec`. A layer begins
    with its module; what a parent computes between two modules stays with the first of them.

    Raises:
        UsageError: a stage begins with a later call of a module that has run before: torch would divide the first one.
    """
    names = [plan.profile.layers[layer] for layer in plan.boundaries]
    if again := next((name for name in names if "@" in name), None):
        module, _, number = again.partition("@")
        raise UsageError(
            f"a stage begins with call {int(number) + 1} of {module}, and torch.distributed.pipelining divides a model "
            "at the first call of a module: plan with another number of --stages"
        )
    return json.dumps(dict.fromkeys(names, "BEGINNING"), indent=2) + "\n"


def _is_told(action: Action, starts: dict[int, int]) -> bool:
    """Whether this is the first part of a forward, or of a backward the last: a stage that is recomputed in parts
    computes both in several actions, and torch's stages in one.
    """
    if action.kind not in _KINDS or action.wait:
        return False
    return action.layers is None or action.layers[0] == starts[action.stage]
