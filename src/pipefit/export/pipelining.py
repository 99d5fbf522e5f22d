"""A plan for torch.distributed.pipelining: the starts of stages, and the compute order as a CSV file.

Stages begin before a module, as in `pipeline(..., split_spec=...)`. A row of the CSV is a rank, a cell an
action such as `0F0`, `0B0` or `0W0`, in the rank's order, which is that of all devices of a stage. torch adds
the messages (`_PipelineScheduleRuntime._load_csv(..., format="compute_only")`). It updates weights outside of
its schedules and recomputes inside of modules, so the file has neither.
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
    """Return the file's text.

    Raises:
        UsageError: the plan's schedule is asynchronous, or stages have unequal grids: torch supports neither.
    """
    if plan.training.endless:
        raise UsageError(
            "torch.distributed.pipelining does not support asynchronous schedules such as "
            f"{plan.training.schedule}"
        )
    if len({(stage.grid.data, stage.grid.tensor) for stage in plan.stages}) > 1:
        raise UsageError(
            "torch.distributed.pipelining sends from one device to one, but stages differ in replicas or "
            "shards: plan with one number of --data and one of --tensor"
        )
    starts = {number: stage.start for number, stage in enumerate(plan.stages)}
    program = lower(plan)
    rows = [
        [
            f"{action.stage}{_KINDS[action.kind]}{action.microbatch}"
            for action in program.actions[plan.stages[stages[0]].devices[0]]
            if _is_told(action, starts)
        ]
        for stages in plan.ranks
    ]
    return "".join(",".join(row) + "\n" for row in rows)


def split_points(plan: Plan) -> str:
    """Return the starts of stages as JSON: the module before each stage but the first, with `BEGINNING`.

    In Python `{name: SplitPoint[value] for name, value in json.load(file).items()}` is the `split_spec`. A
    layer begins with its module; operations of a parent between two modules stay with the first of them.

    Raises:
        UsageError: a stage begins with a later call of a module, while torch would divide at the first call.
    """
    names = [plan.profile.layers[layer] for layer in plan.boundaries]
    if again := next((name for name in names if "@" in name), None):
        module, _, number = again.partition("@")
        raise UsageError(
            f"a stage starts with call {int(number) + 1} of {module}, but torch.distributed.pipelining "
            "splits a model only at the first call of a module: plan with another number of --stages"
        )
    return json.dumps(dict.fromkeys(names, "BEGINNING"), indent=2) + "\n"


def _is_told(action: Action, starts: dict[int, int]) -> bool:
    """Return whether this is the first part of a forward, or the last part of a backward.

    A stage that is recomputed in parts computes both in several actions, and torch's stages in one.
    """
    if action.kind not in _KINDS or action.wait:
        return False
    return action.layers is None or action.layers[0] == starts[action.stage]
