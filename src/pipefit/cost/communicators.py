"""NCCL's communicators, counted from a program: each takes memory of a GPU outside of the caching allocator."""

from __future__ import annotations

from pipefit.message_order import channels
from pipefit.plans import Plan
from pipefit.program import Program


def sums(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The sets of stages that add tensors up: gradients of shared parameters, and vectors of the agreement."""
    members = dict.fromkeys(plan.summed.values())
    if plan.training.agrees:
        members[tuple(stages[0] for stages in plan.ranks)] = None
    return tuple(members)


def communicators(plan: Plan, program: Program, device: int) -> int:
    """How many communicators the worker of a device makes: one for each direction of a boundary to another device, one
    for each set of stages of which one is here, and one that brings the loss to all workers.
    """
    if len(plan.ranks) == 1:
        return 0
    ends = [
        channel
        for channel in channels(program.actions, program.placement)
        if device in (channel.source, channel.target)
    ]
    here = [stages for stages in sums(plan) if device in {plan.stages[stage].device for stage in stages}]
    return len(ends) + len(here) + 1
