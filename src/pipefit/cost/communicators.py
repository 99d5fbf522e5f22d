"""NCCL's communicators, counted from a program: each takes memory of a GPU outside of the caching allocator."""

from __future__ import annotations

from pipefit.actions import Action, Kind, Subject
from pipefit.message_order import channels
from pipefit.plans import Plan
from pipefit.program import Program


def members(plan: Plan, action: Action) -> tuple[int, ...]:
    """The devices that take part in a collective, in the order of their stages and replicas."""
    if action.kind is Kind.AGREE:
        return plan.workers
    if isinstance(action.subject, Subject):
        return tuple(device for stage in plan.summed[action.subject.layer] for device in plan.stages[stage].devices)
    return plan.stages[action.stage].devices


def sums(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """The sets of devices that add tensors up: gradients of replicas and of shared parameters, and vectors of the
    agreement.
    """
    replicated = (number for number, stage in enumerate(plan.stages) if stage.grid.data > 1)
    found = [Action(Kind.REDUCE, number) for number in replicated]
    found += [Action(Kind.REDUCE, stages[0], subject=Subject(n, "shared")) for n, stages in plan.summed.items()]
    found += [Action(Kind.AGREE, 0)] * plan.training.agrees
    return tuple(dict.fromkeys(members(plan, action) for action in found))


def communicators(plan: Plan, program: Program, device: int) -> int:
    """How many communicators the worker of a device makes: one for each direction of a boundary to another device, one
    for each set of devices that add something up, and one that brings the loss to all workers.
    """
    if len(plan.workers) == 1:
        return 0
    ends = [
        channel
        for channel in channels(program.actions, program.placement)
        if device in (channel.source, channel.target)
    ]
    here = [devices for devices in sums(plan) if device in devices]
    return len(ends) + len(here) + 1
