"""The order of a plan as a schedule of `torch.distributed.pipelining`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from pipefit.lowering import computes, drops_early, schedule_named
from pipefit.schema.actions import Kind
from pipefit.schema.plan import Plan
from pipefit.torch_internals.pipelining import PipelineSchedule, place_stages, schedule_of_actions

_KINDS = {Kind.FORWARD: "F", Kind.BACKWARD: "B"}


def schedule_of(
    plan: Plan,
    stages: list[PipelineStage],
    loss: Callable[[Any, Any], Any],
    group_rank: Callable[[int], int],
) -> PipelineSchedule:
    """Return the schedule of one rank, with its `stages`.

    torch's own classes run the orders that they have; any other order runs as a list of actions. `group_rank`
    maps a rank of the plan to its rank in the stages' group.
    """
    microbatches = plan.training.microbatches
    ranks = {group_rank(rank): numbers for rank, numbers in enumerate(plan.ranks)}
    place_stages(stages, {stage: rank for rank, numbers in ranks.items() for stage in numbers})
    if len(plan.ranks) == len(plan.stages):
        if plan.training.schedule == "gpipe":
            return ScheduleGPipe(stages[0], microbatches, loss_fn=loss, scale_grads=False)
        if drops_early(plan):
            return Schedule1F1B(stages[0], microbatches, loss_fn=loss, scale_grads=False)
    orders = computes(plan, schedule_named(plan.training.schedule), microbatches)
    cells = {
        group_rank(rank): [(a.stage, _KINDS[a.kind], a.microbatch) for a in order if a.microbatch is not None]
        for rank, order in enumerate(orders)
    }
    return schedule_of_actions(stages, microbatches, loss, cells)
