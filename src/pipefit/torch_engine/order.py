"""The order of a plan as a schedule of `torch.distributed.pipelining`, and plans that torch's engine cannot run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from pipefit.errors import UsageError
from pipefit.lowering import computes, schedule_named
from pipefit.schema.actions import Kind
from pipefit.schema.decisions import SavedTensors, What
from pipefit.schema.devices import MemberKind
from pipefit.schema.plan import Plan
from pipefit.torch_internals.pipelining import PipelineSchedule, place_stages, schedule_of_actions

_KINDS = {Kind.FORWARD: "F", Kind.BACKWARD: "B"}


def check_plan(plan: Plan) -> None:
    """Check that torch's engine can run the plan.

    Raises:
        UsageError: it cannot; names what it lacks.
    """
    if reason := next(_reasons(plan), None):
        raise UsageError(
            f"torch.distributed.pipelining {reason}: train this plan with pipefit's own runtime (pipefit.Trainer, "
            "or pipefit train without --engine), or plan without it"
        )


def _reasons(plan: Plan) -> Iterator[str]:
    """Yield what torch's engine lacks for the plan, as ends of a sentence."""
    if plan.training.endless:
        yield f"ends every step with an empty pipeline, unlike schedule {plan.training.schedule}"
    grids = [stage.grid for stage in plan.stages]
    if any(grid.tensor > 1 for grid in grids):
        yield "gets no tensor-parallel layers from a plan"
    if len({grid.data for grid in grids}) > 1:
        yield "needs the same number of replicas in every stage"
    if any(grid.shard != "none" for grid in grids):
        yield "gets no sharded state from a plan"
    for decision in plan.decisions:
        if decision.what is What.UPDATE or (
            decision.what is What.OFFLOAD and not isinstance(decision.subject, SavedTensors)
        ):
            yield f"cannot carry out the decision on {decision}"
        if decision.place is not None and any(m.kind is not MemberKind.HOST for m, _ in decision.place):
            yield f"moves saved tensors to the host only, not as in {decision}"


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
        if plan.training.schedule == "1f1b" and microbatches >= len(plan.stages):
            return Schedule1F1B(stages[0], microbatches, loss_fn=loss, scale_grads=False)
    orders = computes(plan, schedule_named(plan.training.schedule), microbatches)
    cells = {
        group_rank(rank): [(a.stage, _KINDS[a.kind], a.microbatch) for a in order if a.microbatch is not None]
        for rank, order in enumerate(orders)
    }
    return schedule_of_actions(stages, microbatches, loss, cells)
